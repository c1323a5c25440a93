"""How a benchmark states its claim: two sides measured in turns, or a limit, as `ratio` and `owed` in its result."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

# Read when torch is imported, and as the app sets it: threads that wait do not take the cores from other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

Work = Callable[[], Any]


@pytest.fixture
def against(benchmark: Any) -> Callable[..., None]:
    """Measure ours and a baseline in turns; `ratio` is how many times faster ours is, by the medians."""

    def measure(ours: Work, baseline: Work, *, owed: float, rounds: int) -> None:
        seconds: list[float] = []

        def run_baseline() -> None:
            start = time.perf_counter()
            baseline()
            seconds.append(time.perf_counter() - start)

        benchmark.pedantic(ours, setup=run_baseline, rounds=rounds, warmup_rounds=1)
        baseline_median = statistics.median(seconds[1:])
        ratio = baseline_median / benchmark.stats.stats.median
        benchmark.extra_info.update(ratio=ratio, owed=owed, baseline_median_s=baseline_median)

    return measure


@pytest.fixture
def within(benchmark: Any) -> Callable[..., None]:
    """Measure work that is to take `limit` seconds at most; `ratio` is the limit over the median."""

    def measure(work: Work, *, limit: float, rounds: int, setup: Work | None = None) -> None:
        benchmark.pedantic(work, setup=setup, rounds=rounds, warmup_rounds=1)
        benchmark.extra_info.update(ratio=limit / benchmark.stats.stats.median, owed=1.0, limit=limit)

    return measure
