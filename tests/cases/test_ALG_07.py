"""A tool's tokens ended the episode or counted as steps, so that a later turn's reward never reached the earlier ones
and the value at a tool token leaked into advantages: verl-project/verl#2337, radixark/miles#1827,
verl-project/verl#6376, verl-project/verl#6392."""

import math

import pytest
import torch
from drivetrain_algorithms import gae, reinforce_plus_plus, remax, returns_to_go, token_rewards, whiten
from torch import Tensor

MASK = torch.tensor([[True, False, True]])
PACKED = torch.tensor([0, 3])


@pytest.mark.parametrize("at_the_tool", [0.0, 5.0, math.nan, math.inf])
def test_i_the_reward_of_a_later_turn_reaches_the_earlier_one(at_the_tool: float) -> None:
    rewards = torch.tensor([[0.0, at_the_tool, 1.0]])
    assert returns_to_go(rewards, MASK, gamma=0.5).tolist() == [[0.5, 0.0, 1.0]]
    assert returns_to_go(rewards[0], MASK[0], gamma=0.5, cu_seqlens=PACKED).tolist() == [0.5, 0.0, 1.0]
    expected = whiten(torch.tensor([[0.5, 0.0, 1.0]]), MASK)
    torch.testing.assert_close(reinforce_plus_plus(rewards, MASK, gamma=0.5), expected)
    assert remax(rewards, torch.tensor([0.25]), MASK).tolist() == [[0.75, 0.0, 0.75]]


@pytest.mark.parametrize("at_the_tool", [99.0, 0.0, -1e6, math.nan, math.inf])
def test_ii_the_value_at_a_tool_token_has_no_effect(at_the_tool: float) -> None:
    # δ₂ = 1 - .2 = .8;  δ₀ = .9 * .2 - .5 = -.32;  Â₀ = -.32 + .72 * .8 = .256
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, at_the_tool, 0.2]])
    padded = gae(rewards, values, MASK, gamma=0.9, lam=0.8)
    assert padded.advantages[0].tolist() == pytest.approx([0.256, 0.0, 0.8], abs=1e-6)
    assert padded.returns[0].tolist() == pytest.approx([0.756, 0.0, 1.0], abs=1e-6)
    packed = gae(rewards[0], values[0], MASK[0], gamma=0.9, lam=0.8, cu_seqlens=PACKED)
    assert torch.equal(packed.advantages, padded.advantages[0])


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4, 7])])
def test_iii_the_score_is_paid_at_the_last_token_of_the_model(cu_seqlens: Tensor | None) -> None:
    # Model, tool, model, tool; and model, tool, tool.
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]).bool()
    expected = torch.tensor([[0.0, 0.0, 2.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    logprobs = torch.full(mask.shape, math.nan).masked_fill(mask, -1.0)
    if cu_seqlens is not None:
        mask, expected, logprobs = (x.flatten()[:7] for x in (mask, expected, logprobs))
    rewards = token_rewards(torch.tensor([2.0, 3.0]), logprobs, logprobs, mask, kl_coef=0.1, cu_seqlens=cu_seqlens)
    assert torch.equal(rewards, expected)
    # From there it reaches every token of the model, and none of the tool's.
    reached = returns_to_go(rewards, mask, gamma=1.0, cu_seqlens=cu_seqlens)
    assert reached.flatten()[:4].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert reached.flatten()[4:7].tolist() == [3.0, 0.0, 0.0]


def test_a_sequence_cut_off_in_a_tools_answer_goes_on_from_the_last_token_of_the_model() -> None:
    # γ = λ = .5, V after the cut 4: δ₂ = 0 + .5 * 4 - 2 = 0;  δ₀ = 0 + .5 * 2 - 1 = 0
    mask = torch.tensor([[True, False, True, False]])
    values = torch.tensor([[1.0, 99.0, 2.0, 99.0]])
    result = gae(torch.zeros(1, 4), values, mask, gamma=0.5, lam=0.5, bootstrap_values=torch.tensor([4.0]))
    assert result.advantages.tolist() == [[0.0] * 4]
    assert result.returns.tolist() == [[1.0, 0.0, 2.0, 0.0]]
