"""Small samples through the buffer, at 100,000 a second or more whatever waits in it; beside it, the ledger's pace."""

import itertools
from typing import NamedTuple

import pytest
from drivetrain_buffer import Ledger, RolloutBuffer

SAMPLES = 20_000
BATCH = 256
OWED_PER_SECOND = 100_000


class Sample(NamedTuple):
    sample_id: int
    policy_version: int


def fill(buffer: RolloutBuffer[Sample], sample_ids: range) -> None:
    for sample_id in sample_ids:
        buffer.add(Sample(sample_id, sample_id // BATCH), timeout=1.0)


@pytest.mark.parametrize("waiting", [0, 100_000])
def test_put_and_take(within, benchmark, waiting):
    buffer = RolloutBuffer(
        waiting + BATCH, policy_version=lambda sample: sample.policy_version, max_staleness=1_000, on_stale=print
    )
    fill(buffer, range(waiting))
    starts = itertools.count(waiting, SAMPLES // BATCH * BATCH)

    def put_and_take() -> None:
        start = next(starts)
        for first in range(start, start + SAMPLES // BATCH * BATCH, BATCH):
            fill(buffer, range(first, first + BATCH))
            buffer.take(BATCH, learner_version=first // BATCH, timeout=1.0)

    count = SAMPLES // BATCH * BATCH
    within(put_and_take, limit=count / OWED_PER_SECOND, rounds=9)
    assert len(buffer) == waiting
    assert buffer.counts().stale == 0
    benchmark.extra_info["samples_per_s"] = count / benchmark.stats.stats.median


def test_issue_and_end(benchmark, tmp_path):
    starts = itertools.count(0, SAMPLES)
    with Ledger(tmp_path / "ledger") as ledger:

        def issue_and_end() -> None:
            start = next(starts)
            for sample_id in range(start, start + SAMPLES):
                ledger.issue(sample_id)
            for sample_id in range(start, start + SAMPLES):
                ledger.end(sample_id, "trained")

        benchmark.pedantic(issue_and_end, rounds=5, warmup_rounds=1)
        assert ledger.check().trained == 6 * SAMPLES
    benchmark.extra_info["samples_per_s"] = SAMPLES / benchmark.stats.stats.median
