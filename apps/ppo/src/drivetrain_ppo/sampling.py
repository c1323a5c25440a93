"""The sampling side of a step: prompts to engines, completions to rewards, rollouts to the buffer, all ledgered."""

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Sequence

import msgspec
from drivetrain_buffer import Ledger, RolloutBuffer
from drivetrain_rewards import RewardRequest, Rewards, Score, ScoreFailure
from drivetrain_rollout import (
    Completion,
    EnginePool,
    GenerateRequest,
    RequestError,
    Rollout,
    SamplingParams,
    derive_seed,
)

from drivetrain_ppo.config import RolloutConfig
from drivetrain_ppo.data import Prompt, PromptSource, PromptState, Tokenizer
from drivetrain_ppo.weights import Push

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 30.0
"""Seconds that engines may take to close."""


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


class Failure(msgspec.Struct, frozen=True):
    """Why a sample got no response or no score."""

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

    pool: EnginePool
    prompts: PromptSource
    held_out: Sequence[Prompt]
    rewards: Rewards
    buffer: RolloutBuffer[Rollout]
    ledger: Ledger
    tokenizer: Tokenizer
    config: RolloutConfig
    stop_token_ids: tuple[int, ...]
    seed: int
    max_failure_rate: float
    next_sample_id: int = 0
    _failures: list[Failure] = dataclasses.field(default_factory=list)

    async def sample(self) -> list[Sampled]:
        """A step's responses: consumes prompts, waits for the engines, ends the samples that got no response."""
        taken = self.prompts.take(self.config.prompts_per_step)
        prompts = [prompt for prompt in taken for _ in range(self.config.samples_per_prompt)]
        sample_ids = range(self.next_sample_id, self.next_sample_id + len(prompts))
        self.next_sample_id += len(prompts)
        for sample_id in sample_ids:
            self.ledger.issue(sample_id)
        outcomes = await self._generate(prompts, sample_ids, temperature=self.config.temperature)
        self._failures = []
        sampled = []
        for sample_id, prompt, outcome in zip(sample_ids, prompts, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._fail(sample_id, outcome)
            else:
                sampled.append(Sampled(sample_id, prompt, outcome))
        return sampled

    async def collect(self, sampled: Sequence[Sampled], *, learner_version: int) -> Collected:
        """The step's rollouts: waits for rewards, passes the buffer, ends samples that got no score or are stale.

        Raises RuntimeError, with the first reason, when more than `max_failure_rate` of the step's samples failed or
        none is left to train on.
        """
        example = ""
        for sample, score in zip(sampled, await self._score(sampled), strict=True):
            if isinstance(score, ScoreFailure):
                self._fail(sample.sample_id, Failure(f"reward_{score.reason}", str(score)))
                continue
            group_id = sample.sample_id // self.config.samples_per_prompt
            rollout = Rollout(
                sample_id=sample.sample_id, group_id=group_id, turns=(sample.completion,), score=score.value
            )
            self.buffer.add(rollout, timeout=0.0)
            said = self._text(sample.completion)
            example = f"{sample.prompt.text.strip()[-60:]!r} -> {said[:60]!r} ({score.value:g})"
        issued = self.config.prompts_per_step * self.config.samples_per_prompt
        self._check_failures(self._failures, issued, "samples of a step")
        rollouts = self.buffer.take_fresh(learner_version=learner_version)
        if not rollouts:
            raise RuntimeError(f"none of {issued} samples is fresh enough for version {learner_version} to train on")
        failed = collections.Counter(failure.reason for failure in self._failures)
        return Collected(rollouts=rollouts, failed=dict(failed), example=example)

    def trained(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.ledger.end(rollout.sample_id, "trained")

    async def evaluate(self) -> Evaluation:
        """Mean score of greedy responses to the held-out prompts. They are not in the ledger; their ids are below 0.

        Raises RuntimeError when more than `max_failure_rate` of them fail: the mean of the rest would mislead.
        """
        ids = range(-1, -1 - len(self.held_out), -1)
        outcomes = await self._generate(self.held_out, ids, temperature=0.0)
        answered = [
            Sampled(sample_id, prompt, outcome)
            for sample_id, prompt, outcome in zip(ids, self.held_out, outcomes, strict=True)
            if not isinstance(outcome, Failure)
        ]
        scored = await self._score(answered)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        failures += [Failure(f"reward_{s.reason}", str(s)) for s in scored if isinstance(s, ScoreFailure)]
        self._check_failures(failures, len(self.held_out), "held-out samples")
        scores = [score.value for score in scored if isinstance(score, Score)]
        return Evaluation(reward=sum(scores) / len(scores), samples=len(scores), failed=len(failures))

    async def push_weights(self, push: Push) -> None:
        """Give every engine the learner's weights; from here on those serve that hold this version, by digest."""
        version = push.policy_version
        try:
            async with asyncio.timeout(self.config.timeout):
                state = await self.pool.update_each(lambda name: push.updates[int(name)])
        except TimeoutError:
            raise TimeoutError(
                f"not every engine held version {version} within {self.config.timeout:g} s of its push"
            ) from None
        if (state.policy_version, state.digest, state.status) != (version, push.digest, "ready"):
            raise RuntimeError(f"the engines hold {state} after a push of version {version}")

    def state(self) -> SamplerState:
        return SamplerState(prompts=self.prompts.state(), next_sample_id=self.next_sample_id)

    def restore(self, state: SamplerState) -> None:
        self.prompts.restore(state.prompts)
        self.next_sample_id = state.next_sample_id

    async def close(self) -> None:
        """Close buffer and engines. What goes wrong here is logged: it must not hide why the run ended."""
        self.buffer.close()
        async with asyncio.timeout(CLOSE_TIMEOUT):
            try:
                await self.pool.close()
            except (RuntimeError, OSError) as error:
                log.warning("an engine did not close: %s", error)

    async def _generate(
        self, prompts: Sequence[Prompt], sample_ids: Sequence[int], *, temperature: float
    ) -> list[Completion | Failure]:
        async def one(prompt: Prompt, sample_id: int) -> Completion | Failure:
            request = GenerateRequest(
                request_id=f"sample-{sample_id}",
                prompt_token_ids=tuple(prompt.token_ids),
                sampling=SamplingParams(
                    max_tokens=self.config.max_response_tokens,
                    temperature=temperature,
                    stop_token_ids=self.stop_token_ids,
                    seed=derive_seed(self.seed, sample_id) if temperature else None,
                ),
                group_id=sample_id // self.config.samples_per_prompt,
            )
            try:
                async with asyncio.timeout(self.config.timeout):
                    return await self.pool.generate(request)
            except TimeoutError:
                return Failure("timeout", f"no answer to request {sample_id} within {self.config.timeout:g} s")
            except RequestError as error:
                return Failure(error.reason, str(error))

        return await asyncio.gather(*map(one, prompts, sample_ids))

    async def _score(self, sampled: Sequence[Sampled]) -> list[Score | ScoreFailure]:
        requests = [
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
        try:
            async with asyncio.timeout(self.config.timeout):
                return await self.rewards.score(requests)
        except TimeoutError:
            raise TimeoutError(f"{len(requests)} responses were not scored within {self.config.timeout:g} s") from None

    def _text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.response_token_ids, skip_special_tokens=True)

    def _fail(self, sample_id: int, failure: Failure) -> None:
        self.ledger.end(sample_id, "failed", reason=failure.reason)
        self._failures.append(failure)

    def _check_failures(self, failures: Sequence[Failure], total: int, what: str) -> None:
        if failures and (len(failures) == total or len(failures) > self.max_failure_rate * total):
            raise RuntimeError(
                f"{len(failures)} of {total} {what} failed; trainer.max_failure_rate allows a share of "
                f"{self.max_failure_rate:g}; the first: {failures[0].message}"
            )
