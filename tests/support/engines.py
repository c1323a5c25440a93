"""Engines that check updates by the learner's digest, what they are asked, and what a trainer's model says to it."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from drivetrain_rollout import (
    Completion,
    EngineConfig,
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    WeightUpdate,
)
from drivetrain_rollout.remote import PROTOCOL
from drivetrain_sharding import digest
from drivetrain_transport import Endpoint, Peer
from torch import Tensor

DEADLINE = 120.0
PROMPTS = [tuple(1 + (i * k) % 40 for k in range(1, 3 + i)) for i in range(6)]
T = TypeVar("T")

_WORKER = """
import importlib
import sys
from drivetrain_rollout.remote import serve


def factory(config):
    from drivetrain_rollout.vllm import VLLMEngine

    module, function = sys.argv[2].split(":")
    return VLLMEngine(config, digest=getattr(importlib.import_module(module), function))


serve(sys.argv[1], factory=factory, name="vllm")
"""


@contextmanager
def vllm_worker(digest_function: str = "drivetrain_sharding:digest") -> Iterator[Peer]:
    """A process in which a `RemoteEngine` makes vLLM engines, one after another, that check updates by this digest."""
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        process = subprocess.Popen([sys.executable, "-c", _WORKER, endpoint.address, digest_function])
        try:
            yield endpoint.wait_for_peer(DEADLINE)
            endpoint.close()
            assert process.wait(DEADLINE) == 0, "the worker did not end cleanly"
        finally:
            process.kill()
            process.wait(DEADLINE)


def vllm_config(folder: Any) -> EngineConfig:
    """In fp32 on the CPU."""
    return EngineConfig(
        engine="vllm", model=str(folder), dtype="float32", max_model_len=64, kv_cache_bytes=64 << 20, max_num_seqs=16
    )


def run(awaitable: Awaitable[T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


def push(engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Updates the engine to its next version; the digest that it has then."""
    named = list(tensors)
    update = WeightUpdate(policy_version=engine.weights.policy_version + 1, digest=digest(named), tensors=named)
    state = run(engine.update_weights(update))
    assert (state.status, state.digest) == ("ready", update.digest)
    return update.digest


def sample(engine: RolloutEngine, wanted: Sequence[GenerateRequest] | None = None) -> list[Completion]:
    """What the engine answers; unless told otherwise, a few tokens to each of PROMPTS."""
    requests = wanted or [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, requests))

    return run(all_of_them())


def off(engine: RolloutEngine, model: torch.nn.Module) -> float:
    """By how much the log-probs of what the engine samples now differ, at most, from those that the model gives it."""
    worst = 0.0
    for found in sample(engine):
        ids = found.prompt_token_ids + found.response_token_ids
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(found.prompt_token_ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(found.response_token_ids)[:, None])[:, 0]
        worst = max(worst, (torch.tensor(found.rollout_logprobs) - expected).abs().max().item())
    return worst
