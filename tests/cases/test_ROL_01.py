"""ROL-01: log-probs of the rollout ignore the temperature, or apply it twice.

huggingface/trl#4159, PrimeIntellect-ai/prime-rl#697, NVIDIA-NeMo/RL#935, vllm-project/vime#64: at temperature 0.6 the
importance ratio of the first token is about 2. vLLM returns log-probs of the raw logits unless told otherwise, or the
trainer divides log-probs, not logits, by the temperature.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivetrain_rollout import EngineConfig, GenerateRequest, RolloutEngine, SamplingParams
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import reference_logprobs, write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_rollout.vllm import _arguments
from engines import PROMPTS, run, sample, vllm_config, vllm_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    if request.param == "transformers":
        found = TransformersEngine(EngineConfig(engine="transformers", model=str(folder)))
        yield found
        run(found.close())
        return
    with vllm_worker() as peer:
        served = RemoteEngine(peer, vllm_config(folder))
        yield served
        run(served.close())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_importance_ratios_are_one_at_every_temperature(engine: RolloutEngine, folder: Path, temperature: float):
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=8, temperature=temperature, seed=index),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    found = sample(engine, requests)
    expected = reference_logprobs(folder, found, temperature=temperature)
    ratios = [
        math.exp(wanted - told)
        for completion, row in zip(found, expected, strict=True)
        for told, wanted in zip(completion.rollout_logprobs, row, strict=True)
    ]
    assert all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    raw = reference_logprobs(folder, found, temperature=1.0)
    same = abs(found[0].rollout_logprobs[0] - raw[0][0]) < 1e-3
    assert same == (temperature == 1.0)


def test_an_engine_with_other_logprobs_is_refused(folder: Path):
    config = vllm_config(folder)
    for mode in ("raw_logprobs", "processed_logprobs"):
        wrong = EngineConfig(engine="vllm", model=config.model, engine_args={"logprobs_mode": mode})
        with pytest.raises(ValueError, match="rollout_logprobs are right with processed_logprobs alone"):
            _arguments(wrong, dtype="float32", eager=True)
