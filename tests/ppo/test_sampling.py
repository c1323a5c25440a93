"""The sampling side: what happens to each sample, told by a fake engine. Real engines: tests/integration."""

import asyncio
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from drivetrain_buffer import Ledger, RolloutBuffer
from drivetrain_ppo.config import RolloutConfig
from drivetrain_ppo.data import Example, Prompt, PromptSource
from drivetrain_ppo.sampling import Sampler
from drivetrain_ppo.weights import Push
from drivetrain_rewards import RewardRequest, Rewards, Score, ScoreFailure
from drivetrain_rollout import (
    Completion,
    EngineInfo,
    EngineMetrics,
    EnginePool,
    GenerateRequest,
    PauseMode,
    PoolConfig,
    RequestError,
    Rollout,
    RolloutEngine,
    VersionSpan,
    WeightsState,
    WeightUpdate,
    WeightWrite,
)


class FakeEngine(RolloutEngine):
    """Answers each prompt with its first id; keeps a log of what it was asked."""

    def __init__(self, *, refused: Sequence[int] = (), silent: Sequence[int] = (), holds: str | None = None) -> None:
        self.log: list[Any] = []
        self._refused = refused
        self._silent = silent
        self._holds = holds
        self._state = WeightsState(policy_version=0, digest=None, status="ready")

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="fake",
            engine_version="1",
            model="none",
            vocab_size=99,
            max_model_len=9,
            dtype="float32",
            device="cpu",
            can_sleep=False,
        )

    @property
    def weights(self) -> WeightsState:
        return self._state

    async def generate(self, request: GenerateRequest) -> Completion:
        first = request.prompt_token_ids[0]
        self.log.append((request.request_id, first, request.sampling.temperature, request.sampling.seed))
        if first in self._refused:
            raise RequestError(request.request_id, "prompt_too_long", "too long")
        if first in self._silent:
            await asyncio.Event().wait()
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=(first,),
            rollout_logprobs=(-1.0,),
            finish_reason="stop",
            version_spans=(VersionSpan(3, 1),),
        )

    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        self.log.append(("update", update.policy_version, [name for name, _ in update.tensors]))
        digest = update.digest if self._holds is None else self._holds
        self._state = WeightsState(policy_version=update.policy_version, digest=digest, status="ready")
        return self._state

    async def write_weights(self, write: WeightWrite) -> WeightsState:
        self.log.append(("write", write.policy_version, write.message))
        self._state = WeightsState(policy_version=write.policy_version, digest=write.digest, status="ready")
        return self._state

    async def pause(self, mode: PauseMode = "wait") -> None: ...
    async def resume(self) -> None: ...
    async def metrics(self) -> EngineMetrics:
        raise AssertionError("not asked for")

    async def sleep(self, level: int = 1) -> None: ...
    async def wake(self) -> None: ...
    async def health(self) -> None: ...
    async def close(self) -> None:
        self.log.append("close")


