"""The two controllers, by hand."""

import pytest
from drivetrain_rollout import AdaptiveBatch, EngineMetrics, LimitConfig, SawtoothLimit, derive_seed


def metrics(*, running: int = 0, waiting: int = 0, preemptions: int = 0) -> EngineMetrics:
    return EngineMetrics(
        running=running,
        waiting=waiting,
        kv_cache_usage=0.5,
        preemptions=preemptions,
        prompt_tokens=0,
        response_tokens=0,
        completed=0,
        failed={},
    )


def test_the_limit_is_a_sawtooth():
    limit = SawtoothLimit(LimitConfig(first=16, least=4, most=40, grow=0.25, back_off=0.5))
    grown = [limit.observe(metrics(running=limit.value), used=limit.value) for _ in range(5)]
    assert grown == [20, 25, 31, 38, 40]
    assert limit.observe(metrics(running=30), used=30) == 40  # not used to the full: no reason to grow
    assert limit.observe(metrics(running=32, waiting=8), used=40) == 40  # full, and some wait there
    assert limit.observe(metrics(running=30, waiting=6, preemptions=3), used=40) == 18
    assert limit.observe(metrics(running=18, preemptions=3), used=18) == 22
    for preemptions in range(4, 10):
        limit.observe(metrics(running=limit.value, preemptions=preemptions), used=limit.value)
    assert limit.value == 4


def test_batches_follow_the_buffer():
    batch = AdaptiveBatch(capacity=100, most=40, least=2)
    assert batch.next(waiting=0, running=0) == 40
    assert batch.next(waiting=50, running=0) == 20
    assert batch.next(waiting=50, running=45) == 5
    assert batch.next(waiting=98, running=0) == 2
    assert batch.next(waiting=99, running=0) == 1
    assert batch.next(waiting=60, running=45) == 0


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (LimitConfig, {"first": 2, "least": 3}),
        (LimitConfig, {"grow": 0.0}),
        (LimitConfig, {"back_off": 1.0}),
        (AdaptiveBatch, {"capacity": 4, "most": 5}),
        (AdaptiveBatch, {"capacity": 4, "most": 4, "least": 0}),
    ],
)
def test_values_out_of_range_are_named(make, options):
    with pytest.raises(ValueError, match=str(list(options.values())[-1])):
        make(**options)


def test_seeds_differ_by_each_part_and_repeat():
    seeds = {derive_seed(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 1), (11,)]}
    assert len(seeds) == 7
    assert derive_seed(3, 4, 5) == derive_seed(3, 4, 5)
    assert all(0 <= seed < 2**56 for seed in seeds)
