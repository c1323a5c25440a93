import math

import pytest
import torch
from drivetrain_algorithms import token_rewards


def test_the_score_lands_on_the_last_token_and_kl_is_charged_everywhere() -> None:
    rewards = token_rewards(
        torch.tensor([1.0, -2.0]),
        torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]),
        torch.tensor([[-1.5, -2.0, -2.0], [-1.0, -3.0, -1.0]]),
        torch.tensor([[True, True, True], [True, True, False]]),
        kl_coef=0.5,
    )
    assert rewards.tolist() == [[-0.25, 0.0, 1.5], [0.0, -3.0, 0.0]]


def test_a_response_that_ends_with_a_tool_is_paid_at_the_last_chosen_token() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, math.nan, -math.inf]])
    mask = torch.tensor([[True, True, False, False]])
    assert token_rewards(torch.tensor([1.0]), logprobs, logprobs, mask, kl_coef=0.1).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_other_estimators_are_charged() -> None:
    arguments = (torch.zeros(1), torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    assert token_rewards(*arguments, kl_coef=1.0, kl="k1").item() == 2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="abs").item() == -2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="k2").item() == -2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="k3").item() == pytest.approx(-(math.exp(2.0) - 1.0 - 2.0))


def test_packed_equals_padded_and_a_sequence_without_tokens_is_not_paid() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 4, 2]
    logprobs, ref_logprobs = torch.randn(2, 4, 5, generator=generator)
    inside = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    mask = inside.clone()
    mask[0, 2] = False
    mask[3] = False
    scores = torch.tensor([1.0, math.nan, 3.0, math.nan])
    cu_seqlens = torch.tensor([0, 3, 3, 7, 9])
    padded = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.3)
    packed = token_rewards(
        scores, logprobs[inside], ref_logprobs[inside], mask[inside], kl_coef=0.3, cu_seqlens=cu_seqlens
    )
    assert torch.equal(packed, padded[inside])
    penalty = 0.3 * torch.where(mask, logprobs - ref_logprobs, 0.0)
    assert (padded + penalty).sum(-1).tolist() == pytest.approx([1.0, 0.0, 3.0, 0.0], abs=1e-6)


def test_misfits_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\).*\[2\]"):
        token_rewards(torch.zeros(3), x, x, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl_coef=-0\.1"):
        token_rewards(torch.zeros(2), x, x, mask, kl_coef=-0.1)
    with pytest.raises(ValueError, match=r"kind='k4'.*k1, abs, k2, k3"):
        token_rewards(torch.zeros(2), x, x, mask, kl_coef=0.1, kl="k4")  # type: ignore[arg-type]
