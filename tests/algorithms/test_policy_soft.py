import math

import pytest
import torch
from drivetrain_algorithms import cispo, ppo_clip, reinforce, sapo
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_cispo_by_hand() -> None:
    # ratios 2, 2, 1/2, 1; weights 1.5, 1.5, .75, 1
    old_logprobs = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    logprobs = (old_logprobs + torch.tensor([LOG2, LOG2, -LOG2, 0.0])).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 1.0, 3.0])
    result = cispo(logprobs, old_logprobs, advantages, ones(4), clip_low=0.25, clip_high=0.5)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx(
        [1.5 * (2 - LOG2), -3.0 * (2 - LOG2), 0.75 * (2 + LOG2), 3.0 * 2], rel=1e-6
    )
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 3.0, -0.75, -3.0])
    assert result.clipped.tolist() == [True, True, True, False]


def test_where_ppo_drops_a_token_cispo_keeps_a_gradient_and_elsewhere_they_agree() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    soft, hard = (f(logprobs, old_logprobs, advantages, mask, **bounds) for f in (cispo, ppo_clip))
    (soft_gradient,), (hard_gradient,) = (torch.autograd.grad(x.loss.sum(), logprobs) for x in (soft, hard))
    assert hard.clipped.any()
    assert hard_gradient[hard.clipped].eq(0).all()
    assert soft_gradient[hard.clipped].ne(0).all()
    inside = ~soft.clipped
    torch.testing.assert_close(soft_gradient[inside], hard_gradient[inside], rtol=1e-12, atol=1e-12)


def test_cispo_without_room_is_reinforce() -> None:
    tokens = random_tokens()
    assert torch.equal(cispo(*tokens, clip_low=0.0, clip_high=0.0).loss, reinforce(*tokens).loss)


def test_the_gradient_of_cispo_is_that_of_its_weight_held_constant() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    weight = (logprobs.detach() - old_logprobs).exp().clamp(0.7, 1.4)

    def surrogate(x: Tensor) -> Tensor:
        return torch.where(mask, -weight * advantages * x, 0.0)

    assert torch.autograd.gradcheck(surrogate, logprobs)
    result = cispo(logprobs, old_logprobs, advantages, mask, clip_low=0.3, clip_high=0.4)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss.sum(), logprobs)[0] for loss in (result.loss, surrogate(logprobs))),
        rtol=1e-12,
        atol=1e-12,
    )


def test_sapo_by_hand() -> None:
    # ratios 2, 2, 1: σ(1 · (2 - 1)) · 4/1 = 4 · .7310586,  σ(2 · (2 - 1)) · 4/2 = 2 · .8807971,  ½ · 4/1 = 2
    logprobs = torch.tensor([LOG2, LOG2, 0.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 3.0])
    result = sapo(logprobs, torch.zeros(3), advantages, ones(3), tau_positive=1.0, tau_negative=2.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-2.9242343, 1.7615942, -6.0])
    # -4 p (1 - p) r Â
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [-4 * 0.7310586 * 0.2689414 * 2, 4 * 0.8807971 * 0.1192029 * 2, -3.0], rel=1e-5
    )
    assert not result.clipped.any()


def test_the_defaults_of_sapo_fade_bad_tokens_faster() -> None:
    logprobs = torch.tensor([math.log(3.0)] * 2, dtype=torch.float64, requires_grad=True)
    loss = sapo(logprobs, torch.zeros(2).double(), torch.tensor([1.0, -1.0]).double(), ones(2)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    good, bad = (4 * 3 * p * (1 - p) for p in (1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(-2.1))))
    assert gradient.tolist() == pytest.approx([-good, bad], rel=1e-12)
    assert good > bad


def test_sapo_of_a_small_tau_is_the_unclipped_ratio() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    soft = sapo(logprobs, old_logprobs, advantages, mask, tau_positive=1e-5, tau_negative=1e-5)
    plain = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=1.0, clip_high=math.inf)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.loss.sum(), logprobs)[0] for x in (soft, plain)), rtol=1e-6, atol=1e-6
    )


def test_gradients_of_sapo_in_float64() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    assert torch.autograd.gradcheck(lambda x: sapo(x, old_logprobs, advantages, mask).loss, logprobs)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(log_ratio=st.floats(-5.0, 5.0), advantage=st.sampled_from([-1.0, 1.0]), tau=st.floats(0.1, 10.0))
def test_sapo_never_pulls_harder_than_the_ratio(log_ratio: float, advantage: float, tau: float) -> None:
    logprobs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([advantage], dtype=torch.float64)
    sapo(logprobs, torch.zeros_like(x), x, ones(1), tau_positive=tau, tau_negative=tau).loss.sum().backward()
    assert logprobs.grad is not None
    assert 0.0 <= -logprobs.grad.item() * advantage <= math.exp(log_ratio) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tau_positive": 0.0}, "tau_positive=0.0 must be a finite number above 0"),
        ({"tau_negative": -1.0}, "tau_negative=-1.0 must be a finite number above 0"),
        ({"tau_negative": math.inf}, "tau_negative=inf must be a finite number above 0"),
    ],
)
def test_temperatures_that_do_not_fit_are_named(keywords: dict[str, float], message: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        sapo(x, x, x, ones(2), **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"clip_low": 1.2, "clip_high": 0.2}, "clip_low=1.2 must lie between 0 and 1"),
        ({"clip_low": 0.2, "clip_high": math.nan}, "clip_high=nan must be at least 0"),
    ],
)
def test_bounds_of_cispo_that_do_not_fit_are_named(keywords: dict[str, float], message: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        cispo(x, x, x, ones(2), **keywords)
