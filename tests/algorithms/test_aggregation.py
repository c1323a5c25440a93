import math
from typing import Any

import pytest
import torch
from drivetrain_algorithms import AggregationMode, aggregate, loss_denominator, value_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

MODES: list[AggregationMode] = [
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
]
LOSS = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, 99.0, 8.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()


def norm_length(mode: AggregationMode) -> int | None:
    return 10 if mode == "seq_mean_token_sum_norm" else None


def total_denominator(mask: Tensor, mode: AggregationMode) -> Tensor:
    return loss_denominator(mask, mode=mode, norm_length=norm_length(mode))


@pytest.mark.parametrize(
    ("mode", "denominator", "expected"),
    [
        ("token_mean", 6.0, 24 / 6),
        ("token_sum", 1.0, 24.0),
        ("seq_mean_token_sum", 2.0, (12 + 12) / 2),
        ("seq_mean_token_mean", 2.0, (3 + 6) / 2),
        ("seq_mean_token_sum_norm", 20.0, 24 / 20),
    ],
)
def test_modes_by_hand(mode: AggregationMode, denominator: float, expected: float) -> None:
    counted = total_denominator(MASK, mode)
    assert counted.item() == denominator
    assert aggregate(LOSS, MASK, mode=mode, denominator=denominator).item() == pytest.approx(expected)
    assert aggregate(LOSS, MASK, mode=mode, denominator=counted).item() == pytest.approx(expected)


def test_token_mean_of_100_and_900_tokens_is_the_same_in_one_micro_batch_or_two() -> None:
    loss = torch.cat((torch.full((1, 900), 0.5), torch.full((1, 900), 0.3)))
    mask = torch.arange(900) < torch.tensor([[100], [900]])
    denominator = loss_denominator(mask, mode="token_mean")
    together = aggregate(loss, mask, mode="token_mean", denominator=denominator)
    apart = sum(aggregate(loss[i : i + 1], mask[i : i + 1], mode="token_mean", denominator=denominator) for i in (0, 1))
    assert together.item() == pytest.approx(0.32)
    assert float(apart) == pytest.approx(0.32)


def ragged_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(7, 11, generator=generator) > 0.4
    mask[3] = False
    return torch.randn(7, 11, dtype=torch.float64, generator=generator), mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(mode: AggregationMode, size: int) -> None:
    loss, mask = ragged_batch()
    denominator = total_denominator(mask, mode)
    weight = torch.ones(11, dtype=torch.float64, requires_grad=True)
    whole = aggregate(loss * weight, mask, mode=mode, denominator=denominator)
    (expected,) = torch.autograd.grad(whole, weight)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, 7, size):
        rows = slice(start, start + size)
        part = aggregate(loss[rows] * weight, mask[rows], mode=mode, denominator=denominator)
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, whole.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


