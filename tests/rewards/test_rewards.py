"""In-process scoring, and the limit on failures that both kinds of scoring share."""

import asyncio

import pytest
from drivetrain_rewards import InlineRewards, RewardRequest, Score, ScoreFailure


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest(sample_id=k, prompt="p", response=text) for k, text in enumerate(responses)]


def length_or_error(request: RewardRequest) -> float:
    if request.response == "raise":
        raise ValueError("cannot judge")
    if request.response == "nan":
        return float("nan")
    return len(request.response)


LINE = f"test_rewards.py:{length_or_error.__code__.co_firstlineno + 2}"


def test_each_request_gets_its_outcome_in_order() -> None:
    with InlineRewards(length_or_error, max_failure_rate=1.0) as rewards:
        outcomes = asyncio.run(rewards.score(requests("four", "raise", "", "nan", "seven..")))
    assert outcomes == [
        Score(sample_id=0, value=4.0),
        ScoreFailure(sample_id=1, reason="raised", message=f"ValueError: cannot judge ({LINE})"),
        Score(sample_id=2, value=0.0),
        ScoreFailure(sample_id=3, reason="not_finite", message="the value is nan"),
        Score(sample_id=4, value=7.0),
    ]
    assert rewards.counts == {"scored": 3, "raised": 1, "not_finite": 1}
    assert asyncio.run(rewards.score([])) == []


def test_failures_are_logged_with_their_sample(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(InlineRewards(length_or_error).score(requests("ok", "raise")))
    assert [record.getMessage() for record in caplog.records] == [
        f"sample 1: raised: ValueError: cannot judge ({LINE})"
    ]


def test_a_function_that_always_fails_stops_the_run_with_its_first_error() -> None:
    rewards = InlineRewards(length_or_error)
    says = (
        r"^10 of the last 10 rewards failed, more than max_failure_rate=0.5 allows; "
        rf"the first: sample 0: raised: ValueError: cannot judge \({LINE}\)$"
    )
    with pytest.raises(RuntimeError, match=says):
        asyncio.run(rewards.score(requests(*["raise"] * 10)))


def test_samples_scored_one_by_one_count_together() -> None:
    rewards = InlineRewards(length_or_error, max_failure_rate=0.2)
    for _ in range(9):
        assert len(asyncio.run(rewards.score(requests("raise")))) == 1  # too few for a rate
    with pytest.raises(RuntimeError, match=r"9 of the last 10 rewards failed"):
        asyncio.run(rewards.score(requests("ok")))


def test_one_failure_in_a_hundred_goes_on_and_old_ones_are_forgotten() -> None:
    rewards = InlineRewards(length_or_error, max_failure_rate=0.1)
    batch = requests(*["ok"] * 90, *["raise"] * 10)
    assert sum(isinstance(outcome, ScoreFailure) for outcome in asyncio.run(rewards.score(batch))) == 10  # at the limit
    with pytest.raises(RuntimeError, match=r"11 of the last 100"):
        asyncio.run(rewards.score(requests("raise")))
    asyncio.run(rewards.score(requests(*["ok"] * 100)))
    asyncio.run(rewards.score(requests("raise")))
    assert rewards.counts == {"scored": 190, "raised": 12}


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_out_of_range_is_named(rate: float) -> None:
    with pytest.raises(ValueError, match=r"max_failure_rate is"):
        InlineRewards(length_or_error, max_failure_rate=rate)


def test_other_tasks_go_on_between_two_samples() -> None:
    events: list[str] = []

    def note(request: RewardRequest) -> float:
        events.append("reward")
        return 0.0

    async def other() -> None:
        for _ in range(3):
            events.append("other")
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(InlineRewards(note).score(requests("a", "b", "c")), other())

    asyncio.run(main())
    assert events == ["reward", "other"] * 3
