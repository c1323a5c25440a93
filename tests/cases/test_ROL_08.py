"""ROL-08: after a sleep that dropped the weights an engine answers gibberish, or what an old model says.

vllm-project/vllm#16564, vllm-project/vllm#29341, vllm-project/vllm#54235, huggingface/trl#5312, NVIDIA-NeMo/RL#2631:
waking does not bring the weights back, and the trainer believes that they are current.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drivetrain_rollout import EnginePool, GenerateRequest, RequestError, SamplingParams, WeightUpdate
from drivetrain_rollout.testing import ScriptedEngine
from programs import environment

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_orders_of_sleep_wake_and_sync(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, SUPPORT / "colocated.py", tmp_path, "orders"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens, version = found["first"]
    assert version == 0
    assert found["level 1"] == [tokens, 0]
    assert found["level 2, sync"] == [tokens, 1]
    assert found["level 2, no sync"] == ["stale_weights"]
    assert "the engine sleeps; wake it first" in found["sync while asleep"]
    assert found["asleep"] == ["engine_asleep"]
    assert found["last"] == [tokens, 4]


@pytest.mark.parametrize("pooled", [False, True], ids=["engine", "pool"])
def test_who_lost_its_weights_says_so_and_serves_none(pooled: bool):
    async def scenario() -> None:
        engine = EnginePool([ScriptedEngine(), ScriptedEngine()]) if pooled else ScriptedEngine()
        request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=3))
        await engine.sleep(2)
        with pytest.raises(RequestError) as asleep:
            await engine.generate(request)
        with pytest.raises(RuntimeError, match="wake it first"):
            await engine.update_weights(WeightUpdate(policy_version=1, digest="d", tensors=[]))
        await engine.wake()
        with pytest.raises(RequestError) as stale:
            await engine.generate(request)
        assert (asleep.value.reason, stale.value.reason) == ("engine_asleep", "stale_weights")
        assert engine.weights.status == "refused"
        await engine.update_weights(WeightUpdate(policy_version=2, digest="d", tensors=[]))
        assert (await engine.generate(request)).min_policy_version == 2
        await engine.close()

    asyncio.run(scenario())
