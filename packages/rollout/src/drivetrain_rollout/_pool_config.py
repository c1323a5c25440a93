"""What a pool of engines does when, and what it says of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from drivetrain_rollout._members import MemberState
from drivetrain_rollout.control import LimitConfig
from drivetrain_rollout.engine import RequestErrorReason, WeightsState

ELSEWHERE: dict[RequestErrorReason, MemberState] = {
    "engine_failed": "failed",
    "engine_closed": "failed",
    "engine_asleep": "stale",
    "stale_weights": "stale",
}
"""Reasons for which another engine may do better, and what they say of this one."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool does when.

    Raises:
        ValueError: a value out of range, with the range.
    """

    attempts: int = 3
    """Engines that may begin with a request before its failure is the caller's."""
    deadline: float | None = None
    """Seconds for a request, waiting and all attempts included; None: as long as its engines take."""
    no_engine_timeout: float = 300.0
    """Seconds that a request waits while no engine serves."""
    updates: Literal["wait", "keep", "abort"] = "wait"
    """What becomes of running responses when weights change. ``wait``: the update waits for them. ``keep``: engines
    hold them, and they go on with the new weights. ``abort``: they are ended, and continued with the new weights, by
    whichever engine has room."""
    min_updated: int = 1
    """Engines that must hold an update; if fewer do, it is an error. The others are stale."""
    look_every: float = 2.0
    """Seconds between two looks at the engines' health and metrics, while the pool is used."""
    look_timeout: float = 60.0
    """Seconds that an engine may take to answer a look; a step that compiles can be long."""
    limit: LimitConfig = LimitConfig()
    seed: int = 0
    """Starts the stream that requests without a seed take theirs from."""

    def __post_init__(self) -> None:
        for name in ("attempts", "min_updated", "no_engine_timeout", "look_every", "look_timeout", "deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value}: use a number above 0")
        if self.updates not in ("wait", "keep", "abort"):
            raise ValueError(f"updates {self.updates!r}: use 'wait', 'keep' or 'abort'")


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine of a pool is doing."""

    name: str
    state: MemberState
    running: int
    """Requests it has from the pool."""
    limit: int
    """Requests it gets at once."""
    weights: WeightsState
    error: str | None
    """Why it does not serve."""