@given(st.sampled_from(MODES), st.integers(1, 7), st.integers(0, 2**16), st.data())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_any_split_packing_and_order_give_the_same_loss_and_gradient(
    mode: AggregationMode, size: int, seed: int, data: st.DataObject
) -> None:
    """Sequences are dealt to three parts in any order; the first is padded, the others packed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (size,), generator=generator)
    inside = torch.arange(5) < lengths.unsqueeze(-1)
    mask = inside & (torch.rand(size, 5, generator=generator) > 0.4)
    values = torch.where(mask, torch.randn(size, 5, dtype=torch.float64, generator=generator), math.nan)
    denominator = total_denominator(mask, mode)

    expected = values.clone().requires_grad_()
    whole = aggregate(expected, mask, mode=mode, denominator=denominator)
    whole.backward()
    order = torch.tensor(data.draw(st.permutations(range(size))))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    split, total, counted = values.clone().requires_grad_(), 0.0, 0.0
    for part, rows in enumerate(order.tensor_split(cuts)):
        cu_seqlens = None if part == 0 else torch.nn.functional.pad(lengths[rows].cumsum(0), (1, 0))
        keep = torch.ones_like(inside[rows]) if part == 0 else inside[rows]
        shape = (len(rows), 5) if part == 0 else (-1,)
        own, own_mask = split[rows][keep].view(shape), mask[rows][keep].view(shape)
        loss = aggregate(own, own_mask, mode=mode, denominator=denominator, cu_seqlens=cu_seqlens)
        loss.backward()
        total += loss.item()
        counted += loss_denominator(own_mask, mode=mode, cu_seqlens=cu_seqlens, norm_length=norm_length(mode)).item()
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert counted == denominator.item() or mode == "token_sum"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(mode: AggregationMode, packed: bool) -> None:
    loss, mask = ragged_batch()
    cu_seqlens = None
    if packed:
        loss, mask, cu_seqlens = loss.flatten(), mask.flatten(), torch.arange(0, 78, 11)

    def mean(loss: Tensor, mask: Tensor) -> Tensor:
        denominator = loss_denominator(mask, mode=mode, cu_seqlens=cu_seqlens, norm_length=norm_length(mode))
        return aggregate(loss, mask, mode=mode, denominator=denominator, cu_seqlens=cu_seqlens)

    torch.compiler.reset()  # every mode is another compilation of the same code, and their number is limited
    compiled = torch.compile(mean, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(loss, mask), mean(loss, mask))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_in_an_unmasked_slot_shows(mode: AggregationMode) -> None:
    loss = LOSS.clone()
    loss[1, 2] = math.nan
    assert aggregate(loss, MASK, mode=mode, denominator=2).isnan()
    with value_checks(), pytest.raises(ValueError, match="loss is nan at token 2 of sequence 1"):
        aggregate(loss, MASK, mode=mode, denominator=2)


@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_padded(mode: AggregationMode) -> None:
    loss, mask = ragged_batch()
    lengths = torch.tensor([11, 4, 0, 7, 1, 11, 9])
    inside = torch.arange(11) < lengths.unsqueeze(-1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    denominator = total_denominator(mask & inside, mode)
    packed_mask = mask[inside]
    counted = loss_denominator(packed_mask, mode=mode, cu_seqlens=cu_seqlens, norm_length=norm_length(mode))
    assert counted.item() == denominator.item()
    packed = aggregate(loss[inside], packed_mask, mode=mode, denominator=denominator, cu_seqlens=cu_seqlens)
    padded = aggregate(loss, mask & inside, mode=mode, denominator=denominator)
    torch.testing.assert_close(packed, padded, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_gives_zero_loss_and_gradient(mode: AggregationMode) -> None:
    loss = torch.full((2, 3), math.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for denominator in (total_denominator(nothing, mode), 0, 12.0):
        loss.grad = None
        result = aggregate(loss, nothing, mode=mode, denominator=denominator)
        result.backward()
        assert result.item() == 0.0
        assert loss.grad is not None
        assert loss.grad.eq(0).all()


def test_a_wrong_zero_denominator_is_not_hidden() -> None:
    assert aggregate(LOSS, MASK, mode="token_mean", denominator=0).item() == math.inf


def test_sequences_left_out_of_the_sum_are_left_out_of_the_divisor() -> None:
    truncated = torch.tensor([[False], [True], [True], [True]])
    mask = torch.ones(4, 5, dtype=torch.bool) & ~truncated
    for mode in ("token_mean", "seq_mean_token_mean"):
        denominator = loss_denominator(mask, mode=mode)
        assert aggregate(torch.full((4, 5), 0.7), mask, mode=mode, denominator=denominator).item() == pytest.approx(0.7)


def test_denominators_of_ranks_add_up() -> None:
    other = torch.tensor(4.0, dtype=torch.float64)
    assert loss_denominator(MASK, mode="token_mean", reduce=lambda x: x + other).item() == 10.0
    assert loss_denominator(MASK, mode="seq_mean_token_sum", reduce=lambda x: x + other).item() == 6.0
    norm = loss_denominator(MASK, mode="seq_mean_token_sum_norm", norm_length=10, reduce=lambda x: x + other)
    assert norm.item() == 60.0


def test_flags_become_fractions_and_half_precision_float32() -> None:
    clipped = torch.tensor([[True, False, True, True]])
    mask = torch.tensor([[True, True, True, False]])
    assert aggregate(clipped, mask, mode="token_mean", denominator=3).item() == pytest.approx(2 / 3)
    small = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    assert aggregate(small, small.bool(), mode="token_sum", denominator=1).item() == 4096.0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_float64(mode: AggregationMode) -> None:
    loss, mask = ragged_batch()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, mode=mode, denominator=3.0), loss.requires_grad_())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mean", "denominator": 1}, "mode='mean'.*token_mean, token_sum"),
        ({"mode": "token_mean", "denominator": -1}, "denominator=-1"),
        ({"mode": "token_mean", "denominator": math.nan}, "denominator=nan"),
        ({"mode": "token_mean", "denominator": torch.ones(2)}, r"denominator has shape \(2,\)"),
    ],
)
def test_misfits_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(LOSS, MASK, **arguments)


@pytest.mark.parametrize("denominator", [-1.0, math.nan, math.inf])
def test_value_checks_look_into_a_denominator_that_is_a_tensor(denominator: float) -> None:
    with value_checks():
        aggregate(LOSS, MASK, mode="token_mean", denominator=torch.tensor(6))
        with pytest.raises(ValueError, match=f"denominator={denominator} must be a finite number, at least 0"):
            aggregate(LOSS, MASK, mode="token_mean", denominator=torch.tensor(denominator))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"loss has shape \(3, 3\) and mask \(3, 4\)"):
        aggregate(LOSS[:, :3], MASK, mode="token_mean", denominator=1)
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64.*mask.bool\(\)"):
        loss_denominator(MASK.long(), mode="token_mean")
    with pytest.raises(ValueError, match="together with cu_seqlens"):
        aggregate(LOSS.flatten(), MASK.flatten(), mode="token_mean", denominator=1)
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 4"):
        aggregate(LOSS.flatten(), MASK.flatten(), mode="token_mean", denominator=1, cu_seqlens=torch.tensor([0, 4]))


def test_norm_length_belongs_to_one_mode() -> None:
    with pytest.raises(ValueError, match="norm_length=None"):
        loss_denominator(MASK, mode="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="norm_length=5"):
        loss_denominator(MASK, mode="token_mean", norm_length=5)
    with pytest.raises(ValueError, match="at least 1"):
        loss_denominator(MASK, mode="seq_mean_token_sum_norm", norm_length=0)
