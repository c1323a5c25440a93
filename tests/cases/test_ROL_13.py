"""ROL-13: an engine that shares the GPU runs out of memory when it wakes, or gives back less with each sleep.

vllm-project/vllm#15254, vllm-project/vllm#14189, OpenRLHF/OpenRLHF#1274, verl-project/verl#575, NVIDIA-NeMo/RL#2619:
old weights, new ones and the KV cache lie there together; references are left over; allocator modes do not go together.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drivetrain_rollout import EngineConfig
from drivetrain_rollout.vllm import _arguments
from programs import environment

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_flat_over_cycles_of_sleep_sync_and_wake(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, SUPPORT / "colocated.py", tmp_path, "cycles"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    for when in ("asleep", "awake"):
        first, last = statistics.median(found[when][1:4]), statistics.median(found[when][-3:])
        assert abs(first - last) < 0.01 * found["total"], (when, found[when])
    assert min(found["asleep"]) > 0.9 * found["total"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_does_not_go_with_sleep_is_named_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    config = EngineConfig(engine="vllm", model="none", device="cuda", engine_args={"enable_sleep_mode": True})
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8, expandable_segments:True")
    with pytest.raises(ValueError, match=f"{name} sets expandable_segments:True"):
        _arguments(config, dtype="bfloat16", eager=True)
    monkeypatch.setenv(name, "expandable_segments:False")
    assert _arguments(config, dtype="bfloat16", eager=True)["enable_sleep_mode"]
