import math
from collections.abc import Callable

import pytest
import torch
from drivetrain_algorithms import PolicyLoss, dppo_kl, dppo_tv, reinforce
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

BOTH = pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def of_probabilities(
    loss: Callable[..., PolicyLoss], now: list[float], before: list[float], advantages: list[float], **keywords: float
) -> tuple[PolicyLoss, list[float]]:
    logprobs = torch.tensor(now, dtype=torch.float64).log().requires_grad_()
    old_logprobs = torch.tensor(before, dtype=torch.float64).log()
    result = loss(logprobs, old_logprobs, torch.tensor(advantages, dtype=torch.float64), ones(len(now)), **keywords)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result, gradient.tolist()


def test_total_variation_by_hand() -> None:
    result, gradient = of_probabilities(
        dppo_tv,
        #  up by .3 | back up | rare, five times as likely | down by .3 | back down | up by .15 | down by .15
        [0.5, 0.1, 0.05, 0.1, 0.5, 0.35, 0.35],
        [0.2, 0.4, 0.01, 0.4, 0.2, 0.2, 0.5],
        [1.0, 1.0, 1.0, -1.0, -1.0, 2.0, -2.0],
        clip_low=0.2,
        clip_high=0.1,
    )
    assert result.clipped.tolist() == [True, False, False, True, False, True, False]
    # -(π / π_old) Â where it is kept
    assert gradient == pytest.approx([0.0, -0.25, -5.0, 0.0, 2.5, 0.0, 1.4])
    assert result.loss[2].item() == pytest.approx(-5.0 * math.log(0.05))
    assert result.loss[0].item() == 0.0


def test_binary_kl_by_hand() -> None:
    # KL(.2 || .5) = .2 log(.2/.5) + .8 log(.8/.5) = .19274;  KL(.4 || .1) = .4 log 4 + .6 log(.6/.9) = .31123
    # KL(.01 || .05) = .01 log .2 + .99 log(.99/.95) = .02473
    now, before, advantages = [0.5, 0.1, 0.05], [0.2, 0.4, 0.01], [1.0, -1.0, 1.0]
    for bounds, clipped in [
        ({"clip_low": 0.31, "clip_high": 0.19}, [True, True, False]),
        ({"clip_low": 0.32, "clip_high": 0.20}, [False, False, False]),
        ({"clip_low": 0.32, "clip_high": 0.0248}, [True, False, False]),
        ({"clip_low": 0.32, "clip_high": 0.0247}, [True, False, True]),
    ]:
        result, gradient = of_probabilities(dppo_kl, now, before, advantages, **bounds)
        assert result.clipped.tolist() == clipped
        expected = [0.0 if c else g for c, g in zip(clipped, [-2.5, 0.25, -5.0], strict=True)]
        assert gradient == pytest.approx(expected)


@BOTH
def test_the_weight_is_truncated_and_keeps_its_gradient(loss: Callable[..., PolicyLoss]) -> None:
    result, gradient = of_probabilities(
        loss, [0.01, 0.02], [0.001, 0.01], [1.0, -1.0], clip_low=0.2, clip_high=0.2, ratio_clamp=5.0
    )
    assert gradient == pytest.approx([-5.0, 2.0])
    assert not result.clipped.any()
    assert result.ratio.tolist() == pytest.approx([10.0, 2.0])


@BOTH
def test_a_token_that_comes_back_keeps_its_gradient_however_far_it_is(loss: Callable[..., PolicyLoss]) -> None:
    result, gradient = of_probabilities(loss, [0.01, 0.99], [0.99, 0.01], [1.0, -1.0], clip_low=0.0, clip_high=0.0)
    assert not result.clipped.any()
    assert gradient == pytest.approx([-0.01 / 0.99, 99.0])


@BOTH
def test_without_bounds_it_is_reinforce_with_importance_weights(loss: Callable[..., PolicyLoss]) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old_logprobs = -torch.rand(2, 5, 6, dtype=torch.float64, generator=generator)
    advantages = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    result = loss(logprobs, old_logprobs, advantages, ones(5, 6), clip_low=math.inf, clip_high=math.inf)
    plain = reinforce(logprobs, old_logprobs, advantages, ones(5, 6))
    torch.testing.assert_close(result.loss, plain.ratio * plain.loss, rtol=1e-12, atol=1e-12)
    assert not result.clipped.any()


@BOTH
def test_the_gradient_is_that_of_weight_and_choice_held_constant(loss: Callable[..., PolicyLoss]) -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, old_logprobs = (2.0 * torch.rand(2, 5, 6, dtype=torch.float64, generator=generator)).neg().unbind()
    advantages = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    logprobs = logprobs.clone().requires_grad_()
    result = loss(logprobs, old_logprobs, advantages, ones(5, 6), clip_low=0.1, clip_high=0.2)
    assert 0 < result.clipped.sum() < 30
    weight = result.ratio * ~result.clipped

    def surrogate(x: Tensor) -> Tensor:
        return -weight * advantages * x

    assert torch.autograd.gradcheck(surrogate, logprobs)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.sum(), logprobs)[0] for x in (result.loss, surrogate(logprobs))),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_token_keeps_the_divergence_finite(dtype: torch.dtype) -> None:
    # p = 1, q = 1/2: log 2 nats. p = 1/2, q = 1: ½ log ½ + ½ log(½ / 1e-8) = 8.52 nats. p = q = 1: nothing.
    logprobs = torch.tensor([math.log(0.5), 0.0, 0.0], dtype=dtype)
    old_logprobs = torch.tensor([0.0, math.log(0.5), 0.0], dtype=dtype)
    advantages = torch.tensor([-1.0, 1.0, 1.0], dtype=dtype)
    for bounds, clipped in [
        ({"clip_low": 0.693, "clip_high": 8.5}, [True, True, False]),
        ({"clip_low": 0.694, "clip_high": 8.6}, [False, False, False]),
    ]:
        assert dppo_kl(logprobs, old_logprobs, advantages, ones(3), **bounds).clipped.tolist() == clipped


PROBABILITY = st.floats(1e-6, 1.0 - 1e-6)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(now=PROBABILITY, before=PROBABILITY, advantage=st.sampled_from([-1.0, 1.0]), bound=st.floats(0.01, 0.5))
def test_what_total_variation_clips_its_divergence_bounds_too(
    now: float, before: float, advantage: float, bound: float
) -> None:
    """Pinsker's inequality: TV² <= KL / 2."""
    tv, _ = of_probabilities(dppo_tv, [now], [before], [advantage], clip_low=bound, clip_high=bound)
    least = 2 * bound**2 * (1 - 1e-6)
    kl, _ = of_probabilities(dppo_kl, [now], [before], [advantage], clip_low=least, clip_high=least)
    assert not tv.clipped.item() or kl.clipped.item()
    moved_away = (now - before) * advantage > 0
    assert tv.clipped.item() == (moved_away and abs(now - before) > bound)


@BOTH
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"clip_low": -0.1, "clip_high": 0.2}, "clip_low=-0.1 must be at least 0"),
        ({"clip_low": 0.1, "clip_high": math.nan}, "clip_high=nan must be at least 0"),
        ({"clip_low": 0.1, "clip_high": 0.1, "ratio_clamp": 0.0}, "ratio_clamp=0.0 must be above 0"),
    ],
)
def test_bounds_that_do_not_fit_are_named(
    loss: Callable[..., PolicyLoss], keywords: dict[str, float], message: str
) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        loss(x, x, x, ones(2), **keywords)
