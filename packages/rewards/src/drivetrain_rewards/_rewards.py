"""What all ways of scoring have in common: one outcome per request, and a limit on how many may fail."""

from __future__ import annotations

import collections
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from drivetrain_rewards._types import Outcome, RewardRequest, Score, ScoreFailure

WINDOW = 100
"""The failure rate is that of the last hundred outcomes."""

ENOUGH = 10
"""With fewer outcomes than this there is no rate yet."""

log = logging.getLogger("drivetrain_rewards")


class Rewards(ABC):
    """Scores samples. Each request gets an outcome, a `Score` or a `ScoreFailure`, never a made-up number.

    When too many of the last hundred outcomes are failures, `score` raises: then it is not the samples that are odd but
    the reward function, and a run that goes on without it learns nothing.
    """

    def __init__(self, *, max_failure_rate: float) -> None:
        if not 0.0 <= max_failure_rate <= 1.0:
            raise ValueError(f"max_failure_rate is {max_failure_rate}: it must lie between 0 and 1 (1 never stops)")
        self._max_failure_rate = max_failure_rate
        self._recent: collections.deque[Outcome] = collections.deque(maxlen=WINDOW)
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    async def score(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Score the requests; the outcomes are in their order.

        Raises:
            RuntimeError: More than `max_failure_rate` of the last 100 outcomes (10 at least) are failures. The text
                shows the first of them.
        """
        outcomes = await self._outcomes(requests)
        failed = [outcome for outcome in outcomes if isinstance(outcome, ScoreFailure)]
        for failure in failed:
            log.warning("%s", failure)
        with self._lock:
            self._recent.extend(outcomes)
            self._counts.update("scored" if isinstance(outcome, Score) else outcome.reason for outcome in outcomes)
            self._check()
        return outcomes

    @property
    def counts(self) -> Mapping[str, int]:
        """How many outcomes there were so far: `scored`, and each `FailureReason` that occurred."""
        with self._lock:
            return dict(self._counts)

    @abstractmethod
    async def _outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """One outcome per request, in order."""

    @abstractmethod
    def close(self) -> None:
        """Give back what scoring holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        failures = [outcome for outcome in self._recent if isinstance(outcome, ScoreFailure)]
        total = len(self._recent)
        if total >= ENOUGH and len(failures) > self._max_failure_rate * total:
            raise RuntimeError(
                f"{len(failures)} of the last {total} rewards failed, "
                f"more than max_failure_rate={self._max_failure_rate:g} allows; the first: {failures[0]}"
            )
