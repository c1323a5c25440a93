"""ROL-07: the prefix cache survives a weight update, and repeated prompts are continued from what the old model made.

vllm-project/vllm#9744, NVIDIA-NeMo/RL#4018, InternLM/lmdeploy#4917, PrimeIntellect-ai/prime-rl#2270,
verl-project/verl#6523: the gap between trainer and rollout grows with the steps and is gone after a restart.

The real vLLM with its prefix cache on is compared with a fresh engine that was started with the new weights.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from drivetrain_rollout import Completion, EngineConfig, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import load_tensors, write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_sharding import digest
from engines import push, run, sample, vllm_config, vllm_worker

PROMPT = tuple(1 + (7 * k) % 40 for k in range(200))  # longer than a block of the cache
TOKENS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed, max_position_embeddings=512) for seed in (0, 1)]


@pytest.fixture
def served(models: list[Path]) -> Iterator[RemoteEngine]:
    with vllm_worker() as peer:
        config = msgspec.structs.replace(vllm_config(models[0]), max_model_len=512)
        engine = RemoteEngine(peer, msgspec.structs.replace(config, engine_args={"enable_prefix_caching": True}))
        yield engine
        run(engine.close())


def request(name: str, tokens: int = TOKENS, continued: Completion | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0),
        continued=continued,
    )


def fresh(folder: Path, wanted: GenerateRequest) -> Completion:
    engine = TransformersEngine(EngineConfig(engine="transformers", model=str(folder)))
    [found] = sample(engine, [wanted])
    run(engine.close())
    return found


def same(one: Completion, other: Completion) -> bool:
    apart = [abs(a - b) for a, b in zip(one.rollout_logprobs, other.rollout_logprobs, strict=True)]
    return one.response_token_ids == other.response_token_ids and max(apart) < 1e-4


def test_nothing_of_the_old_weights_is_reused(served: RemoteEngine, models: list[Path]):
    old = sample(served, [request("a"), request("b")])
    assert same(old[0], old[1])
    assert same(old[0], fresh(models[0], request("fresh")))
    push(served, load_tensors(models[1]))
    new = sample(served, [request("c"), request("d")])
    expected = fresh(models[1], request("fresh"))
    assert not same(old[0], expected)
    assert same(new[0], expected)
    assert same(new[1], expected)

    async def update_in_flight() -> list[Completion]:
        tasks = [asyncio.ensure_future(served.generate(request(str(index), 200))) for index in range(4)]
        while (await served.metrics()).running == 0:
            await asyncio.sleep(0.001)
        await served.pause("keep")
        weights = load_tensors(models[0])
        await served.update_weights(WeightUpdate(policy_version=2, digest=digest(weights), tensors=weights))
        await served.resume()
        return await asyncio.gather(*tasks)

    for completion in run(update_in_flight()):
        first, second = completion.version_spans
        assert (first.policy_version, second.policy_version) == (1, 2)
        begun = msgspec.structs.replace(
            completion,
            response_token_ids=completion.response_token_ids[: first.tokens],
            rollout_logprobs=completion.rollout_logprobs[: first.tokens],
            version_spans=(VersionSpan(1, first.tokens),),
            finish_reason="abort",
        )
        assert same(completion, fresh(models[0], request("fresh", 200, begun)))
