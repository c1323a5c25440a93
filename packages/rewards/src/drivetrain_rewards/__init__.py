"""Verifiers and reward functions with deadlines: every sample gets a score, or a failure with a named reason."""

from typing import TYPE_CHECKING, Any

from drivetrain_rewards._functions import exact_match, last_number
from drivetrain_rewards._inline import InlineRewards
from drivetrain_rewards._pool import RewardPool
from drivetrain_rewards._rewards import Rewards
from drivetrain_rewards._types import FailureReason, Outcome, RewardFunction, RewardRequest, Score, ScoreFailure

if TYPE_CHECKING:
    from drivetrain_rewards._math import math_answer

__all__ = [
    "FailureReason",
    "InlineRewards",
    "Outcome",
    "RewardFunction",
    "RewardPool",
    "RewardRequest",
    "Rewards",
    "Score",
    "ScoreFailure",
    "exact_match",
    "last_number",
    "math_answer",
]


def __getattr__(name: str) -> Any:
    # math-verify is an extra, and sympy takes a second to import: both wait until somebody asks for the function.
    if name == "math_answer":
        from drivetrain_rewards._math import math_answer

        return math_answer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
