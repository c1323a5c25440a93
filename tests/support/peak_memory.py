"""The peak of what torch's allocator has handed out on a CPU, kernels' own buffers included."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], Any], folder: Path) -> int:
    """The most bytes that there were at a time, while `step` ran, of those that were allocated in it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    assert events, "the profiler has seen no allocation"
    return peak
