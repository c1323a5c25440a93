import math

import pytest
import torch
from drivetrain_algorithms import clipped_value_loss, explained_variance

ALL = torch.ones(3, dtype=torch.bool)


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
