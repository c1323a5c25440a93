"""Reward functions that need what only the app depends on. They run in reward workers, by import path."""

import functools
from typing import Any

from drivetrain_rewards import RewardRequest


@functools.cache
def _scorer(name: str) -> Any:
    import reasoning_gym.factory as factory

    return factory.create_dataset(name, size=1, seed=0)


def reasoning_gym(request: RewardRequest) -> float:
    """The score that the reasoning-gym task of `data_source` gives the response; its last number or line counts too.

    Raises ValueError when the sample does not come from a reasoning-gym task.
    """
    kind, _, name = request.data_source.partition(":")
    if kind != "reasoning_gym":
        raise ValueError(
            f"data_source {request.data_source!r} is no reasoning-gym task; choose another reward.function"
        )
    entry = {"answer": request.ground_truth, "metadata": request.extra["metadata"]}
    dataset = _scorer(name)
    return max(float(dataset.score_answer(answer, entry)) for answer in _answers(request.response))


def _answers(response: str) -> list[str]:
    """What a response may mean as its answer: all of it, its last line, its last number."""
    import re

    text = response.strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return [text, *text.splitlines()[-1:], *(number.replace(",", "") for number in numbers[-1:])]
