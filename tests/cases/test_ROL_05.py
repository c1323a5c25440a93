"""ROL-05: the policy samples ids that its tokenizer does not have, since the head is wider; later one is fed back.

NVIDIA-NeMo/RL#237, vllm-project/vllm#13175, OpenRLHF/OpenRLHF#1117, rllm-org/rllm#751

The head here has 128 rows, the tokenizer 120 ids, and the rows in between are made the likeliest of all.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from drivetrain_rollout import Completion, EngineConfig, GenerateRequest, RequestError, RolloutEngine, SamplingParams
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from engines import PROMPTS, run, sample, vllm_config, vllm_worker
from transformers import AutoModelForCausalLM

HEAD, TOKENIZER = 128, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=HEAD)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[TOKENIZER:] *= 6
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    if request.param == "transformers":
        config = EngineConfig(engine="transformers", model=str(folder), vocab_size=TOKENIZER)
        found = TransformersEngine(config)
        yield found
        run(found.close())
        return
    with vllm_worker() as peer:
        served = RemoteEngine(peer, msgspec.structs.replace(vllm_config(folder), vocab_size=TOKENIZER))
        yield served
        run(served.close())


def requests(temperature: float) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=24, temperature=temperature, seed=index),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def highest(found: list[Completion]) -> int:
    return max(token for completion in found for token in completion.response_token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_they_are_never_sampled_and_the_logprobs_know_it(engine: RolloutEngine, folder: Path, temperature: float):
    assert engine.info.vocab_size == TOKENIZER
    found = sample(engine, requests(temperature))
    assert highest(found) < TOKENIZER
    model = AutoModelForCausalLM.from_pretrained(folder)
    for completion in found:
        ids = torch.tensor([completion.prompt_token_ids + completion.response_token_ids])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(completion.prompt_token_ids) - 1 : -1, :TOKENIZER]
        response = torch.tensor(completion.response_token_ids)[:, None]
        expected = logits.log_softmax(-1).gather(1, response)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs), expected, atol=1e-4, rtol=0)


def test_one_that_is_fed_back_fails_alone(engine: RolloutEngine):
    bad = GenerateRequest(request_id="bad", prompt_token_ids=(1, 125), sampling=SamplingParams(max_tokens=2))

    async def scenario() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, [*requests(1.0), bad]), return_exceptions=True)

    *found, error = run(scenario())
    assert all(isinstance(completion, Completion) for completion in found)
    assert isinstance(error, RequestError)
    assert (error.request_id, error.reason) == ("bad", "token_out_of_vocabulary")


def test_without_the_tokenizers_size_they_are_sampled(folder: Path):
    engine = TransformersEngine(EngineConfig(engine="transformers", model=str(folder)))
    assert highest(sample(engine, requests(1.0))) >= TOKENIZER
    run(engine.close())
