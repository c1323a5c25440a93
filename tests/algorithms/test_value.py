import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drivetrain_algorithms import (
    ValueLossKind,
    aggregate,
    clipped_value_loss,
    explained_variance,
    loss_denominator,
    value_checks,
    value_loss,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ALL = torch.ones(3, dtype=torch.bool)
LOSSES: list[tuple[ValueLossKind, float | None]] = [("squared", None), ("huber", 0.7)]


def test_loss_and_clipping_by_hand() -> None:
    # old value 0 and clip 1: the new value 3 counts as 1; the larger of the two errors is taken
    new_values = torch.tensor([3.0, 3.0, 0.5], requires_grad=True)
    result = clipped_value_loss(new_values, torch.zeros(3), torch.tensor([4.0, 1.5, 2.0]), ALL, clip=1.0)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([4.5, 1.125, 1.125])
    assert result.clipped.tolist() == [True, False, False]
    assert new_values.grad is not None
    assert new_values.grad.tolist() == pytest.approx([0.0, 1.5, -1.5])


def test_before_the_first_update_it_is_half_the_squared_error() -> None:
    new_values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    result = clipped_value_loss(new_values, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 0.0]), ALL, clip=0.2)
    result.loss.sum().backward()
    assert result.loss.tolist() == [2.0, 0.0, 4.5]
    assert new_values.grad is not None
    assert new_values.grad.tolist() == [-2.0, 0.0, 3.0]


def test_an_infinite_clip_is_the_plain_squared_error() -> None:
    result = clipped_value_loss(torch.tensor([5.0, 0.0, -5.0]), torch.zeros(3), torch.ones(3), ALL, clip=math.inf)
    assert result.loss.tolist() == [8.0, 0.5, 18.0]
    assert not result.clipped.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_masked_slots_give_exactly_zero_loss_and_gradient(garbage: float) -> None:
    mask = torch.tensor([True, False, True])
    for position in range(3):
        inputs = [torch.ones(3), torch.zeros(3), torch.zeros(3)]
        inputs[position][1] = garbage
        new_values = inputs[0].requires_grad_()
        result = clipped_value_loss(*inputs, mask, clip=math.inf)
        result.loss.sum().backward()
        assert result.loss.tolist() == [0.5, 0.0, 0.5]
        assert new_values.grad is not None
        assert new_values.grad.tolist() == [1.0, 0.0, 1.0]


def test_unmasked_nan_shows() -> None:
    new_values = torch.tensor([math.nan, 0.0, 0.0], requires_grad=True)
    result = clipped_value_loss(new_values, torch.zeros(3), torch.zeros(3), ALL, clip=0.2)
    result.loss.sum().backward()
    assert new_values.grad is not None
    assert result.loss.isnan().tolist() == [True, False, False]
    assert new_values.grad.isnan().tolist() == [True, False, False]


def test_gradients_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    new_values, values, returns = torch.randn(3, 12, dtype=torch.float64, generator=generator)
    mask = torch.rand(12, generator=generator) > 0.3
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, values, returns, mask, clip=0.5).loss, new_values.requires_grad_()
    )


def test_clip_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"clip=0\.0"):
        clipped_value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), ALL, clip=0.0)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    perfect = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert explained_variance(perfect, returns, mask).item() == 1.0
    assert explained_variance(perfect + 7.0, returns, mask).item() == 1.0
    assert explained_variance(torch.full((4,), 5.0), returns, mask).item() == 0.0
    assert explained_variance(-perfect, returns, mask).item() == -3.0
    # residuals (1, 0, 0): variance 2/9; returns: 2/3
    assert explained_variance(torch.tensor([0.0, 2.0, 3.0, 0.0]), returns, mask).item() == pytest.approx(2 / 3)


def test_explained_variance_is_undefined_for_equal_returns_and_for_none() -> None:
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1]), ALL[:2]).isnan()
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.2]), ~ALL[:2]).isnan()


def test_plain_losses_by_hand() -> None:
    # errors 3, -0.5, -2, with delta 1: 1 (3 - 1/2), 1/2 (1/2)², 1 (2 - 1/2)
    new_values = torch.tensor([4.0, 0.5, -1.0], requires_grad=True)
    returns = torch.ones(3)
    squared = value_loss(new_values, returns, ALL).loss
    assert squared.tolist() == [4.5, 0.125, 2.0]
    assert torch.autograd.grad(squared.sum(), new_values)[0].tolist() == [3.0, -0.5, -2.0]
    huber = value_loss(new_values, returns, ALL, kind="huber", delta=1.0).loss
    assert huber.tolist() == [2.5, 0.125, 1.5]
    assert torch.autograd.grad(huber.sum(), new_values)[0].tolist() == [1.0, -0.5, -1.0]


