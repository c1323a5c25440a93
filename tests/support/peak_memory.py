"""The peak of what torch's allocator has handed out on a CPU, kernels' own buffers included."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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


def bf16_products_need_no_buffer(folder: Path) -> bool:
    """Whether this CPU multiplies bf16 matrices without a buffer beside the product, as those with AVX512-BF16 do."""
    inputs, weights = torch.ones(512, 64, dtype=torch.bfloat16), torch.ones(256, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        return peak_bytes(lambda: torch.nn.functional.linear(inputs, weights), folder) == 512 * 256 * 2
