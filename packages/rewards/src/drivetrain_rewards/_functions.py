"""Reward functions that compare texts and numbers."""

from __future__ import annotations

import re
from decimal import Decimal

from drivetrain_rewards._types import RewardRequest

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_match(request: RewardRequest) -> float:
    """1.0 when the response is the ground truth, but for space around it; else 0.0.

    Raises:
        ValueError: The request has no ground truth.
    """
    return float(request.response.strip() == truth_of(request).strip())


def last_number(request: RewardRequest) -> float:
    """1.0 when the last number of the response equals the last number of the ground truth; else 0.0.

    For answers such as GSM8K's, where the ground truth is `#### 1,234` or `1234`. Commas in numbers are ignored and the
    comparison is exact: 12.50 equals 12.5. A minus sign counts where it does not follow a digit, letter or bracket.

    Raises:
        ValueError: The request has no ground truth, or it holds no number.
    """
    expected = _last_number(truth_of(request))
    if expected is None:
        raise ValueError(f"the ground truth {request.ground_truth!r} of sample {request.sample_id} holds no number")
    return float(_last_number(request.response) == expected)


def truth_of(request: RewardRequest) -> str:
    """The request's ground truth; ValueError when it has none."""
    if request.ground_truth is None:
        raise ValueError(f"sample {request.sample_id} has no ground truth to compare with")
    return request.ground_truth


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
