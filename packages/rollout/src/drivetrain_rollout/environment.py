"""Interactions of several turns: an environment answers the policy, and all of it stays one sequence of ids.

reset ──► prompt ──► engine ──► response ──► step ──► what it says to that ──► prompt of the next turn ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from drivetrain_rollout.engine import RolloutEngine
from drivetrain_rollout.seeds import derive_seed
from drivetrain_rollout.types import Completion, GenerateRequest, Rollout, SamplingParams

T = TypeVar("T")

EpisodeErrorReason = Literal["reset_raised", "step_raised", "timeout", "no_room"]


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an environment says to a response."""

    token_ids: tuple[int, ...] = ()
    """Appended to the interaction before the next turn, and masked: an observation, a tool's output, the template's
    tokens around them."""
    done: bool = False
    """No further turn."""
    score: float | None = None
    """Of the interaction so far; the last one that is told counts."""


class Environment(Protocol):
    """One interaction. Made anew for each sample."""

    async def reset(self) -> Sequence[int]:
        """The first prompt's ids."""

    async def step(self, response: Completion) -> Step:
        """Answer the policy. ``response.finish_reason`` tells whether it came to its end."""


class EpisodeError(Exception):
    """An interaction that came to no end, for a reason of its environment; engines' own errors are RequestErrors.

    ``reset_raised``, ``step_raised``: the environment raised, the cause is chained. ``timeout``: it did not answer.
    ``no_room``: its first prompt leaves no room for a response.
    """

    def __init__(
        self, sample_id: int, reason: EpisodeErrorReason, message: str, turns: tuple[Completion, ...] = ()
    ) -> None:
        super().__init__(f"sample {sample_id}, turn {len(turns)}: {message} ({reason})")
        self.sample_id = sample_id
        self.reason: EpisodeErrorReason = reason
        self.turns = turns
        """Those that were completed."""


async def run_episode(
    engine: RolloutEngine,
    environment: Environment,
    sampling: SamplingParams,
    *,
    sample_id: int,
    group_id: int = 0,
    max_turns: int = 16,
    max_tokens: int | None = None,
    timeout: float = 60.0,
) -> Rollout:
    """Let a policy and an environment talk until one of them is done.

    The ids of a turn are the beginning of the next turn's prompt as the engine read and drew them: nothing is decoded
    and encoded again.

    Args:
        engine: or a pool of them.
        environment: for this sample alone.
        sampling: of each turn; a seed is derived anew for each.
        sample_id, group_id: of the rollout; turns are kept on one engine by the group.
        max_turns: at most.
        max_tokens: of the whole interaction; None: the engine's ``max_model_len``.
        timeout: seconds that the environment may take to answer.

    Raises:
        EpisodeError: the environment failed.
        RequestError: the engine did.
        ValueError: ``max_turns`` below 1.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns {max_turns}: use 1 or more")
    longest = min(max_tokens or engine.info.max_model_len, engine.info.max_model_len)
    turns: list[Completion] = []

    async def ask(answer: Awaitable[T], reason: EpisodeErrorReason) -> T:
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            message = f"the environment has not answered within {timeout:g} s"
            raise EpisodeError(sample_id, "timeout", message, tuple(turns)) from error
        except Exception as error:
            raise EpisodeError(sample_id, reason, f"the environment raised {error!r}", tuple(turns)) from error

    prompt = tuple(await ask(environment.reset(), "reset_raised"))
    if len(prompt) >= longest:
        raise EpisodeError(sample_id, "no_room", f"the first prompt has {len(prompt)} tokens of {longest}")
    score = None
    while True:
        completion = await engine.generate(_turn(prompt, sampling, longest, sample_id, group_id, len(turns)))
        turns.append(completion)
        step = await ask(environment.step(completion), "step_raised")
        score = score if step.score is None else step.score
        prompt = prompt + completion.response_token_ids + tuple(step.token_ids)
        if step.done or len(turns) == max_turns or len(prompt) >= longest:
            return Rollout(sample_id=sample_id, group_id=group_id, turns=tuple(turns), score=score)


def _turn(
    prompt: tuple[int, ...], sampling: SamplingParams, longest: int, sample_id: int, group_id: int, turn: int
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"sample-{sample_id}-turn-{turn}",
        prompt_token_ids=prompt,
        sampling=msgspec.structs.replace(
            sampling,
            max_tokens=min(sampling.max_tokens, longest - len(prompt)),
            seed=None if sampling.seed is None else derive_seed(sampling.seed, turn),
        ),
        group_id=group_id,
    )
