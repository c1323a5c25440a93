"""Interactions of several turns: what is one sequence, what is masked, and how an environment may fail."""

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from drivetrain_rollout import Completion, RequestError, SamplingParams, derive_seed
from drivetrain_rollout.adapters.reasoning_gym import ReasoningGymEnvironment
from drivetrain_rollout.environment import EpisodeError, Step, run_episode
from drivetrain_rollout.testing import ScriptedEngine

SAMPLING = SamplingParams(max_tokens=5, stop_token_ids=(2,), seed=11)


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(20):
            return await awaitable

    return asyncio.run(bounded())


class Counting:
    """Says 7 and 8 to each response, and is done after some turns."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.seen: list[Completion] = []

    async def reset(self) -> Sequence[int]:
        return [1, 3]

    async def step(self, response: Completion) -> Step:
        self.seen.append(response)
        done = len(self.seen) == self.turns
        return Step(token_ids=() if done else (7, 8), done=done, score=float(len(self.seen)))


def answers(*responses: list[int]):
    left = list(responses)
    return ScriptedEngine(respond=lambda _: left.pop(0), max_model_len=32)


def test_turns_are_one_sequence_in_which_the_policys_tokens_are_marked():
    engine, environment = answers([5, 2], [6, 6, 2], [4]), Counting()
    rollout = run(run_episode(engine, environment, SAMPLING, sample_id=9, group_id=4))
    assert rollout.token_ids == (1, 3, 5, 2, 7, 8, 6, 6, 2, 7, 8, 4)
    mask = [bool(int(mark)) for mark in "001100111001"]
    assert list(rollout.response_mask) == mask
    assert [logprob != 0 for logprob in rollout.rollout_logprobs] == mask
    assert (rollout.sample_id, rollout.group_id, rollout.score) == (9, 4, 3.0)
    assert [turn.prompt_token_ids for turn in environment.seen] == [
        (1, 3),
        (1, 3, 5, 2, 7, 8),
        (1, 3, 5, 2, 7, 8, 6, 6, 2, 7, 8),
    ]
    assert engine.events[:3] == [f"add sample-9-turn-{turn}" for turn in range(3)]
    run(engine.close())


def test_seeds_are_derived_for_each_turn():
    async def scenario() -> list[Completion]:
        async with ScriptedEngine() as engine:
            rollout = await run_episode(engine, Counting(), SAMPLING, sample_id=0)
            again = await run_episode(engine, Counting(), SAMPLING, sample_id=0)
            assert again.token_ids == rollout.token_ids
            return list(rollout.turns)

    first, second, _ = run(scenario())
    assert first.response_token_ids != second.response_token_ids
    assert derive_seed(11, 0) != derive_seed(11, 1)


@pytest.mark.parametrize(
    ("limits", "turns", "tokens"),
    [({"max_turns": 2}, 2, 14), ({"max_tokens": 12}, 2, 12), ({"max_tokens": 9}, 1, 7), ({}, 4, 28)],
)
def test_turns_and_tokens_are_bounded(limits, turns: int, tokens: int):
    engine = ScriptedEngine(respond=lambda request: [5] * request.sampling.max_tokens, max_model_len=64)
    environment = Counting(turns=4)
    rollout = run(run_episode(engine, environment, SAMPLING, sample_id=0, **limits))
    assert len(rollout.turns) == turns
    assert len(rollout.token_ids) == tokens
    assert rollout.score == float(turns)
    run(engine.close())


class Bad(Counting):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    async def reset(self) -> Sequence[int]:
        if self.how == "reset":
            raise KeyError("no such task")
        return [1] * (40 if self.how == "long" else 2)

    async def step(self, response: Completion) -> Step:
        await super().step(response)
        if self.how == "step" and len(self.seen) == 2:
            raise OSError("tool is gone")
        if self.how == "hang":
            await asyncio.Event().wait()
        return Step(token_ids=(7,))


@pytest.mark.parametrize(
    ("how", "reason", "text", "turns"),
    [
        ("reset", "reset_raised", "no such task", 0),
        ("step", "step_raised", "tool is gone", 2),
        ("hang", "timeout", "within 0.1 s", 1),
        ("long", "no_room", "40 tokens of 32", 0),
    ],
)
def test_an_environment_that_fails_is_named_with_what_there_was(how, reason, text, turns):
    engine = answers(*[[5, 2]] * 4)
    with pytest.raises(EpisodeError, match=text) as raised:
        run(run_episode(engine, Bad(how), SAMPLING, sample_id=3, timeout=0.1))
    assert (raised.value.sample_id, raised.value.reason, len(raised.value.turns)) == (3, reason, turns)
    run(engine.close())


def test_an_engine_that_fails_is_its_own_error():
    engine = ScriptedEngine()
    run(engine.close())
    with pytest.raises(RequestError, match="engine_closed"):
        run(run_episode(engine, Counting(), SAMPLING, sample_id=0))
    with pytest.raises(ValueError, match="max_turns 0"):
        run(run_episode(engine, Counting(), SAMPLING, sample_id=0, max_turns=0))


def test_a_task_of_reasoning_gym_is_scored_by_its_own_verifier():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("basic_arithmetic", size=4, seed=3)

    def episode(index: int, say: str) -> float | None:
        engine = ScriptedEngine(respond=lambda _: [ord(c) for c in say], vocab_size=256, max_model_len=512)
        environment = ReasoningGymEnvironment(
            dataset,
            index,
            encode=lambda text: [ord(c) % 256 for c in text],
            decode=lambda ids: "".join(map(chr, ids)),
        )
        rollout = run(run_episode(engine, environment, SamplingParams(max_tokens=32), sample_id=index))
        run(engine.close())
        assert len(rollout.turns) == 1
        return rollout.score

    for index in range(4):
        assert episode(index, f" {dataset[index]['answer']}\n") == 1.0
        assert episode(index, "no idea") < 1.0  # type: ignore[operator]
