import math
from typing import Any

import pytest
import torch
from drivetrain_algorithms import spread_over_tokens, value_checks, whiten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


class RankZeroOfTwo:
    """Sums with what another rank, which ran before, was about to contribute at the same call."""

    def __init__(self, other: list[Tensor]) -> None:
        self.other = iter(other)

    def __call__(self, x: Tensor) -> Tensor:
        return x + next(self.other)


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, math.nan], [3.0, -math.inf, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    # mean 2, sample variance 1
    assert whiten(x, mask).flatten().tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    assert whiten(x, mask, shift_mean=False).flatten().tolist() == pytest.approx([1.0, 2.0, 0.0, 3.0, 0.0, 0.0])


def test_whitening_twice_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 5.0 + 3.0 * torch.randn(16, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(16, 9, generator=generator) > 0.4
    once = whiten(x, mask)
    assert once[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert once[mask].std().item() == pytest.approx(1.0, abs=1e-7)
    torch.testing.assert_close(whiten(once, mask), once, rtol=1e-7, atol=1e-7)


def test_a_large_mean_costs_no_digits() -> None:
    x = torch.tensor([4096.0, 4096.25, 4096.5, 4096.75])
    expected = whiten(x - 4096.0, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(whiten(x, torch.ones(4, dtype=torch.bool)), expected, rtol=1e-6, atol=1e-6)


def test_equal_numbers_one_number_and_none() -> None:
    equal = torch.full((3, 5), 0.1)
    every = torch.ones(3, 5, dtype=torch.bool)
    assert whiten(equal, every).eq(0).all()
    assert torch.equal(whiten(equal, every, shift_mean=False), equal)
    single = torch.zeros(3, 5, dtype=torch.bool)
    single[1, 2] = True
    assert whiten(equal, single).eq(0).all()
    assert whiten(torch.full((3, 5), math.nan), torch.zeros(3, 5, dtype=torch.bool)).eq(0).all()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_two_ranks_give_the_numbers_of_one(shift_mean: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    high, low = 1.0 + torch.rand(5, generator=generator), -torch.rand(500, generator=generator)
    everything = torch.cat((high, low))
    together = whiten(everything, torch.ones(505, dtype=torch.bool), shift_mean=shift_mean)
    mean = everything.double().mean()
    contributions = [
        torch.stack((low.double().sum(), torch.tensor(500.0, dtype=torch.float64))),
        (low - mean.float()).square().sum(dtype=torch.float64).unsqueeze(0),
    ]
    split = whiten(high, torch.ones(5, dtype=torch.bool), shift_mean=shift_mean, reduce=RankZeroOfTwo(contributions))
    torch.testing.assert_close(split, together[:5], rtol=1e-6, atol=1e-6)


def test_unmasked_nan_shows() -> None:
    assert whiten(torch.tensor([1.0, math.nan]), torch.tensor([True, True])).isnan().all()


def test_gradients_in_float64() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 1]]).bool()
    assert torch.autograd.gradcheck(lambda x: whiten(x, mask), x)


def test_the_unit_is_the_slot_token_or_response() -> None:
    # Scores 0 and 1 over 1 and 3 tokens. Per response: mean 1/2, variance 1/2. Per token: mean 3/4, variance 1/4.
    scores, mask = torch.tensor([0.0, 1.0]), torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    responses = whiten(scores, mask.any(1))
    assert responses.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert spread_over_tokens(responses, mask)[1].tolist() == pytest.approx([math.sqrt(0.5)] * 3)
    tokens = whiten(spread_over_tokens(scores, mask), mask)
    assert tokens.flatten().tolist() == pytest.approx([-1.5, 0.0, 0.0, 0.5, 0.5, 0.5])


def test_a_response_without_a_token_is_left_out() -> None:
    scores, mask = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([[1, 1], [0, 0], [1, 0]]).bool()
    assert whiten(scores, mask.any(1)).tolist() == pytest.approx([-math.sqrt(0.5), 0.0, math.sqrt(0.5)])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything_and_have_no_gradient(garbage: float) -> None:
    x = torch.tensor([1.0, garbage, 2.0, 5.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    result = whiten(x, mask)
    assert torch.equal(result[mask], whiten(x[mask], mask[mask]))
    result[2].backward()
    assert x.grad is not None
    assert x.grad[1] == 0.0
    assert x.grad.isfinite().all()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=2, max_size=30),
    st.floats(-1e3, 1e3),
    st.floats(0.1, 10.0),
    st.randoms(use_true_random=False),
)
def test_properties(slots: list[tuple[float, bool]], shift: float, factor: float, random: Any) -> None:
    x = torch.tensor([value for value, _ in slots], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in slots])
    result = whiten(x, mask)
    order = list(range(len(x)))
    random.shuffle(order)
    torch.testing.assert_close(whiten(x[order], mask[order]), result[order], rtol=1e-9, atol=1e-9)
    assert result[mask].sum().item() == pytest.approx(0.0, abs=1e-6)
    if mask.sum() > 1 and x[mask].std() > 1e-1:
        assert result[mask].std().item() == pytest.approx(1.0, abs=1e-5)
        torch.testing.assert_close(whiten(factor * x + shift, mask), result, rtol=1e-4, atol=1e-4)
        kept = whiten(x, mask, shift_mean=False)
        assert kept[mask].mean().item() == pytest.approx(x[mask].mean().item(), rel=1e-9, abs=1e-9)


def test_packed_equals_padded() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    inside = torch.arange(6) < torch.tensor([6, 0, 2, 5]).unsqueeze(-1)
    mask = inside & (torch.rand(4, 6, generator=generator) > 0.3)
    torch.testing.assert_close(whiten(x[inside], mask[inside]), whiten(x, mask)[inside], rtol=1e-12, atol=1e-12)


def test_misfits_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"x has shape \(2, 2\) and mask \(2, 3\)"):
        whiten(x[:, :2], mask)
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        whiten(x, mask.int())
    x[1, 2] = math.nan
    with value_checks(), pytest.raises(ValueError, match="x is nan at token 2 of sequence 1"):
        whiten(x, mask)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_one_graph(shift_mean: bool) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    compiled = torch.compile(whiten, fullgraph=True, backend="aot_eager")
    expected = whiten(x, mask, shift_mean=shift_mean)
    torch.testing.assert_close(compiled(x, mask, shift_mean=shift_mean), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.1, 7), (1e8 + 0.1, 3), (1e14 + 0.1, 6)])
def test_equal_float64_numbers_have_no_variance(value: float, count: int) -> None:
    x = torch.full((1, count), value, dtype=torch.float64)
    assert whiten(x, torch.ones(1, count, dtype=torch.bool)).tolist() == [[0.0] * count]


def test_numbers_whose_squares_are_beyond_float32() -> None:
    whitened = whiten(torch.tensor([[1e20, -1e20]]), torch.tensor([[True, True]]))
    torch.testing.assert_close(whitened, torch.tensor([[2**-0.5, -(2**-0.5)]]))
