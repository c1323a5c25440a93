"""What is checked on the way out of an engine, and what a complete set of weights is."""

import math

import pytest
import torch
from drivetrain_rollout import GenerateRequest, RequestError, SamplingParams, VersionSpan, WeightsRefused
from drivetrain_rollout._checks import Manifest, completion

REQUEST = GenerateRequest(request_id="r7", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3))
MANIFEST = Manifest(shapes={"embed": (4, 2), "norm": (2,)}, aliases={"head": "embed"})


def weights() -> dict[str, torch.Tensor]:
    return {"embed": torch.arange(8.0).reshape(4, 2), "norm": torch.ones(2)}


def answer(token_ids: list[int], logprobs: list[float | None] | None, finish_reason: str = "stop"):
    return completion(
        REQUEST,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        spans=[VersionSpan(5, len(token_ids))],
    )


def test_a_good_answer_becomes_a_completion():
    found = answer([3, 4], [-0.5, -2.0])
    assert (found.request_id, found.prompt_token_ids) == ("r7", (1, 2))
    assert (found.response_token_ids, found.rollout_logprobs) == ((3, 4), (-0.5, -2.0))
    assert (found.min_policy_version, found.max_policy_version) == (5, 5)


@pytest.mark.parametrize(
    ("logprobs", "text"),
    [
        (None, "no log-prob"),
        ([], "0 log-probs for 2"),
        ([-0.5], "1 log-probs for 2"),
        ([-0.5, None], "no log-prob"),
        ([-0.5, math.nan], "response token 1 is nan"),
        ([-math.inf, -0.5], "response token 0 is -inf"),
    ],
)
def test_a_logprob_that_is_missing_or_no_number_is_an_error_of_that_request(logprobs, text: str):
    with pytest.raises(RequestError, match=text) as caught:
        answer([3, 4], logprobs)
    assert (caught.value.request_id, caught.value.reason) == ("r7", "bad_logprobs")


def test_a_request_that_the_engine_broke_off_is_an_error():
    with pytest.raises(RequestError, match="'abort'") as caught:
        answer([3], [-0.5], "abort")
    assert caught.value.reason == "engine_refused"


def test_a_complete_set_is_accepted_in_any_order_and_without_the_tied_name():
    accepted = MANIFEST.accept(reversed(weights().items()))
    assert list(accepted) == ["embed", "norm"]
    tied = weights() | {"head": weights()["embed"].clone()}
    assert list(MANIFEST.accept(tied.items())) == ["embed", "norm"]


def test_a_tied_tensor_that_differs_is_refused():
    with pytest.raises(WeightsRefused, match=r"head \(tied to embed, but different\)"):
        MANIFEST.accept((weights() | {"head": torch.zeros(4, 2)}).items())


def test_everything_that_does_not_fit_is_listed():
    given = [("embed", torch.zeros(4, 3)), ("module.norm", torch.zeros(2)), ("embed", torch.zeros(4, 2))]
    with pytest.raises(WeightsRefused) as caught:
        MANIFEST.accept(given)
    assert str(caught.value) == (
        "4 tensors of the update do not fit the model: embed (shape [4, 3], the model has [4, 2]); "
        "module.norm (unknown to the model); embed (given twice); norm (missing)"
    )
