"""ROL-03: the stored log-prob is another token's, or None, or NaN.

NVIDIA-NeMo/RL#3297, huggingface/trl#3867, huggingface/trl#6693, NVIDIA-NeMo/Gym#1612: the first entry of the engine's
dict is taken instead of the sampled token's; or log-probs come back empty and the loss mask silently becomes zero.
"""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from drivetrain_rollout import GenerateRequest, RequestError, SamplingParams
from drivetrain_rollout._checks import completion
from drivetrain_rollout.testing import ScriptedEngine
from drivetrain_rollout.types import VersionSpan
from drivetrain_rollout.vllm import sampled_logprobs
from engines import run


def entry(logprob: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=2))


def test_the_sampled_token_is_looked_up():
    assert sampled_logprobs([880], [{512: entry(-0.10), 880: entry(-2.30)}]) == [-2.30]
    assert sampled_logprobs([880], [{880: entry(-2.30), 512: entry(-0.10)}]) == [-2.30]
    assert sampled_logprobs([880, 4], [{512: entry(-0.10), 880: entry(-2.30)}, {5: entry(-0.1)}]) == [-2.30]
    assert sampled_logprobs([880], None) is None


BAD: list[Any] = [None, [], [-0.1], [-0.1, math.nan], [-0.1, -math.inf], [-0.1, None]]


@pytest.mark.parametrize("logprobs", BAD, ids=str)
def test_anything_else_is_an_error_that_names_the_sample(logprobs: Any):
    with pytest.raises(RequestError, match="'sample-7'") as raised:
        completion(
            request("sample-7"),
            token_ids=[5, 6],
            logprobs=logprobs,
            finish_reason="length",
            spans=[VersionSpan(0, 2)],
        )
    assert raised.value.reason == "bad_logprobs"


@pytest.mark.parametrize("logprobs", BAD, ids=str)
def test_only_that_request_fails(logprobs: Any):
    engine = ScriptedEngine()
    backend = engine._loop._backend  # type: ignore[attr-defined]
    told = backend._told

    def wrongly(key: int, reason: str) -> Any:
        found = told(key, reason)
        if backend._added[key].request_id == "bad":
            object.__setattr__(found, "logprobs", logprobs)
        return found

    backend._told = wrongly

    async def scenario() -> list[Any]:
        names = ("good", "bad", "fine")
        found = await asyncio.gather(*(engine.generate(request(name)) for name in names), return_exceptions=True)
        failed = (await engine.metrics()).failed
        await engine.close()
        return [*found, failed]

    good, bad, fine, failed = run(scenario())
    assert [len(each.rollout_logprobs) for each in (good, fine)] == [2, 2]
    assert (bad.request_id, bad.reason) == ("bad", "bad_logprobs")
    assert failed == {"bad_logprobs": 1}
