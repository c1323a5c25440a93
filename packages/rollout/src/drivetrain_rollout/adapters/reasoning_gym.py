"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), scored by their own verifiers.

It is handed in as a data set, and never imported here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from drivetrain_rollout.environment import Step
from drivetrain_rollout.types import Completion


class TaskDataset(Protocol):
    """What ``reasoning_gym.create_dataset`` returns."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An entry with a ``question``."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """0 to 1."""


class ReasoningGymEnvironment:
    """One task: its question is the prompt, the policy answers once.

    Args:
        dataset: of reasoning-gym.
        index: of the entry.
        encode: a question's prompt ids; with a chat template
            ``lambda question: chat.start([{"role": "user", "content": question}])``.
        decode: a response's text, without special tokens.
        extract: the answer in that text; None if there is none.

    Example:
        >>> environment = ReasoningGymEnvironment(dataset, 7, encode=encode, decode=decode)
        >>> rollout = await run_episode(pool, environment, sampling, sample_id=7)
    """

    def __init__(
        self,
        dataset: TaskDataset,
        index: int,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        extract: Callable[[str], str | None] = str.strip,
    ) -> None:
        self._dataset = dataset
        self._entry = dataset[index]
        self._encode = encode
        self._decode = decode
        self._extract = extract

    async def reset(self) -> Sequence[int]:
        return self._encode(self._entry["question"])

    async def step(self, response: Completion) -> Step:
        answer = self._extract(self._decode(response.response_token_ids))
        # Some verifiers compute for long.
        score = await asyncio.to_thread(self._dataset.score_answer, answer, self._entry)
        return Step(done=True, score=float(score))
