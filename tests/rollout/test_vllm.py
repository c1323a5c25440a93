"""vLLM, for real: the contract and what only a model can show, on the CPU in a worker process."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drivetrain_rollout import Completion, EngineConfig, GenerateRequest, SamplingParams, WeightUpdate
from drivetrain_rollout._draw import cut_logits
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import (
    CONTRACT,
    Subject,
    load_tensors,
    reference_logprobs,
    sha256_digest,
    write_tiny_model,
)
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_rollout.vllm import OWNED_ARGUMENTS, _arguments, sampled_logprobs
from drivetrain_transport import Peer
from engines import vllm_worker
from transformers import AutoModelForCausalLM

DEADLINE = 120.0
MAX_MODEL_LEN = 256


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


def requests(prompts: list[tuple[int, ...]], **sampling) -> list[GenerateRequest]:
    return [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        for i, prompt in enumerate(prompts)
    ]


def sample(engine: RemoteEngine, wanted: list[GenerateRequest]) -> list[Completion]:
    async def scenario():
        return await asyncio.gather(*map(engine.generate, wanted))

    return run(scenario())


def push(engine: RemoteEngine, tensors) -> int:
    version = engine.weights.policy_version + 1
    update = WeightUpdate(policy_version=version, digest=sha256_digest(tensors), tensors=tensors)
    run(engine.update_weights(update))
    return version


def worst(found: list[Completion], expected: list[list[float]]) -> float:
    return max(
        abs(a - b)
        for completion, logprobs in zip(found, expected, strict=True)
        for a, b in zip(completion.rollout_logprobs, logprobs, strict=True)
    )


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with vllm_worker("drivetrain_rollout.testing:sha256_digest") as peer:
        yield peer


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    """The model the engine starts with, and one with other weights."""
    root = tmp_path_factory.mktemp("models")
    return tuple(write_tiny_model(root / str(seed), seed=seed, tie_word_embeddings=request.param) for seed in (0, 1))


@pytest.fixture(scope="module")
def subject(peer: Peer, models: tuple[Path, Path]) -> Iterator[Subject]:
    config = EngineConfig(engine="vllm", model=str(models[0]), max_model_len=MAX_MODEL_LEN, kv_cache_bytes=64 << 20)
    engine = RemoteEngine(peer, config)
    weights = [load_tensors(folder) for folder in models]
    yield Subject(engine=engine, weights=weights[0], other_weights=weights[1], digest=sha256_digest)
    run(engine.close())


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Subject], Awaitable[None]], subject: Subject):
    run(check(subject))


def test_the_engine_says_what_it_is(subject: Subject):
    info = subject.engine.info
    assert (info.engine, info.vocab_size, info.max_model_len) == ("vllm", 48, MAX_MODEL_LEN)
    assert (info.dtype, info.device, info.can_sleep) == ("float32", "cpu", False)


PROMPTS = [tuple(1 + (i * k) % 40 for k in range(1, 2 + i)) for i in range(12)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_model(models, subject, temperature):
    found = sample(subject.engine, requests(PROMPTS, max_tokens=12, temperature=temperature))
    assert [completion.prompt_token_ids for completion in found] == PROMPTS
    assert worst(found, reference_logprobs(models[0], found, temperature=temperature)) < 1e-4
    assert worst(found, reference_logprobs(models[0], found, temperature=temperature + 0.3)) > 0.1


def test_logprobs_are_of_what_top_k_and_top_p_left(models, subject):
    found = sample(subject.engine, requests([(1, 2, 3)] * 40, max_tokens=1, temperature=0.8, top_k=9, top_p=0.7))
    model = AutoModelForCausalLM.from_pretrained(models[0])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1:]
    expected = cut_logits(logits / 0.8, torch.tensor([9]), torch.tensor([0.7]))[0].log_softmax(-1)
    drawn = {completion.response_token_ids[0]: completion.rollout_logprobs[0] for completion in found}
    assert 1 < len(drawn) <= 9
    assert all(abs(logprob - expected[token].item()) < 1e-4 for token, logprob in drawn.items())


def test_three_updates_are_each_served_with_the_new_weights(models, subject):
    for step, (folder, weights) in enumerate(
        [(models[1], subject.other_weights), (models[0], subject.weights), (models[1], subject.other_weights)]
    ):
        version = push(subject.engine, weights)
        found = sample(subject.engine, requests(PROMPTS, max_tokens=8))
        assert worst(found, reference_logprobs(folder, found, temperature=1.0)) < 1e-4, f"update {step}"
        assert {completion.min_policy_version for completion in found} == {version}
    push(subject.engine, subject.weights)


def test_a_checkpoint_that_holds_both_tied_tensors_is_served(models, subject):
    names = dict(subject.other_weights)
    both = [*subject.other_weights]
    if "lm_head.weight" not in names:
        both.append(("lm_head.weight", names["model.embed_tokens.weight"].clone()))
    push(subject.engine, both)
    found = sample(subject.engine, requests(PROMPTS, max_tokens=8))
    assert worst(found, reference_logprobs(models[1], found, temperature=1.0)) < 1e-4
    push(subject.engine, subject.weights)


def test_no_cached_prefix_survives_an_update(models, subject):
    prompt = tuple(1 + (7 * k) % 40 for k in range(200))  # longer than a block of vLLM's cache
    [wanted] = requests([prompt], max_tokens=16, temperature=0.0)
    before = sample(subject.engine, [wanted, wanted])
    assert before[0].response_token_ids == before[1].response_token_ids
    assert before[0].rollout_logprobs == before[1].rollout_logprobs
    push(subject.engine, subject.other_weights)
    after = sample(subject.engine, [wanted])
    fresh_engine = TransformersEngine(EngineConfig(engine="transformers", model=str(models[1])))
    fresh = sample(fresh_engine, [wanted])
    run(fresh_engine.close())
    push(subject.engine, subject.weights)
    assert after[0].response_token_ids == fresh[0].response_token_ids != before[0].response_token_ids
    assert worst(after, [list(fresh[0].rollout_logprobs)]) < 1e-4


def test_seeds_and_more_prompt_tokens_than_a_step_takes(subject):
    prompts = [tuple(1 + (i + k) % 40 for k in range(240)) for i in range(40)]
    wanted = [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    first, again = sample(subject.engine, wanted), sample(subject.engine, wanted)
    assert [c.response_token_ids for c in first] == [c.response_token_ids for c in again]


IN_PROCESS = """
import asyncio, json, os, sys
import torch
from drivetrain_rollout import EngineConfig, GenerateRequest, RequestError, SamplingParams, WeightsRefused, WeightUpdate
from drivetrain_rollout.testing import reference_logprobs, write_tiny_model
from drivetrain_rollout.vllm import VLLMEngine
from pathlib import Path
from transformers import AutoModelForCausalLM

