"""Means and sums of squares over the unmasked slots of all ranks, in two passes so that large means cost no digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks and returns the sum, of the same shape, on every rank."""

_ROUNDING = 1e-14
"""What float64 may lose on a mean, relative to it."""


class Means(NamedTuple):
    """Statistics over the unmasked slots; without one, all are 0."""

    mean: Tensor
    """`[K]`, float64."""
    num_slots: Tensor
    """A scalar, float64."""


def means(x: Tensor, mask: Tensor, reduce: Reduce | None) -> Means:
    """The mean of each of K tensors; `x` is `[K, *mask.shape]`, already 0 at masked slots."""
    sums = torch.cat((x.flatten(1).sum(1, dtype=torch.float64), mask.sum(dtype=torch.float64).unsqueeze(0)))
    if reduce is not None:
        sums = reduce(sums)
    return Means(sums[:-1] / sums[-1].clamp(min=1.0), sums[-1])


def deviations(x: Tensor, mean: Tensor, mask: Tensor) -> Tensor:
    """`x - mean` in float64, and 0 at masked slots; `x` is `[K, *mask.shape]`, `mean` `[K]`.

    Equal numbers deviate by exactly 0: the mean of float32 ones is exact, and for float64 ones a deviation that may be
    rounding does not count.
    """
    mean = mean.view(-1, *[1] * mask.dim())
    deviation = x.double() - mean
    return torch.where(mask & ~(deviation.abs() <= _ROUNDING * mean.abs()), deviation, 0.0)


def squares_of(deviation: Tensor, reduce: Reduce | None) -> Tensor:
    """The sum of squares of each of K tensors, over all ranks, `[K]`."""
    squares = deviation.flatten(1).square().sum(1)
    return squares if reduce is None else reduce(squares)