class Digits:
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [int(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        raise AssertionError("no template")


class FakeRewards(Rewards):
    """Right answers score 1; samples whose prompt is `broken` raise in the reward function."""

    def __init__(self, broken: str = "") -> None:
        super().__init__(max_failure_rate=1.0)
        self.broken = broken

    async def _outcomes(self, requests: Sequence[RewardRequest]) -> list[Score | ScoreFailure]:
        return [
            ScoreFailure(sample_id=r.sample_id, reason="raised", message="ValueError")
            if r.prompt == self.broken
            else Score(sample_id=r.sample_id, value=float(r.response == r.ground_truth))
            for r in requests
        ]

    def close(self) -> None: ...


@pytest.fixture
def ledger(tmp_path: pathlib.Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger") as opened:
        yield opened


def make_sampler(
    ledger: Ledger, *engines: FakeEngine, broken: str = "", max_failure_rate: float = 0.5, **settings: Any
) -> Sampler:
    prompts = [
        Prompt(
            token_ids=[i],
            text=str(i),
            example=Example(prompt=str(i), ground_truth=str(i), data_source="test"),
        )
        for i in range(1, 9)
    ]

    def on_stale(rollout: Rollout) -> None:
        ledger.end(rollout.sample_id, "stale")

    config = RolloutConfig(**{"prompts_per_step": 4, **settings})
    return Sampler(
        pool=EnginePool(dict(zip("01", engines, strict=False)), PoolConfig(no_engine_timeout=1.0)),
        prompts=PromptSource(prompts, seed=1, shuffle=False),
        held_out=prompts[:2],
        rewards=FakeRewards(broken),
        buffer=RolloutBuffer(
            64, policy_version=lambda rollout: rollout.min_policy_version, max_staleness=0, on_stale=on_stale
        ),
        ledger=ledger,
        tokenizer=Digits(),
        config=config,
        stop_token_ids=(0,),
        seed=5,
        max_failure_rate=max_failure_rate,
    )


async def step(sampler: Sampler, version: int = 3) -> Any:
    return await sampler.collect(await sampler.sample(), learner_version=version)


def test_every_sample_is_issued_and_ends_once(ledger: Ledger) -> None:
    engines = FakeEngine(refused=[2]), FakeEngine(refused=[2])
    sampler = make_sampler(ledger, *engines, broken="3", samples_per_prompt=2)
    collected = asyncio.run(step(sampler))
    assert [rollout.sample_id for rollout in collected.rollouts] == [0, 1, 6, 7]
    assert [rollout.group_id for rollout in collected.rollouts] == [0, 0, 3, 3]
    assert collected.failed == {"prompt_too_long": 2, "reward_raised": 2}
    assert ledger.in_flight() == [0, 1, 6, 7]
    sampler.trained(collected.rollouts)
    counts = ledger.check()
    assert (counts.issued, counts.trained, counts.failed, counts.in_flight) == (8, 4, 4, 0)
    assert [len(engine.log) for engine in engines] == [4, 4], "groups are spread over the engines"


def test_seeds_differ_by_sample_and_repeat_by_run(ledger: Ledger, tmp_path: pathlib.Path) -> None:
    engine = FakeEngine()
    asyncio.run(step(make_sampler(ledger, engine, samples_per_prompt=2)))
    seeds = [entry[3] for entry in engine.log]
    assert len(set(seeds)) == 8
    with Ledger(tmp_path / "other") as other:
        pair = FakeEngine(), FakeEngine()
        asyncio.run(step(make_sampler(other, *pair, samples_per_prompt=2)))
    again = [entry for one in pair for entry in one.log]
    assert sorted(again) == sorted(engine.log), "a sample's seed does not depend on the engine"


def test_a_request_that_never_ends_fails_alone(ledger: Ledger) -> None:
    sampler = make_sampler(ledger, FakeEngine(silent=[1]), timeout=0.1)
    collected = asyncio.run(step(sampler))
    assert collected.failed == {"timeout": 1}
    assert len(collected.rollouts) == 3


def test_nothing_answered_is_an_error_with_the_first_reason(ledger: Ledger) -> None:
    sampler = make_sampler(ledger, FakeEngine(refused=range(9)))
    with pytest.raises(RuntimeError, match=r"4 of 4 samples of a step failed.*the first: .*too long"):
        asyncio.run(step(sampler))
    assert ledger.check().failed == 4


def test_too_many_failures_end_the_run_whatever_the_reason(ledger: Ledger) -> None:
    sampler = make_sampler(ledger, FakeEngine(refused=[1]), broken="2", max_failure_rate=0.4)
    with pytest.raises(RuntimeError, match=r"2 of 4 samples of a step failed"):
        asyncio.run(step(sampler))
    assert ledger.check().failed == 2


def test_stale_rollouts_are_left_out(ledger: Ledger) -> None:
    sampler = make_sampler(ledger, FakeEngine())
    with pytest.raises(RuntimeError, match="none of 4 samples is fresh enough for version 4"):
        asyncio.run(step(sampler, version=4))
    assert ledger.check().stale == 4


def test_an_evaluation_of_few_answers_is_none(ledger: Ledger) -> None:
    sampler = make_sampler(ledger, FakeEngine(refused=[2]), max_failure_rate=0.4)
    with pytest.raises(RuntimeError, match="1 of 2 held-out samples failed"):
        asyncio.run(sampler.evaluate())


def test_evaluation_is_greedy_and_not_in_the_ledger(ledger: Ledger) -> None:
    engine = FakeEngine(refused=[2])
    evaluation = asyncio.run(make_sampler(ledger, engine).evaluate())
    assert (evaluation.reward, evaluation.samples, evaluation.failed) == (1.0, 1, 1)
    assert [entry[2:] for entry in engine.log] == [(0.0, None), (0.0, None)]
    assert ledger.check().issued == 0


def push(version: int, *updates: WeightUpdate | WeightWrite) -> Push:
    return Push(policy_version=version, digest=f"d{version}", nbytes=0, updates=updates)


def test_a_push_reaches_every_engine_or_fails(ledger: Ledger) -> None:
    engines = FakeEngine(), FakeEngine()
    update = WeightUpdate(policy_version=7, digest="d7", tensors=[("a", None), ("b", None)])  # type: ignore[list-item]
    write = WeightWrite(policy_version=7, digest="d7", message=b"m")
    asyncio.run(make_sampler(ledger, *engines).push_weights(push(7, update, write)))
    assert [engine.log for engine in engines] == [[("update", 7, ["a", "b"])], [("write", 7, b"m")]]
    liar = FakeEngine(holds="other")
    with pytest.raises(RuntimeError, match="after an update to version 7"):
        asyncio.run(make_sampler(ledger, liar).push_weights(push(8, update)))


def test_resuming_goes_on_with_the_next_prompts_and_ids(ledger: Ledger) -> None:
    first = make_sampler(ledger, FakeEngine())
    asyncio.run(step(first))
    engine = FakeEngine()
    second = make_sampler(ledger, engine)
    second.restore(first.state())
    asyncio.run(step(second))
    assert [entry[:2] for entry in engine.log] == [
        ("sample-4", 5),
        ("sample-5", 6),
        ("sample-6", 7),
        ("sample-7", 8),
    ]
