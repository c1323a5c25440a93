import math

import pytest
import torch
from drivetrain_algorithms import whiten
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
