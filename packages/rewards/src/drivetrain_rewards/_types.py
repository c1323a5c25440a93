"""What goes into a reward function and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

FailureReason = Literal["timeout", "raised", "not_finite", "wrong_type", "worker_died"]
"""Why there is no score.

timeout: past the deadline; raised: the function raised; not_finite: it returned NaN or an infinity; wrong_type: it
returned something that is no number; worker_died: its process ended.
"""


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One response to judge.

    Example:
        RewardRequest(sample_id=17, prompt="2 + 2 = ?", response="It is 4.", ground_truth="4", data_source="sums")
    """

    sample_id: int
    prompt: str
    response: str
    ground_truth: str | None = None
    data_source: str = ""
    """Where the prompt is from, for functions that judge several kinds."""
    extra: Mapping[str, Any] = {}
    """Whatever else a function needs; JSON values only."""


class Score(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The number that a reward function gave a sample; finite."""

    sample_id: int
    value: float
    details: Mapping[str, float] = {}
    """Parts of the value or other numbers worth a metric; finite."""


class ScoreFailure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A sample without a score. It is not a score of 0: the caller decides what becomes of the sample."""

    sample_id: int
    reason: FailureReason
    message: str

    def __str__(self) -> str:
        return f"sample {self.sample_id}: {self.reason}: {self.message}"


Outcome = Score | ScoreFailure


class RewardFunction(Protocol):
    """Judges one response. Any callable with this signature: there is nothing to inherit from or to register."""

    def __call__(self, request: RewardRequest, /) -> float | Score:
        """Return a number (a bool and a numpy scalar are numbers), or a `Score` where there are details to report."""
