"""A vLLM engine that shares a GPU, in a process of its own: sleeps, is woken and gets weights, and says what it saw.

python colocated.py FOLDER orders|cycles
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from drivetrain_rollout import EngineConfig, GenerateRequest, RequestError, SamplingParams, WeightUpdate
from drivetrain_rollout.testing import load_tensors, sha256_digest, write_tiny_model
from drivetrain_rollout.vllm import VLLMEngine

CYCLES = 20


def start(folder: Path) -> VLLMEngine:
    config = EngineConfig(
        engine="vllm",
        model=str(folder),
        device="cuda",
        dtype="float32",
        max_model_len=256,
        memory_fraction=0.3,
        enforce_eager=True,
        engine_args={"enable_sleep_mode": True},
    )
    return VLLMEngine(config, digest=sha256_digest)


async def greedy(engine: VLLMEngine) -> list[Any]:
    request = GenerateRequest(
        request_id="greedy", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=24, temperature=0.0)
    )
    try:
        completion = await engine.generate(request)
    except RequestError as error:
        return [error.reason]
    return [list(completion.response_token_ids), completion.min_policy_version]


async def orders(engine: VLLMEngine, tensors: list[Any]) -> dict[str, Any]:
    """What is said after each order of sleep, wake and sync."""
    version = 0

    async def sync() -> str:
        nonlocal version
        version += 1
        update = WeightUpdate(policy_version=version, digest=sha256_digest(tensors), tensors=tensors)
        try:
            await engine.update_weights(update)
        except RuntimeError as error:
            return str(error)
        return "held"

    found: dict[str, Any] = {"first": await greedy(engine)}
    await engine.sleep(1)
    await engine.wake()
    found["level 1"] = await greedy(engine)
    await engine.sleep(2)
    await engine.wake()
    await sync()
    found["level 2, sync"] = await greedy(engine)
    await engine.sleep(2)
    await engine.wake()
    found["level 2, no sync"] = await greedy(engine)
    await sync()
    await engine.sleep(2)
    found["sync while asleep"] = await sync()
    found["asleep"] = await greedy(engine)
    await engine.wake()
    await sync()
    found["last"] = await greedy(engine)
    return found


async def cycles(engine: VLLMEngine, tensors: list[Any]) -> dict[str, Any]:
    """Free bytes while asleep and awake, over cycles of sleep, wake and sync."""
    found: dict[str, Any] = {"asleep": [], "awake": [], "total": torch.cuda.mem_get_info()[1]}
    before = await greedy(engine)
    for version in range(1, CYCLES + 1):
        await engine.sleep(2 if version % 2 else 1)
        torch.cuda.empty_cache()
        found["asleep"].append(torch.cuda.mem_get_info()[0])
        await engine.wake()
        update = WeightUpdate(policy_version=version, digest=sha256_digest(tensors), tensors=tensors)
        await engine.update_weights(update)
        found["awake"].append(torch.cuda.mem_get_info()[0])
    found["same"] = (await greedy(engine))[0] == before[0]
    return found


async def main(folder: Path, what: str) -> None:
    write_tiny_model(folder)
    engine = start(folder)
    tensors = [(name, tensor.cuda()) for name, tensor in load_tensors(folder)]
    found = await {"orders": orders, "cycles": cycles}[what](engine, tensors)
    await engine.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
