"""Scoring in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from drivetrain_rewards._judge import judge
from drivetrain_rewards._rewards import Rewards
from drivetrain_rewards._types import Outcome, RewardFunction, RewardRequest


class InlineRewards(Rewards):
    """Calls the function here, on the event loop's thread: for cheap functions that are trusted to return.

    There is no deadline, for nothing in a process can stop a computation in the same process: use `RewardPool` for
    functions that parse, simplify, match patterns or run code.
    """

    def __init__(self, function: RewardFunction, *, max_failure_rate: float = 0.5) -> None:
        """
        Args:
            function: Judges one response.
            max_failure_rate: Share of failures among the last outcomes above which `score` raises, 0 to 1.
        """
        super().__init__(max_failure_rate=max_failure_rate)
        self._function = function

    async def _outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        outcomes = []
        for request in requests:
            outcomes.append(judge(self._function, request))
            await asyncio.sleep(0)  # the loop's other tasks get their turn
        return outcomes

    def close(self) -> None:
        """There is nothing to give back."""
