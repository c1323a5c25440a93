"""The transformers engine against the contract, and against one forward pass of the same model."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from drivetrain_rollout import Completion, EngineConfig, GenerateRequest, SamplingParams, WeightUpdate
from drivetrain_rollout.testing import (
    CONTRACT,
    Subject,
    check_close,
    load_tensors,
    reference_logprobs,
    sha256_digest,
    write_tiny_model,
)
from drivetrain_rollout.transformers import TransformersEngine
from transformers import MistralConfig, MistralForCausalLM

DEADLINE = 60.0


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


def sample(engine: TransformersEngine, prompts: list[tuple[int, ...]], **sampling) -> list[Completion]:
    async def scenario():
        requests = [
            GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*map(engine.generate, requests))

    return run(scenario())


def worst(found: list[Completion], expected: list[list[float]]) -> float:
    return max(
        abs(a - b)
        for completion, logprobs in zip(found, expected, strict=True)
        for a, b in zip(completion.rollout_logprobs, logprobs, strict=True)
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    """The model the engine starts with, and one with other weights."""
    root = tmp_path_factory.mktemp("models")
    return tuple(write_tiny_model(root / str(seed), seed=seed, tie_word_embeddings=request.param) for seed in (0, 1))


@pytest.fixture(scope="module")
def subject(models: tuple[Path, Path]) -> Iterator[Subject]:
    config = EngineConfig(engine="transformers", model=str(models[0]), max_model_len=96, max_num_seqs=32)
    engine = TransformersEngine(config, digest=sha256_digest)
    weights = [load_tensors(folder) for folder in models]
    yield Subject(engine=engine, weights=weights[0], other_weights=weights[1], digest=sha256_digest)
    run(engine.close())


@pytest.mark.parametrize("check", [*CONTRACT], ids=lambda check: check.__name__)
def test_contract(check: Callable[[Subject], Awaitable[None]], subject: Subject):
    run(check(subject))


PROMPTS = [tuple(1 + (i * k) % 40 for k in range(1, 2 + i)) for i in range(12)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_model_for_prompts_of_many_lengths(models, subject, temperature):
    found = sample(subject.engine, PROMPTS, max_tokens=12, temperature=temperature)
    assert [completion.prompt_token_ids for completion in found] == PROMPTS
    assert worst(found, reference_logprobs(models[0], found, temperature=temperature)) < 1e-4
    assert worst(found, reference_logprobs(models[0], found, temperature=temperature + 0.3)) > 0.1


def test_logprobs_follow_an_update_of_all_tensors(models, subject):
    tensors = list(subject.other_weights)
    update = WeightUpdate(policy_version=41, digest=sha256_digest(tensors), tensors=tensors)
    run(subject.engine.update_weights(update))
    found = sample(subject.engine, PROMPTS, max_tokens=6)
    assert worst(found, reference_logprobs(models[1], found, temperature=1.0)) < 1e-4
    assert {completion.min_policy_version for completion in found} == {41}
    tensors = list(subject.weights)
    run(subject.engine.update_weights(WeightUpdate(policy_version=42, digest=sha256_digest(tensors), tensors=tensors)))


def test_greedy_is_the_argmax_of_each_step(models, subject):
    [found] = sample(subject.engine, [(1, 2, 3)], max_tokens=8, temperature=0.0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[0])
    ids = [1, 2, 3]
    with torch.inference_mode():
        for _ in range(8):
            ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
    assert found.response_token_ids == tuple(ids[3:])


def test_draws_follow_the_models_distribution(models, subject):
    found = sample(subject.engine, [(1, 2, 3)] * 3000, max_tokens=1)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[0])
    with torch.inference_mode():
        probs = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([c.response_token_ids[0] for c in found]), minlength=48)
    # Pearson's statistic over 48 tokens: mean 47, standard deviation 9.7.
    assert ((counts - 3000 * probs) ** 2 / (3000 * probs)).sum() < 110


def test_a_sliding_window_sees_the_right_tokens_beside_longer_prompts(tmp_path):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=48,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
        sliding_window=4,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    engine = TransformersEngine(EngineConfig(engine="transformers", model=str(tmp_path)))
    found = sample(engine, PROMPTS, max_tokens=10)
    run(engine.close())
    assert worst(found, reference_logprobs(tmp_path, found, temperature=1.0)) < 1e-4


def test_top_k_and_top_p_never_draw_what_was_cut(subject):
    found = sample(subject.engine, [(1, 2, 3)] * 200, max_tokens=1, top_k=3)
    drawn = {(c.response_token_ids[0], round(c.rollout_logprobs[0], 3)) for c in found}
    assert len(drawn) == 3
    assert math.isclose(sum(math.exp(logprob) for _, logprob in drawn), 1.0, abs_tol=0.01)


def test_a_budget_for_the_cache_is_refused():
    with pytest.raises(ValueError, match="kv_cache_bytes 1024: the transformers engine has no budget"):
        TransformersEngine(EngineConfig(engine="transformers", model="m", kv_cache_bytes=1024))


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing-here' is no folder with a config\.json"):
        TransformersEngine(EngineConfig(engine="transformers", model=str(tmp_path / "nothing-here")))


def test_close(models):
    engine = TransformersEngine(EngineConfig(engine="transformers", model=str(models[0])))
    tensors = load_tensors(models[0])
    run(check_close(Subject(engine=engine, weights=tensors, other_weights=tensors, digest=sha256_digest)))