def test_huber_is_torchs_huber() -> None:
    new_values, returns = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    mask = torch.ones(50, dtype=torch.bool)
    expected = torch.nn.functional.huber_loss(new_values, returns, reduction="none", delta=0.4)
    torch.testing.assert_close(value_loss(new_values, returns, mask, kind="huber", delta=0.4).loss, expected)


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
def test_no_clipping_is_the_plain_loss(kind: ValueLossKind, delta: float | None) -> None:
    new_values, values, returns = torch.randn(3, 20, generator=torch.Generator().manual_seed(8))
    mask = torch.rand(20, generator=torch.Generator().manual_seed(9)) > 0.3
    clipped = clipped_value_loss(new_values, values, returns, mask, clip=math.inf, kind=kind, delta=delta)
    torch.testing.assert_close(clipped.loss, value_loss(new_values, returns, mask, kind=kind, delta=delta).loss)


def test_the_clipped_huber_loss_by_hand() -> None:
    # old value 0, clip 1, delta 1: errors -1 or -3, 1.5 or -0.5, -1.5 or -1.5
    result = clipped_value_loss(
        torch.tensor([3.0, 3.0, 0.5]),
        torch.zeros(3),
        torch.tensor([4.0, 1.5, 2.0]),
        ALL,
        clip=1.0,
        kind="huber",
        delta=1.0,
    )
    assert result.loss.tolist() == pytest.approx([2.5, 1.0, 1.0])
    assert result.clipped.tolist() == [True, False, False]


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_slots_of_the_plain_loss(kind: ValueLossKind, delta: float | None, garbage: float) -> None:
    mask = torch.tensor([True, False, True])
    for position in range(2):
        inputs = [torch.full((3,), 0.5), torch.zeros(3)]
        inputs[position][1] = garbage
        new_values = inputs[0].requires_grad_()
        result = value_loss(*inputs, mask, kind=kind, delta=delta).loss
        result.sum().backward()
        assert result.tolist() == [0.125, 0.0, 0.125]
        assert new_values.grad is not None
        assert new_values.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unmasked_nan_and_inf_show_in_the_plain_loss(kind: ValueLossKind, delta: float | None, bad: float) -> None:
    result = value_loss(torch.tensor([bad, 0.0, 0.0]), torch.zeros(3), ALL, kind=kind, delta=delta).loss
    assert result.isfinite().tolist() == [False, True, True]


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
def test_gradients_of_every_kind_in_float64(kind: ValueLossKind, delta: float | None) -> None:
    generator = torch.Generator().manual_seed(11)
    new_values, values, returns = torch.randn(3, 12, dtype=torch.float64, generator=generator)
    mask = torch.rand(12, generator=generator) > 0.3
    new_values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, returns, mask, kind=kind, delta=delta).loss, new_values)
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, values, returns, mask, clip=0.5, kind=kind, delta=delta).loss, new_values
    )


def test_no_gradient_flows_to_returns_and_old_values() -> None:
    new_values, values, returns = (torch.tensor([x, x, x], requires_grad=True) for x in (1.0, 2.0, 4.0))
    (
        clipped_value_loss(new_values, values, returns, ALL, clip=0.5).loss + value_loss(new_values, returns, ALL).loss
    ).sum().backward()
    assert values.grad is None
    assert returns.grad is None


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
def test_micro_batches_sum_to_the_whole(kind: ValueLossKind, delta: float | None) -> None:
    new_values, returns = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(12))
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(13)) > 0.4
    denominator = loss_denominator(mask, mode="token_mean")

    def total(rows: slice) -> Tensor:
        loss = value_loss(new_values[rows], returns[rows], mask[rows], kind=kind, delta=delta).loss
        return aggregate(loss, mask[rows], mode="token_mean", denominator=denominator)

    parts = [total(slice(0, 1)), total(slice(1, 4)), total(slice(4, 6))]
    assert sum(parts).item() == pytest.approx(total(slice(0, 6)).item())


