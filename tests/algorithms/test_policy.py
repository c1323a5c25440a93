import math

import pytest
import torch
from drivetrain_algorithms import aggregate, decoupled_ppo, entropy_bonus, ppo_clip, reinforce
from torch import Tensor

LOG2 = math.log(2.0)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def random_tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, those of before, advantages and mask, float64."""
    generator = torch.Generator().manual_seed(5)
    logprobs, change, advantages = torch.randn(3, 4, 7, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 7, generator=generator) > 0.3
    return logprobs.requires_grad_(), logprobs.detach() + 0.5 * change, advantages, mask


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


def test_reinforce_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    result = reinforce(logprobs, torch.tensor([-1.0, -2.0 - LOG2, -0.5]), torch.tensor([3.0, -0.5, 0.0]), ones(3))
    result.loss.sum().backward()
    assert result.loss.tolist() == [3.0, -1.0, 0.0]  # -3 · -1, .5 · -2, 0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3.0, 0.5, 0.0]
    assert result.ratio.tolist() == pytest.approx([1.0, 2.0, 1.0])
    assert not result.clipped.any()


def test_reinforce_has_the_gradient_of_ppo_at_a_ratio_of_one() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    gradients = []
    for result in (
        reinforce(logprobs, old_logprobs, advantages, mask),
        ppo_clip(logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2),
    ):
        gradients += torch.autograd.grad(result.loss.sum(), logprobs)
    assert torch.equal(*gradients)


def test_decoupled_ppo_by_hand() -> None:
    # π / π_prox = 2 and 1/2, clipped to [.8, 1.2]; π_prox / π_behave = 1/2, 1/2, 4, 4
    proximal = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    logprobs = (proximal + torch.tensor([LOG2, LOG2, -LOG2, LOG2])).requires_grad_()
    behaviour = proximal - torch.tensor([-LOG2, -LOG2, 2 * LOG2, 2 * LOG2])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    bounds = {"clip_low": 0.2, "clip_high": 0.2}

    plain = decoupled_ppo(logprobs, proximal, behaviour, advantages, ones(4), **bounds)
    assert plain.loss.tolist() == pytest.approx([-0.6, 1.0, -2.0, 8.0])  # .5 · -1.2, .5 · 2, 4 · -.5, 4 · 2
    assert plain.ratio.tolist() == pytest.approx([2.0, 2.0, 0.5, 2.0])
    assert plain.clipped.tolist() == [True, False, False, False]
    (gradient,) = torch.autograd.grad(plain.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 1.0, -2.0, 8.0])

    clamped = decoupled_ppo(logprobs, proximal, behaviour, advantages, ones(4), clamp=(0.0, 3.0), **bounds)
    assert clamped.loss.tolist() == pytest.approx([-0.6, 1.0, -1.5, 6.0])
    assert clamped.clipped.tolist() == [True, False, False, False]

    rejected = decoupled_ppo(logprobs, proximal, behaviour, advantages, ones(4), reject=(0.0, 3.0), **bounds)
    assert rejected.loss.tolist() == pytest.approx([-0.6, 1.0, 0.0, 0.0])
    assert rejected.clipped.tolist() == [True, False, True, True]
    (gradient,) = torch.autograd.grad(rejected.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0])

    dual = decoupled_ppo(logprobs, proximal, behaviour, advantages, ones(4), dual_clip=1.5, **bounds)
    assert dual.loss.tolist() == pytest.approx([-0.6, 0.75, -2.0, 6.0])  # where Â < 0, at most 1.5 times the weight


def test_a_masked_slot_is_not_rejected_though_its_weight_counts_as_one() -> None:
    x = torch.zeros(2)
    mask = torch.tensor([True, False])
    result = decoupled_ppo(x, x, x, x, mask, clip_low=0.2, clip_high=0.2, reject=(0.0, 0.5))
    assert result.clipped.tolist() == [True, False]


def test_decoupled_ppo_is_ppo_where_the_proximal_policy_sampled() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    ppo = ppo_clip(logprobs, old_logprobs, advantages, mask, **bounds)
    decoupled = decoupled_ppo(logprobs, old_logprobs, old_logprobs, advantages, mask, **bounds)
    assert all(torch.equal(a, b) for a, b in zip(ppo, decoupled, strict=True))


def test_decoupled_ppo_is_weighed_reinforce_where_the_policy_is_still_the_proximal_one() -> None:
    logprobs, behaviour, advantages, mask = random_tokens()
    result = decoupled_ppo(logprobs, logprobs.detach(), behaviour, advantages, mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    expected = torch.where(mask, -advantages * (logprobs.detach() - behaviour).exp(), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1000.0])
def test_decoupled_ppo_hides_no_behaviour_that_is_not_finite(bad: float) -> None:
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    behaviour = torch.tensor([[bad, -1.0]])
    for mask in (torch.tensor([[True, True]]), torch.tensor([[False, True]])):
        for limits in ({}, {"clamp": (0.0, 2.0)}, {"reject": (0.0, 2.0)}):
            result = decoupled_ppo(
                logprobs, logprobs.detach(), behaviour, ones(1, 2).float(), mask, clip_low=0.2, clip_high=0.2, **limits
            )
            (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
            assert result.loss[0, 1].item() == -1.0
            assert gradient[0, 1].item() == -1.0
            if not mask[0, 0]:
                assert (result.loss[0, 0].item(), gradient[0, 0].item()) == (0.0, 0.0)
            elif bad == -1000.0:
                weight = 2.0 if "clamp" in limits else math.exp(20.0)
                weight = 0.0 if "reject" in limits else weight
                assert gradient[0, 0].item() == pytest.approx(-weight)
            else:
                assert result.loss[0, 0].isnan()
                assert gradient[0, 0].isnan()


def test_the_entropy_bonus_by_hand() -> None:
    entropies = torch.tensor([[2.0, math.nan, 0.0]], requires_grad=True)
    loss = entropy_bonus(entropies, torch.tensor([[True, False, True]]), coef=0.25)
    loss.sum().backward()
    assert loss.tolist() == [[-0.5, 0.0, 0.0]]
    assert entropies.grad is not None
    assert entropies.grad.tolist() == [[-0.25, 0.0, -0.25]]
    assert entropy_bonus(entropies, ones(1, 3), coef=0.25).isnan().tolist() == [[False, True, False]]
    with pytest.raises(ValueError, match=r"coef=-0.1 must be"):
        entropy_bonus(entropies, ones(1, 3), coef=-0.1)
    with pytest.raises(ValueError, match="entropies has shape"):
        entropy_bonus(entropies, ones(3, 1), coef=0.1)


def test_gradients_of_the_other_losses_in_float64() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    assert torch.autograd.gradcheck(lambda x: reinforce(x, old_logprobs, advantages, mask).loss, logprobs)
    assert torch.autograd.gradcheck(lambda x: entropy_bonus(x, mask, coef=0.3), logprobs)
    assert torch.autograd.gradcheck(
        lambda x: (
            decoupled_ppo(
                x, old_logprobs, old_logprobs - 0.3, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0
            ).loss
        ),
        logprobs,
    )


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"clip_low": -0.1, "clip_high": 0.2}, "clip_low=-0.1"),
        ({"clip_low": 0.2, "clip_high": -0.1}, "clip_high=-0.1"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.5}, "dual_clip=0.5"),
        ({"clip_low": 0.2, "clip_high": 0.2, "clamp": (2.0, 1.0)}, "clamp=.* must be .low, high."),
        ({"clip_low": 0.2, "clip_high": 0.2, "reject": (0.0, math.nan)}, "reject=.* must be .low, high."),
    ],
)
def test_coefficients_of_decoupled_ppo_that_do_not_fit_are_named(coefficients: dict[str, float], message: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        decoupled_ppo(x, x, x, x, ones(2), **coefficients)
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(1,\)"):
        decoupled_ppo(x, x, x[:1], x, ones(2), clip_low=0.2, clip_high=0.2)


def test_approx_kl_is_never_negative() -> None:
    result = ppo_clip(
        torch.tensor([-1.0]), torch.tensor([-3e38]), torch.zeros(1), torch.tensor([True]), clip_low=0.2, clip_high=0.2
    )
    assert result.approx_kl.item() > 0
