"""The transformers engine against the contract, and against one forward pass of the same model."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_rollout import Completion, EngineConfig, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate
from drivetrain_rollout._checks import completion
from drivetrain_rollout.testing import (
    CONTRACT,
    Subject,
    check_close,
    load_tensors,
    reference_logprobs,
    sha256_digest,
    write_tiny_model,
)
from drivetrain_rollout.transformers import TransformersEngine, _TransformersBackend
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


class Batch:
    """The model without the engine's thread: steps one at a time, so that who runs beside whom is certain."""

    def __init__(self, model: Path, **config: Any) -> None:
        self.backend = _TransformersBackend(EngineConfig(engine="transformers", model=str(model), **config))
        self.requests: dict[int, GenerateRequest] = {}
        self.ended: dict[int, Completion] = {}

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> int:
        key = len(self.requests)
        sampling = SamplingParams(max_tokens=max_tokens, seed=100 + key)
        request = GenerateRequest(request_id=str(key), prompt_token_ids=prompt, sampling=sampling)
        self.requests[key] = request
        self.backend.add(key, request)
        return key

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for sampled in self.backend.step():
                self.ended[sampled.key] = completion(
                    self.requests[sampled.key],
                    token_ids=sampled.token_ids,
                    logprobs=sampled.logprobs,
                    finish_reason=sampled.finish_reason,
                    spans=[VersionSpan(0, len(sampled.token_ids))],
                )

    def sampled(self, *keys: int) -> list[int]:
        return [len(each.token_ids) for each in self.backend.progress(keys)]


def test_requests_join_what_runs_and_leave_it_and_draw_what_they_draw_alone(models):
    batch = Batch(models[0])
    long = batch.add((1, 2, 3), 40)
    batch.step(5)
    short = [batch.add(prompt, 2 + i) for i, prompt in enumerate(PROMPTS[4:8])]
    batch.step()
    assert batch.sampled(long, *short) == [5, 1, 1, 1, 1]
    batch.step()
    assert batch.sampled(long, *short[1:]) == [6, 2, 2, 2]
    batch.backend.abort(short[3])
    later = batch.add(PROMPTS[11], 3)
    batch.step(5)
    assert sorted(batch.ended) == [*short[:3], later]
    batch.step(40)
    assert sorted(batch.ended) == [long, *short[:3], later]
    found = list(batch.ended.values())
    assert worst(found, reference_logprobs(models[0], found, temperature=1.0)) < 1e-4
    for key, beside_others in batch.ended.items():
        alone = Batch(models[0])
        alone.requests = dict.fromkeys(range(key), batch.requests[key])
        alone.add(batch.requests[key].prompt_token_ids, batch.requests[key].sampling.max_tokens)
        alone.step(40)
        assert alone.ended[key].response_token_ids == beside_others.response_token_ids


def test_no_more_than_max_num_seqs_run_and_the_next_begins_when_one_ends(models):
    batch = Batch(models[0], max_num_seqs=2)
    keys = [batch.add((1, 2, 3), tokens) for tokens in (3, 8, 8, 8)]
    batch.step(2)
    assert (batch.sampled(*keys), batch.backend.usage().waiting) == ([2, 2, 0, 0], 2)
    batch.step(2)
    assert (list(batch.ended), batch.sampled(*keys[1:]), batch.backend.usage().waiting) == ([0], [3, 1, 0], 1)
    batch.step(40)
    assert sorted(batch.ended) == keys


def test_what_is_held_goes_on_with_the_weights_that_came(models, subject):
    batch = Batch(models[0], max_num_seqs=3)
    keys = [batch.add(prompt, 12) for prompt in PROMPTS[:4]]
    batch.step(5)
    assert batch.backend.drain() == []
    assert batch.sampled(*keys) == [5, 5, 5, 0]
    batch.backend.load(dict(subject.other_weights))
    assert batch.sampled(*keys) == [5, 5, 5, 0]
    batch.step()
    assert batch.sampled(*keys) == [6, 6, 6, 0]  # before those that have not begun
    batch.step(40)
    found = [batch.ended[key] for key in keys]
    of_old, of_new = (reference_logprobs(folder, found, temperature=1.0) for folder in models)
    expected = [old[:held] + new[held:] for old, new, held in zip(of_old, of_new, [5, 5, 5, 0], strict=True)]
    assert worst(found, expected) < 1e-4
    assert worst(found, of_old) > 0.1


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
    batch = Batch(tmp_path)
    first = [batch.add(prompt, 10) for prompt in PROMPTS]
    batch.step(6)
    late = batch.add((1, 2, 3, 4, 5, 6), 10)
    batch.step(3)
    assert batch.sampled(first[0], late) == [9, 0]  # its cache has forgotten tokens, so that nothing can join it
    batch.step(20)
    found = list(batch.ended.values())
    assert len(found) == len(PROMPTS) + 1
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
