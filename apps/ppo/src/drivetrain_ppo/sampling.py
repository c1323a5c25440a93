"""The sampling side of a step: prompts to engines, completions to rewards, rollouts to the buffer, all ledgered."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence

import msgspec
from drivetrain_buffer import Ledger, RolloutBuffer
from drivetrain_rewards import RewardRequest, Rewards, Score, ScoreFailure
from drivetrain_rollout import (
    Completion,
    GenerateRequest,
    RequestError,
    Rollout,
    RolloutEngine,
    SamplingParams,
    WeightUpdate,
)

from drivetrain_ppo.config import RolloutConfig
from drivetrain_ppo.data import Prompt, PromptSource, PromptState, Tokenizer


class SamplerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the sampling side. Between steps nothing is in flight and the buffer is empty."""

    prompts: PromptState
    next_sample_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A sample that has its response and waits for its score."""

    sample_id: int
    prompt: Prompt
    completion: Completion


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one step, scored, and what became of the samples that are not among them."""

    rollouts: list[Rollout]
    failed: dict[str, int] = {}
    """Samples that ended without a score, by reason."""
    example: str = ""
    """One prompt, response and score to show."""


class Unanswered(msgspec.Struct, frozen=True):
    """A request that got no completion."""

    reason: str
    message: str


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    reward: float
    samples: int
    failed: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Sampler:
    """Drives the engines for the loop.

    A sample is issued in the ledger before its request is sent and ends there exactly once: `failed` here, `stale` in
    the buffer, or `trained` when the loop says so.
    """

    engines: Sequence[RolloutEngine]
    prompts: PromptSource
    held_out: Sequence[Prompt]
    rewards: Rewards
    buffer: RolloutBuffer[Rollout]
    ledger: Ledger
    tokenizer: Tokenizer
    config: RolloutConfig
    stop_token_ids: tuple[int, ...]
    seed: int
    next_sample_id: int = 0
    _failed: dict[str, int] = dataclasses.field(default_factory=dict)

    async def sample(self) -> list[Sampled]:
        """A step's responses: consumes prompts, waits for the engines, ends the samples that got no response.

        Raises RuntimeError when no sample at all came through, with the first reason.
        """
        taken = self.prompts.take(self.config.prompts_per_step)
        prompts = [prompt for prompt in taken for _ in range(self.config.samples_per_prompt)]
        sample_ids = range(self.next_sample_id, self.next_sample_id + len(prompts))
        self.next_sample_id += len(prompts)
        for sample_id in sample_ids:
            self.ledger.issue(sample_id)
        outcomes = await self._generate(prompts, sample_ids, temperature=self.config.temperature)
        self._failed = {}
        sampled = []
        for sample_id, prompt, outcome in zip(sample_ids, prompts, outcomes, strict=True):
            if isinstance(outcome, Unanswered):
                self._fail(sample_id, outcome.reason)
            else:
                sampled.append(Sampled(sample_id, prompt, outcome))
        if not sampled:
            first = next(outcome for outcome in outcomes if isinstance(outcome, Unanswered))
            raise RuntimeError(f"none of {len(prompts)} samples was answered; the first reason: {first.message}")
        return sampled

    async def collect(self, sampled: Sequence[Sampled], *, learner_version: int) -> Collected:
        """The step's rollouts: waits for rewards, passes the buffer, ends samples that got no score or are stale.

        Raises RuntimeError when none is left to train on.
        """
        scores = await self._score(sampled)
        scored = 0
        example = ""
        for sample, score in zip(sampled, scores, strict=True):
            if isinstance(score, ScoreFailure):
                self._fail(sample.sample_id, f"reward_{score.reason}")
                continue
            group_id = sample.sample_id // self.config.samples_per_prompt
            rollout = Rollout(
                sample_id=sample.sample_id, group_id=group_id, turns=(sample.completion,), score=score.value
            )
            self.buffer.add(rollout, timeout=0.0)
            scored += 1
            example = (
                f"{sample.prompt.text.strip()[-60:]!r} -> {self._text(sample.completion)[:60]!r} ({score.value:g})"
            )
        rollouts = self.buffer.take(scored, learner_version=learner_version, timeout=0.0)
        if not rollouts:
            raise RuntimeError(f"none of {len(sampled)} samples is left to train on; failed: {self._failed or 'none'}")
        return Collected(rollouts=list(rollouts), failed=self._failed, example=example)

    def trained(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.ledger.end(rollout.sample_id, "trained")

    async def evaluate(self) -> Evaluation:
        """Mean score of greedy responses to the held-out prompts. They are not in the ledger."""
        outcomes = await self._generate(self.held_out, range(len(self.held_out)), temperature=0.0)
        completed = [
            Sampled(index, prompt, outcome)
            for index, (prompt, outcome) in enumerate(zip(self.held_out, outcomes, strict=True))
            if not isinstance(outcome, Unanswered)
        ]
        scores = [score.value for score in await self._score(completed) if isinstance(score, Score)]
        mean = sum(scores) / len(scores) if scores else float("nan")
        return Evaluation(reward=mean, samples=len(scores), failed=len(self.held_out) - len(scores))

    async def push_weights(self, update: WeightUpdate) -> None:
        """Give every engine the learner's weights; returns when each holds exactly this version, by digest."""
        tensors = list(update.tensors)
        states = await asyncio.gather(
            *(engine.update_weights(dataclasses.replace(update, tensors=tensors)) for engine in self.engines)
        )
        for engine, state in zip(self.engines, states, strict=True):
            if (state.policy_version, state.digest, state.status) != (update.policy_version, update.digest, "ready"):
                raise RuntimeError(
                    f"{engine.info.engine} holds {state} after a push of version {update.policy_version}"
                )

    def state(self) -> SamplerState:
        return SamplerState(prompts=self.prompts.state(), next_sample_id=self.next_sample_id)

    def restore(self, state: SamplerState) -> None:
        self.prompts.restore(state.prompts)
        self.next_sample_id = state.next_sample_id

    async def close(self) -> None:
        self.buffer.close()
        self.rewards.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _generate(
        self, prompts: Sequence[Prompt], sample_ids: Sequence[int], *, temperature: float
    ) -> list[Completion | Unanswered]:
        async def one(index: int, prompt: Prompt, sample_id: int) -> Completion | Unanswered:
            request = GenerateRequest(
                request_id=str(sample_id),
                prompt_token_ids=tuple(prompt.token_ids),
                sampling=SamplingParams(
                    max_tokens=self.config.max_response_tokens,
                    temperature=temperature,
                    stop_token_ids=self.stop_token_ids,
                    seed=self._sample_seed(sample_id) if temperature else None,
                ),
            )
            try:
                async with asyncio.timeout(self.config.timeout):
                    return await self.engines[index % len(self.engines)].generate(request)
            except TimeoutError:
                return Unanswered("timeout", f"no answer to request {sample_id} within {self.config.timeout:g} s")
            except RequestError as error:
                return Unanswered(error.reason, str(error))

        return await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(zip(prompts, sample_ids, strict=True))))

    def _sample_seed(self, sample_id: int) -> int:
        """A seed of run and sample: the response does not depend on which engine serves the request."""
        digest = hashlib.blake2b(f"{self.seed}/{sample_id}".encode(), digest_size=7).digest()
        return int.from_bytes(digest)

    async def _score(self, sampled: Sequence[Sampled]) -> list[Score | ScoreFailure]:
        return await self.rewards.score(
            [
                RewardRequest(
                    sample_id=sample.sample_id,
                    prompt=sample.prompt.text,
                    response=self._text(sample.completion),
                    ground_truth=sample.prompt.example.ground_truth,
                    data_source=sample.prompt.example.data_source,
                    extra=sample.prompt.example.extra,
                )
                for sample in sampled
            ]
        )

    def _text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.response_token_ids, skip_special_tokens=True)

    def _fail(self, sample_id: int, reason: str) -> None:
        self.ledger.end(sample_id, "failed", reason=reason)
        self._failed[reason] = self._failed.get(reason, 0) + 1