def test_a_batch_of_nothing_but_masked_slots_gives_zero() -> None:
    new_values = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = value_loss(new_values, torch.full((2, 3), math.nan), mask).loss
    aggregate(loss, mask, mode="token_mean", denominator=0.0).backward()
    assert new_values.grad is not None
    assert not loss.any()
    assert not new_values.grad.any()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    errors=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), delta=st.floats(1e-3, 1e3), shift=st.floats(-10, 10)
)
def test_properties_of_the_huber_loss(errors: list[float], delta: float, shift: float) -> None:
    error = torch.tensor(errors, dtype=torch.float64)
    returns = torch.full_like(error, shift)
    mask = torch.ones(len(errors), dtype=torch.bool)
    new_values = (returns + error).requires_grad_()
    huber = value_loss(new_values, returns, mask, kind="huber", delta=delta).loss
    squared = value_loss(new_values, returns, mask).loss
    (gradient,) = torch.autograd.grad(huber.sum(), new_values)
    assert (huber >= 0).all()
    assert (huber <= squared * (1 + 1e-12)).all()
    assert (gradient.abs() <= delta).all()
    mirrored = value_loss(returns - error, returns, mask, kind="huber", delta=delta).loss
    torch.testing.assert_close(mirrored, huber.detach(), rtol=1e-9, atol=1e-9)


def test_explained_variance_over_ranks_is_that_of_one() -> None:
    values, returns = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(14))
    mask = torch.tensor([True] * 7 + [False])
    sent: list[Tensor] = [torch.zeros(0)] * 2
    barrier = threading.Barrier(2, timeout=30)

    def run(rank: int) -> float:
        def reduce(x: Tensor) -> Tensor:
            sent[rank] = x
            barrier.wait()
            total = sent[0] + sent[1]
            barrier.wait()
            return total

        rows = (slice(0, 3), slice(3, 8))[rank]
        return explained_variance(values[rows], returns[rows], mask[rows], reduce=reduce).item()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    whole = explained_variance(values, returns, mask).item()
    assert results == pytest.approx([whole, whole])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cubic"}, r"kind='cubic'.*squared, huber"),
        ({"kind": "huber"}, "delta=None with kind='huber'"),
        ({"delta": 1.0}, r"delta=1\.0 with kind='squared'"),
        ({"kind": "huber", "delta": 0.0}, r"delta=0\.0 must"),
        ({"kind": "huber", "delta": math.inf}, "delta=inf must"),
        ({"kind": "huber", "delta": math.nan}, "delta=nan must"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_loss(torch.zeros(3), torch.zeros(3), ALL, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        clipped_value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), ALL, clip=1.0, **settings)  # type: ignore[arg-type]


def test_shapes_dtypes_and_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"returns has shape \(2,\)"):
        value_loss(torch.zeros(3), torch.zeros(2), ALL)
    with pytest.raises(ValueError, match=r"mask has dtype torch\.int64"):
        value_loss(torch.zeros(3), torch.zeros(3), ALL.long())
    with value_checks(), pytest.raises(ValueError, match="returns is inf"):
        value_loss(torch.zeros(3), torch.full((3,), math.inf), ALL)


@pytest.mark.parametrize(("kind", "delta"), LOSSES)
def test_they_compile_whole(kind: ValueLossKind, delta: float | None) -> None:
    def loss(new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        plain = value_loss(new_values, returns, mask, kind=kind, delta=delta).loss
        clipped = clipped_value_loss(new_values, values, returns, mask, clip=0.3, kind=kind, delta=delta)
        return (plain + clipped.loss).sum() + explained_variance(values, returns, mask)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for function in (loss, compiled):
        new_values = inputs[0].clone().requires_grad_()
        result = function(new_values, inputs[1], inputs[2], inputs[0] > -0.5)
        results.append((result, *torch.autograd.grad(result, new_values)))
    torch.testing.assert_close(results[1], results[0])


def test_the_trust_region_is_seen_to_the_last_bit() -> None:
    far = clipped_value_loss(
        torch.tensor([0.1]), torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([True]), clip=math.inf
    )
    assert far.loss.item() == pytest.approx(0.5 * 0.9**2)
    assert not far.clipped.any()
    generator = torch.Generator().manual_seed(0)
    new_values, steps, returns = torch.randn(3, 10_000, generator=generator)
    inside = clipped_value_loss(
        new_values, new_values + 0.05 * steps, returns, torch.ones(10_000, dtype=torch.bool), clip=10.0
    )
    assert not inside.clipped.any()


@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_equal_returns_have_no_variance_to_explain(count: int) -> None:
    returns = torch.full((count,), 0.1, dtype=torch.float64)
    values = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert explained_variance(values, returns, torch.ones(count, dtype=torch.bool)).isnan()
