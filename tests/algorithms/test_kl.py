import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from drivetrain_algorithms import AdaptiveKL, FixedKL, KLKind, aggregate, kl_estimate
from torch import Tensor

LOG2 = math.log(2.0)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [LOG2, -LOG2, 0.0]),
        ("abs", [LOG2, LOG2, 0.0]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2, 0.0]),
        ("k3", [0.5 - 1 + LOG2, 2.0 - 1 - LOG2, 0.0]),
    ],
)
def test_estimators_by_hand(kind: KLKind, expected: list[float]) -> None:
    result = kl_estimate(torch.tensor([LOG2, 0.0, -1.0]), torch.tensor([0.0, LOG2, -1.0]), ones(3), kind=kind)
    assert result.tolist() == pytest.approx(expected, abs=1e-6)


def categorical(seed: int) -> Tensor:
    return torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_estimate(logits: Tensor, ref_logits: Tensor, kind: KLKind) -> Tensor:
    """The exact expectation over the four actions, drawn from the policy as it is now."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logprobs.detach().exp() * kl_estimate(logprobs, ref_logprobs, ones(4), kind=kind)).sum()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()


def finite_difference(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    step = 1e-6 * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(function(x + h) - function(x - h)) / 2e-6 for h in step])


def test_as_values_k1_and_k3_are_unbiased() -> None:
    policy, reference = categorical(0), categorical(1)
    exact = kl(policy, reference).item()
    assert expected_estimate(policy, reference, "k1").item() == pytest.approx(exact)
    assert expected_estimate(policy, reference, "k3").item() == pytest.approx(exact)


def test_as_losses_k2_pulls_on_the_forward_and_k3_on_the_backward_divergence_and_k1_not_at_all() -> None:
    policy, reference = categorical(0).requires_grad_(), categorical(1)
    expected = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": finite_difference(lambda x: kl(x, reference), policy.detach()),
        "k3": finite_difference(lambda x: kl(reference, x), policy.detach()),
    }
    for kind in ("k1", "k2", "k3"):
        (gradient,) = torch.autograd.grad(expected_estimate(policy, reference, kind), policy)
        torch.testing.assert_close(gradient, expected[kind], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_descending_the_loss_brings_the_policy_to_the_reference(kind: KLKind) -> None:
    policy, reference = categorical(0).requires_grad_(), categorical(1)
    divergences = [kl(policy, reference).item()]
    for _ in range(50):
        (gradient,) = torch.autograd.grad(expected_estimate(policy, reference, kind), policy)
        policy = (policy - gradient).detach().requires_grad_()
        divergences.append(kl(policy, reference).item())
    assert all(after < before for before, after in pairwise(divergences))
    assert divergences[-1] < 1e-4 * divergences[0]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1000.0])
def test_masked_slots_give_exactly_zero_value_and_gradient(kind: KLKind, garbage: float) -> None:
    mask = torch.tensor([False, True])
    for position in range(2):
        inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])]
        inputs[position][0] = garbage
        logprobs = inputs[0].requires_grad_()
        result = kl_estimate(*inputs, mask, kind=kind)
        aggregate(result.unsqueeze(0), mask.unsqueeze(0), mode="token_sum", denominator=1).backward()
        assert logprobs.grad is not None
        assert result[0].item() == 0.0
        assert logprobs.grad[0].item() == 0.0
        assert logprobs.grad[1].item() != 0.0


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_unmasked_nan_and_inf_show(kind: KLKind, value: float) -> None:
    result = kl_estimate(torch.tensor([value, -1.0]), torch.tensor([-1.0, -1.0]), ones(2), kind=kind)
    assert result.isfinite().tolist() == [False, True]
    result = kl_estimate(torch.tensor([-1.0, -1.0]), torch.tensor([value, -1.0]), ones(2), kind=kind)
    assert result.isfinite().tolist() == [False, True]


def test_k3_of_a_token_the_reference_finds_infinitely_likelier_is_finite() -> None:
    logprobs = torch.tensor([-1000.0], requires_grad=True)
    result = kl_estimate(logprobs, torch.zeros(1), ones(1), kind="k3")
    result.sum().backward()
    assert result.item() == pytest.approx(math.exp(20.0) - 21.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradients_in_float64(kind: KLKind) -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, ref_logprobs = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(3, 5, generator=generator) > 0.3
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_logprobs, mask, kind=kind), logprobs.requires_grad_())


def test_adaptive_controller_by_hand() -> None:
    controller = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=1000)
    assert controller.update(observed_kl=6.0, num_samples=100).kl_coef == pytest.approx(0.1)
    assert controller.update(observed_kl=6.6, num_samples=100).kl_coef == pytest.approx(0.1 * 1.01)
    assert controller.update(observed_kl=60.0, num_samples=1000).kl_coef == pytest.approx(0.12)
    assert controller.update(observed_kl=-60.0, num_samples=1000).kl_coef == pytest.approx(0.08)
    assert controller.kl_coef == 0.1


def test_a_controller_goes_on_from_a_saved_coefficient() -> None:
    start = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=1000)
    saved = start.update(observed_kl=9.0, num_samples=100)
    resumed = dataclasses.replace(start, kl_coef=saved.kl_coef)
    assert resumed.update(observed_kl=2.0, num_samples=100) == saved.update(observed_kl=2.0, num_samples=100)


def test_fixed_controller_does_not_move() -> None:
    assert FixedKL(kl_coef=0.05).update(observed_kl=100.0, num_samples=512) == FixedKL(kl_coef=0.05)


def test_controllers_refuse_what_would_poison_them() -> None:
    controller = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=1000)
    for either in (controller, FixedKL(kl_coef=0.1)):
        with pytest.raises(ValueError, match="observed_kl=nan"):
            either.update(observed_kl=math.nan, num_samples=1)
        with pytest.raises(ValueError, match="num_samples=0"):
            either.update(observed_kl=1.0, num_samples=0)
    with pytest.raises(ValueError, match="num_samples=1001 is more than horizon=1000"):
        controller.update(observed_kl=1.0, num_samples=1001)
    with pytest.raises(ValueError, match="kl_coef=-1"):
        FixedKL(kl_coef=-1.0)
    with pytest.raises(ValueError, match="target=0"):
        AdaptiveKL(kl_coef=0.1, target=0.0, horizon=10)
    with pytest.raises(ValueError, match="horizon=0"):
        AdaptiveKL(kl_coef=0.1, target=1.0, horizon=0)
