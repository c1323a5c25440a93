import json
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from drivetrain_algorithms import AdaptiveKL, FixedKL, KLKind, aggregate, kl_estimate, value_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2 = math.log(2.0)
KINDS: list[KLKind] = ["k1", "abs", "k2", "k3"]


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


def expected_estimate(logits: Tensor, ref_logits: Tensor, kind: KLKind, *, straight_through: bool = False) -> Tensor:
    """The exact expectation over the four actions, drawn from the policy as it is now."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    estimate = kl_estimate(logprobs, ref_logprobs, ones(4), kind=kind, straight_through=straight_through)
    return (logprobs.detach().exp() * estimate).sum()


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


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum()


def test_as_losses_k2_and_k3_pull_on_the_two_divergences_and_abs_on_the_total_variation() -> None:
    policy, reference = categorical(0).requires_grad_(), categorical(1)
    expected = {
        "abs": 2.0 * finite_difference(lambda x: total_variation(x, reference), policy.detach()),
        "k2": finite_difference(lambda x: kl(x, reference), policy.detach()),
        "k3": finite_difference(lambda x: kl(reference, x), policy.detach()),
    }
    for kind in ("abs", "k2", "k3"):
        (gradient,) = torch.autograd.grad(expected_estimate(policy, reference, kind), policy)
        torch.testing.assert_close(gradient, expected[kind], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_keeps_the_value_and_has_the_gradient_of_the_divergence(kind: KLKind) -> None:
    policy, reference = categorical(0).requires_grad_(), categorical(1)
    estimate = expected_estimate(policy, reference, kind, straight_through=True)
    (gradient,) = torch.autograd.grad(estimate, policy)
    assert estimate.item() == expected_estimate(policy.detach(), reference, kind).item()
    torch.testing.assert_close(
        gradient, finite_difference(lambda x: kl(x, reference), policy.detach()), rtol=1e-6, atol=1e-8
    )


def test_straight_through_by_hand() -> None:
    # d = log 2: the gradient of ½ d² is d, whatever the value
    for kind, value in [("k1", LOG2), ("abs", LOG2), ("k2", LOG2**2 / 2), ("k3", 0.5 - 1 + LOG2)]:
        logprobs = torch.tensor([LOG2], requires_grad=True)
        result = kl_estimate(logprobs, torch.zeros(1), ones(1), kind=kind, straight_through=True)
        result.sum().backward()
        assert result.item() == pytest.approx(value)
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(LOG2)


def test_k1_is_no_loss() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"kind='k1'.*straight_through=True.*logprobs\.detach\(\)"):
        kl_estimate(logprobs, torch.ones(2), ones(2), kind="k1")
    assert kl_estimate(logprobs.detach(), torch.ones(2), ones(2), kind="k1").tolist() == [-1.0, -1.0]
    with torch.no_grad():
        assert kl_estimate(logprobs, torch.ones(2), ones(2), kind="k1").tolist() == [-1.0, -1.0]


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


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1000.0])
def test_masked_slots_give_exactly_zero_value_and_gradient(
    kind: KLKind, garbage: float, straight_through: bool
) -> None:
    if kind == "k1" and not straight_through:
        return
    mask = torch.tensor([False, True])
    for position in range(2):
        inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])]
        inputs[position][0] = garbage
        logprobs = inputs[0].requires_grad_()
        result = kl_estimate(*inputs, mask, kind=kind, straight_through=straight_through)
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


@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
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


def test_a_controller_that_loads_a_checkpoint_goes_on_exactly() -> None:
    steps = [(9.0, 100), (2.0, 37), (5.5, 512), (6.1, 1000), (0.0, 3)]
    start = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=1000)
    whole = start
    for observed_kl, num_samples in steps:
        whole = whole.update(observed_kl=observed_kl, num_samples=num_samples)
    half = start
    for observed_kl, num_samples in steps[:2]:
        half = half.update(observed_kl=observed_kl, num_samples=num_samples)
    saved = json.loads(json.dumps(half.state_dict()))
    resumed = AdaptiveKL.from_state_dict(saved, target=start.target, horizon=start.horizon)
    for observed_kl, num_samples in steps[2:]:
        resumed = resumed.update(observed_kl=observed_kl, num_samples=num_samples)
    assert resumed == whole
    assert start.kl_coef == 0.1


def test_a_state_is_the_coefficient_and_nothing_else() -> None:
    assert AdaptiveKL(kl_coef=0.3, target=6.0, horizon=10).state_dict() == {"kl_coef": 0.3}
    assert FixedKL.from_state_dict(FixedKL(kl_coef=0.3).state_dict()) == FixedKL(kl_coef=0.3)
    for restored in (FixedKL.from_state_dict, partial(AdaptiveKL.from_state_dict, target=6.0, horizon=10)):
        for state in ({}, {"value": 0.1}, {"kl_coef": 0.1, "target": 2.0}):
            with pytest.raises(ValueError, match="state has the keys"):
                restored(state)
        with pytest.raises(ValueError, match="kl_coef=nan"):
            restored({"kl_coef": math.nan})


def test_a_divergence_in_a_tensor_leaves_a_number() -> None:
    controller = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=100).update(observed_kl=torch.tensor(6.3), num_samples=10)
    assert type(controller.kl_coef) is float
    assert controller.kl_coef == pytest.approx(0.1 * (1 + 0.05 * 0.1), rel=1e-5)


def test_an_adaptive_coefficient_of_zero_never_moves() -> None:
    controller = AdaptiveKL(kl_coef=0.0, target=6.0, horizon=10)
    assert controller.update(observed_kl=60.0, num_samples=10).kl_coef == 0.0


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


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    d=st.lists(st.floats(-15.0, 15.0), min_size=1, max_size=8), seed=st.integers(0, 1000), kind=st.sampled_from(KINDS)
)
def test_properties(d: list[float], seed: int, kind: KLKind) -> None:
    generator = torch.Generator().manual_seed(seed)
    difference = torch.tensor(d, dtype=torch.float64)
    ref_logprobs = -torch.rand(len(d), dtype=torch.float64, generator=generator)
    mask = torch.rand(len(d), generator=generator) > 0.3
    estimate = kl_estimate(ref_logprobs + difference, ref_logprobs, mask, kind=kind)
    assert not estimate[~mask].any()
    # whatever both policies are multiplied by cancels
    moved = kl_estimate(ref_logprobs + difference - 3.0, ref_logprobs - 3.0, mask, kind=kind)
    torch.testing.assert_close(moved, estimate)
    if kind != "k1":
        assert (estimate >= 0).all()
    permutation = torch.randperm(len(d), generator=generator)
    permuted = kl_estimate(
        (ref_logprobs + difference)[permutation], ref_logprobs[permutation], mask[permutation], kind=kind
    )
    assert permuted.tolist() == estimate[permutation].tolist()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    kl_coef=st.floats(0.0, 10.0),
    target=st.floats(0.01, 100.0),
    observed=st.floats(-1000.0, 1000.0),
    num_samples=st.integers(1, 1000),
)
def test_the_adaptive_controller_steers_towards_its_target(
    kl_coef: float, target: float, observed: float, num_samples: int
) -> None:
    before = AdaptiveKL(kl_coef=kl_coef, target=target, horizon=1000)
    after = before.update(observed_kl=observed, num_samples=num_samples).kl_coef
    assert after >= kl_coef if observed >= target else after <= kl_coef
    assert 0.8 * kl_coef <= after * (1 + 1e-12)
    assert after <= 1.2 * kl_coef * (1 + 1e-12)


def test_the_batch_split_changes_nothing() -> None:
    logprobs = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(5)) > 0.4
    whole = kl_estimate(logprobs, torch.zeros(6, 5), mask, kind="k3")
    parts = [kl_estimate(logprobs[i], torch.zeros(5), mask[i], kind="k3") for i in range(6)]
    assert torch.equal(torch.stack(parts), whole)


def test_a_batch_of_nothing_but_masked_slots_gives_zero() -> None:
    logprobs = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    result = kl_estimate(logprobs, torch.full((2, 3), math.nan), mask, kind="k1", straight_through=True)
    aggregate(result, mask, mode="token_mean", denominator=0.0).backward()
    assert logprobs.grad is not None
    assert not result.any()
    assert not logprobs.grad.any()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(3,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(3), ones(2), kind="k2")
    with pytest.raises(ValueError, match=r"mask has dtype torch\.float32"):
        kl_estimate(torch.zeros(2), torch.zeros(2), torch.ones(2), kind="k2")
    with pytest.raises(ValueError, match=r"kind='full'.*k1, abs, k2, k3"):
        kl_estimate(torch.zeros(2), torch.zeros(2), ones(2), kind="full")  # type: ignore[arg-type]
    with value_checks(), pytest.raises(ValueError, match="logprobs is nan"):
        kl_estimate(torch.tensor([math.nan]), torch.zeros(1), ones(1), kind="k2")


def test_half_precision_is_computed_in_float32() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert kl_estimate(x, x, ones(2), kind="k3").dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_whole(kind: KLKind) -> None:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        return kl_estimate(logprobs, ref_logprobs, mask, kind=kind, straight_through=True).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for function in (loss, compiled):
        logprobs = inputs[0].clone().requires_grad_()
        result = function(logprobs, inputs[1], inputs[0] > -0.5)
        results.append((result, *torch.autograd.grad(result, logprobs)))
    torch.testing.assert_close(results[1], results[0])