first, second = Path(sys.argv[1]), Path(sys.argv[2])
facts = {}


def config(**engine_args):
    return EngineConfig(
        engine="vllm", model=str(first), max_model_len=64, kv_cache_bytes=16 << 20, engine_args=engine_args
    )


def failure(make):
    try:
        make()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


async def main():
    facts["unknown"] = failure(lambda: VLLMEngine(config(enable_prefix_cachign=True)))
    tight = EngineConfig(engine="vllm", model=str(first), max_model_len=64, kv_cache_bytes=1 << 10)
    facts["tight"] = failure(lambda: VLLMEngine(tight))
    facts["device"] = failure(lambda: VLLMEngine(EngineConfig(engine="vllm", model=str(first), device="cuda")))
    engine = VLLMEngine(config())
    facts["second"] = failure(lambda: VLLMEngine(config()))
    request = GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=8))

    module = AutoModelForCausalLM.from_pretrained(second)
    live = list(module.named_parameters())
    cut = "model.layers.1.self_attn.v_proj.weight"  # its layer has q and k by then
    broken = [(name, tensor.to("meta") if name == cut else tensor) for name, tensor in live]
    try:
        await engine.update_weights(WeightUpdate(policy_version=1, digest="1", tensors=broken))
    except WeightsRefused as error:
        facts["broken"] = str(error)
    facts["state"] = engine.weights.status
    try:
        await engine.generate(request)
    except RequestError as error:
        facts["stale"] = error.reason
    await engine.update_weights(WeightUpdate(policy_version=2, digest="2", tensors=iter(live)))
    completion = await engine.generate(request)
    [expected] = reference_logprobs(second, [completion], temperature=1.0)
    facts["error"] = max(abs(a - b) for a, b in zip(completion.rollout_logprobs, expected, strict=True))
    facts["version"] = completion.min_policy_version
    await engine.close()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    facts["group"] = failure(lambda: VLLMEngine(config()))


asyncio.run(main())
print(json.dumps(facts))
"""


def test_in_the_callers_own_process(tmp_path):
    folders = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, *map(str, folders)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert "no argument 'enable_prefix_cachign'; did you mean 'enable_prefix_caching'?" in facts["unknown"]
    assert facts["tight"].startswith("ValueError: vLLM did not start: No available memory for the cache blocks")
    assert "its kv_cache_memory_bytes is EngineConfig.kv_cache_bytes" in facts["tight"]
    assert "device 'cuda': the installed vLLM" in facts["device"]
    assert facts["second"].startswith("RuntimeError: a VLLMEngine is open in this process already")
    assert facts["broken"].startswith("policy version 1: loading broke off (")
    assert (facts["state"], facts["stale"]) == ("refused", "stale_weights")
    assert facts["error"] < 1e-4
    assert facts["version"] == 2
    assert facts["group"].startswith("RuntimeError: torch.distributed is initialised in this process")


def at(**logprobs: float) -> dict[int, SimpleNamespace]:
    return {int(token[1:]): SimpleNamespace(logprob=value) for token, value in logprobs.items()}


def test_the_sampled_tokens_logprob_is_taken_not_the_first():
    assert sampled_logprobs([880], [at(_512=-0.10, _880=-2.30)]) == [-2.30]


def test_logprobs_that_lack_stay_lacking():
    assert sampled_logprobs([880], None) is None
    assert sampled_logprobs([880], []) == []
    assert sampled_logprobs([880, 512], [at(_880=-2.3), None]) == [-2.3]
    assert sampled_logprobs([880, 512], [at(_880=-2.3), at(_7=-0.1)]) == [-2.3]


def test_flat_logprobs_are_taken_as_they_are():
    assert sampled_logprobs([5, 6], SimpleNamespace(token_ids=[5, 6], logprobs=[-0.5, -0.25])) == [-0.5, -0.25]


@pytest.mark.parametrize("name", sorted(OWNED_ARGUMENTS))
def test_arguments_the_engine_sets_itself_are_refused(name: str):
    config = EngineConfig(engine="vllm", model="m", engine_args={name: "raw_logprobs"})
    with pytest.raises(ValueError, match=f"engine_args may not set '{name}': use "):
        _arguments(config, dtype="float32", eager=True)
