"""How the responses of a batch form groups: the siblings that one prompt was given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._slots import check_finite_values, sequence_sums, values_are_read


class Groups(NamedTuple):
    """A batch laid out group after group. Slots are those of the layout."""

    order: Tensor
    """`[B]`: the position in the batch of what lies in each slot."""
    group: Tensor
    """`[B]`: which group each slot belongs to, counted from 0."""
    bounds: Tensor
    """`[B + 1]`: group g lies in the slots `bounds[g] : bounds[g + 1]`; those beyond the last one are empty."""

    def sums(self, x: Tensor) -> Tensor:
        """The sum over its group, at each slot. No group sees a NaN of another."""
        return sequence_sums(x, self.bounds)[self.group]

    def sizes(self) -> Tensor:
        """How many responses its group has, at each slot; float64."""
        return self.bounds.diff()[self.group].double()

    def in_batch_order(self, x: Tensor) -> Tensor:
        """What lies in the slots, at its position in the batch."""
        return x[self.order.argsort()]


def lay_out(group_ids: Tensor, *keys: Tensor) -> Groups:
    """Sort by group, and within a group by the last key first.

    Sums then add in an order that is a matter of the numbers alone: a permuted batch gives the same bits, permuted.
    """
    order = torch.arange(len(group_ids), device=group_ids.device)
    for key in (*keys, group_ids):
        order = order[key[order].argsort(stable=True)]
    ids = group_ids[order]
    group = (ids.diff(prepend=ids[:1]) != 0).cumsum(0)
    bounds = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))
    return Groups(order, group, bounds)


def check_groups(group_ids: Tensor, **numbers: Tensor) -> None:
    """Require ids from 0 up to the number of responses, and as many of each tensor's numbers as there are ids."""
    if group_ids.dim() != 1 or group_ids.dtype is not torch.int64:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}; pass [B] int64, one id per "
            "response, for instance torch.unique(keys, return_inverse=True)[1]"
        )
    for name, tensor in numbers.items():
        if tensor.shape != group_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass one per response, as group_ids, [{len(group_ids)}]"
            )
    check_finite_values(**numbers)
    if is_read(group_ids):
        low, high = (int(x) for x in group_ids.aminmax())
        if low < 0 or high >= len(group_ids):
            raise ValueError(
                f"group_ids runs from {low} to {high} with {len(group_ids)} responses; ids lie in "
                f"[0, {len(group_ids)}): torch.unique(keys, return_inverse=True)[1] makes them of any keys"
            )


def check_not_negative(name: str, x: Tensor) -> None:
    """Require numbers of at least 0, where it costs nothing to look or `value_checks` are on."""
    if is_read(x) and bool((x < 0).any()):
        first = int((x < 0).nonzero()[0])
        raise ValueError(f"{name} is {x[first].item()} at index {first}; it must be at least 0")


def is_read(x: Tensor) -> bool:
    """Whether a check may look at values: always on a CPU, with `value_checks` elsewhere, never in compiled code."""
    return x.numel() > 0 and (values_are_read() or (x.device.type == "cpu" and not torch.compiler.is_compiling()))
