"""Means and sums of squares over the unmasked slots of all ranks, in two passes so that large means cost no digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks and returns the sum, of the same shape, on every rank."""


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


def centred_squares(x: Tensor, mean: Tensor, mask: Tensor, reduce: Reduce | None) -> Tensor:
    """`Σ (x - mean)²` over the unmasked slots, `[K]`, float64; `x` is `[K, *mask.shape]`."""
    # The mean in x's own precision: equal numbers then deviate from it by exactly 0.
    deviation = x.flatten(1) - mean.to(x.dtype).unsqueeze(1)
    squares = torch.where(mask.flatten(), deviation, 0.0).square().sum(1, dtype=torch.float64)
    return squares if reduce is None else reduce(squares)
