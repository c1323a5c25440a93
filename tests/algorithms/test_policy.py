import math

import pytest
import torch
from drivetrain_algorithms import aggregate, ppo_clip
from torch import Tensor

LOG2 = math.log(2.0)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def test_loss_ratio_and_clipping_by_hand() -> None:
    # ratios 2, 2, 1/2, 1/2, 1 with advantages 1, -1, 1, -1, 3, clipped to [.8, 1.3]
    log_ratio = torch.tensor([LOG2, LOG2, -LOG2, -LOG2, 0.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0])
    result = ppo_clip(log_ratio, torch.zeros(5), advantages, ones(5), clip_low=0.2, clip_high=0.3)
    assert result.loss.tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8, -3.0])
    assert result.ratio.tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5, 1.0])
    assert result.log_ratio.tolist() == log_ratio.tolist()
    assert result.clipped.tolist() == [True, False, False, True, False]
    assert result.approx_kl.tolist() == pytest.approx([1.0 - LOG2, 1.0 - LOG2, LOG2 - 0.5, LOG2 - 0.5, 0.0], abs=1e-6)


def test_the_gradient_is_zero_exactly_where_clipped() -> None:
    logprobs = torch.tensor([LOG2, LOG2, -LOG2, -LOG2], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = ppo_clip(logprobs, torch.zeros(4), advantages, ones(4), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    logprobs = torch.tensor([math.log(10.0), math.log(10.0), LOG2], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    result = ppo_clip(logprobs, torch.zeros(3), advantages, ones(3), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert result.clipped.tolist() == [True, True, False]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 2.0])


def test_before_the_first_update_it_is_reinforce() -> None:
    logprobs = torch.tensor([[-0.5, -1.5, -2.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 0.0]])
    result = ppo_clip(logprobs, logprobs.detach().clone(), advantages, ones(1, 3), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.ratio.eq(1).all()
    assert not result.clipped.any()
    assert result.approx_kl.eq(0).all()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 2.0, 0.0]]


@pytest.mark.parametrize("garbage", [-1000.0, math.nan, -math.inf, math.inf])
def test_masked_slots_give_exactly_zero_loss_and_gradient(garbage: float) -> None:
    mask = torch.tensor([[False, True]])
    for position in range(3):
        inputs = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)]
        inputs[position][0, 0] = garbage
        logprobs = inputs[0].requires_grad_()
        result = ppo_clip(*inputs, mask, clip_low=0.2, clip_high=0.2)
        assert result.loss.tolist() == [[0.0, -1.0]]
        for denominator, expected in [(1, -1.0), (2, -0.5)]:
            logprobs.grad = None
            loss = aggregate(result.loss, mask, mode="token_mean", denominator=denominator)
            loss.backward(retain_graph=True)
            assert logprobs.grad is not None
            assert logprobs.grad.tolist() == [[0.0, expected]]


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_beyond_any_float_stays_finite(advantage: float) -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    result = ppo_clip(
        logprobs, torch.tensor([-1000.0]), torch.tensor([advantage]), ones(1), clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert result.ratio.item() == pytest.approx(math.exp(20.0))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize(
    ("logprob", "old_logprob"), [(math.nan, 0.0), (0.0, math.nan), (-math.inf, 0.0), (0.0, -math.inf)]
)
def test_unmasked_nan_and_inf_show_in_loss_and_gradient(logprob: float, old_logprob: float) -> None:
    logprobs = torch.tensor([logprob, -1.0], requires_grad=True)
    old_logprobs = torch.tensor([old_logprob, -1.0])
    result = ppo_clip(logprobs, old_logprobs, torch.ones(2), ones(2), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert result.loss.isnan().tolist() == [True, False]
    assert logprobs.grad.isnan().tolist() == [True, False]


def test_an_unmasked_nan_advantage_shows_in_the_loss() -> None:
    result = ppo_clip(
        torch.zeros(2),
        torch.zeros(2),
        torch.tensor([math.nan, 1.0]),
        ones(2),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert result.loss.isnan().tolist() == [True, False]


def test_gradients_in_float64_flow_to_logprobs_only() -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs, old_logprobs, advantages = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    for x in (logprobs, old_logprobs, advantages):
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0).loss,
        logprobs,
    )
    result = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert old_logprobs.grad is None
    assert advantages.grad is None
    assert not result.ratio.requires_grad
    assert not result.approx_kl.requires_grad


def test_half_precision_is_computed_in_float32() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert ppo_clip(x, x, x, ones(2), clip_low=0.2, clip_high=0.2).loss.dtype is torch.float32


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"clip_low": 1.2, "clip_high": 0.2}, "clip_low=1.2"),
        ({"clip_low": 0.2, "clip_high": -0.1}, "clip_high=-0.1"),
        ({"clip_low": 0.2, "clip_high": math.nan}, "clip_high=nan"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip=1.0"),
    ],
)
def test_coefficients_that_do_not_fit_are_named(coefficients: dict[str, float], message: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        ppo_clip(x, x, x, ones(2), **coefficients)
