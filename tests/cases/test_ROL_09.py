"""ROL-09: a prompt that is longer than the engine allows wedges the run, and hours later the trainer times out.

huggingface/trl#3433, huggingface/trl#2923: the engine's exception is swallowed in a worker, and the caller waits.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drivetrain_rollout import EngineConfig, EnginePool, GenerateRequest, RolloutEngine, SamplingParams
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from engines import run, vllm_config, vllm_worker

LONGEST = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["transformers", "pool", "vllm"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    if request.param == "vllm":
        with vllm_worker() as peer:
            served = RemoteEngine(peer, vllm_config(folder))
            yield served
            run(served.close())
        return
    config = EngineConfig(engine="transformers", model=str(folder), max_model_len=LONGEST)
    made: RolloutEngine = TransformersEngine(config)
    made = EnginePool([made]) if request.param == "pool" else made
    yield made
    run(made.close())


def test_it_fails_at_once_by_name_and_the_others_are_served(engine: RolloutEngine):
    lengths = {"good": 5, "at the limit": LONGEST, "over it": LONGEST + 1, "room for one": LONGEST - 1, "fine": 9}
    requests = [
        GenerateRequest(request_id=name, prompt_token_ids=tuple([7] * length), sampling=SamplingParams(max_tokens=12))
        for name, length in lengths.items()
    ]

    async def scenario() -> tuple[list[Any], dict[str, int]]:
        found = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        return found, (await engine.metrics()).failed

    (good, limit, over, one, fine), failed = run(scenario())
    assert [len(good.response_token_ids), len(fine.response_token_ids)] == [12, 12]
    assert (len(one.response_token_ids), one.finish_reason) == (1, "length")
    assert [(error.request_id, error.reason) for error in (limit, over)] == [
        ("at the limit", "prompt_too_long"),
        ("over it", "prompt_too_long"),
    ]
    assert f"a prompt of {LONGEST + 1} tokens" in str(over)
    assert failed == {"prompt_too_long": 2}
