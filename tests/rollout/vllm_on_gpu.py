"""VLLMEngine on a GPU, in a process of its own: prints one JSON object of what it saw. Run by test_vllm_gpu.py.

python vllm_on_gpu.py FOLDER DTYPE [eager]
"""

import asyncio
import json
import sys
import time
import traceback
from pathlib import Path

import torch
from drivetrain_rollout import EngineConfig, GenerateRequest, SamplingParams, WeightUpdate
from drivetrain_rollout.testing import (
    CONTRACT,
    Subject,
    check_close,
    load_tensors,
    reference_logprobs,
    sha256_digest,
    write_tiny_model,
)
from drivetrain_rollout.vllm import VLLMEngine

PROMPTS = [tuple(1 + (i * k) % 40 for k in range(1, 2 + i)) for i in range(12)]


def requests(prompts: list[tuple[int, ...]], **sampling: object) -> list[GenerateRequest]:
    return [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        for i, prompt in enumerate(prompts)
    ]


async def difference(engine: VLLMEngine, folder: Path, temperature: float) -> dict[str, float]:
    """Of the engine's log-probs to those of transformers in fp32."""
    found = await asyncio.gather(*map(engine.generate, requests(PROMPTS, max_tokens=12, temperature=temperature)))
    expected = reference_logprobs(folder, found, temperature=temperature)
    differences = [
        abs(a - b) for c, row in zip(found, expected, strict=True) for a, b in zip(c.rollout_logprobs, row, strict=True)
    ]
    return {"mean": sum(differences) / len(differences), "max": max(differences)}


async def observe(folders: list[Path], dtype: str, eager: bool) -> dict[str, object]:
    facts: dict[str, object] = {}
    started = time.perf_counter()
    engine = VLLMEngine(
        EngineConfig(
            engine="vllm",
            model=str(folders[0]),
            device="cuda",
            dtype=dtype,
            max_model_len=256,
            memory_fraction=0.3,
            enforce_eager=eager,
            engine_args={"enable_sleep_mode": True},
        ),
        digest=sha256_digest,
    )
    facts["seconds_up"] = time.perf_counter() - started
    facts["info"] = f"{engine.info}"
    tensors = [[(name, tensor.cuda()) for name, tensor in load_tensors(folder)] for folder in folders]
    facts["temperatures"] = {str(t): await difference(engine, folders[0], t) for t in (0.6, 1.0, 1.3)}

    updates = []
    for version, index in enumerate((1, 0, 1, 0), start=1):
        began = time.perf_counter()
        digest = sha256_digest(tensors[index])
        await engine.update_weights(WeightUpdate(policy_version=version, digest=digest, tensors=tensors[index]))
        updates.append({"seconds": time.perf_counter() - began} | await difference(engine, folders[index], 1.0))
    facts["updates"] = updates

    subject = Subject(engine=engine, weights=tensors[0], other_weights=tensors[1], digest=sha256_digest)
    failures = {}
    for check in [*CONTRACT, check_close]:
        if check is check_close:
            await engine.sleep(1)
            facts["free_while_asleep"] = torch.cuda.mem_get_info()[0] / torch.cuda.mem_get_info()[1]
            await engine.wake()
            batch = requests([(1, 2, 3, 4, 5, 6, 7)] * 256, max_tokens=7)
            began = time.perf_counter()
            await asyncio.gather(*map(engine.generate, batch))
            facts["seconds_256x7"] = time.perf_counter() - began
        try:
            await check(subject)
        except Exception:  # noqa: BLE001 - reported, and the others are checked too
            failures[check.__name__] = traceback.format_exc(limit=-2)
    facts["contract_failures"] = failures
    return facts


if __name__ == "__main__":
    root, wanted, *rest = sys.argv[1:]
    models = [write_tiny_model(Path(root) / str(seed), seed=seed, tie_word_embeddings=True) for seed in (0, 1)]
    sys.stdout.write(json.dumps(asyncio.run(observe(models, wanted, eager=rest == ["eager"]))) + "\n")
