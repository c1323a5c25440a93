"""Cutting what is sent into rounds in which no place sends and receives more than a bucket holds.

Loads are int64 tensors with a column for each place that sends and then one for each that receives, in bytes. The
capacity of a column is a bucket, or half of one where the place is in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_sharding._dealing import Pairs, Places
from drivetrain_sharding.layout import Box

ALIGNMENT = 16
_OPEN = 4  # rounds that a band is tried in, the last ones: what is left over of one is filled by small tensors
_FILL = 4  # a unit's bands are at most this part of a bucket: the fewer transfers, but rounds that fill well


def band(box: Box, bands: int, index: int) -> Box | None:
    """One of the `bands` parts that every box of a tensor is cut into; None where it has no elements."""
    if bands == 1:
        return box
    if not box.start:
        return box if index == bands - 1 else None
    dim = _cut_along(box.shape, bands)
    first, size = box.start[dim], box.stop[dim] - box.start[dim]
    start, stop = first + size * index // bands, first + size * (index + 1) // bands
    if start == stop:
        return None
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))


def _cut_along(shape: Sequence[int], bands: int) -> int:
    """The first dimension that is long enough, since outer ones leave longer runs; else the longest."""
    for dim, size in enumerate(shape):
        if size >= bands:
            return dim
    return max(range(len(shape)), key=shape.__getitem__)


class Member(NamedTuple):
    """A tensor of a unit: its boxes, the size of an element as it is sent, and the boxes' ways."""

    boxes: Sequence[Box]
    itemsize: int
    pairs: Pairs


def cut(unit: Sequence[Member], places: Places, capacity: Tensor) -> Tensor:
    """Cut tensors that go together into bands, each of which leaves room for others in a bucket.

    Returns:
        the loads of the bands, all tensors together: int64 `[bands, columns]`.

    Raises:
        ValueError: a bucket cannot hold what a place sends or receives of the finest band.
    """
    loads = _loads(unit, places, 1)
    bands = int(-(-loads * _FILL // capacity).min())
    if bands > 1:
        finest = max(max(box.shape, default=1) for member in unit for box in member.boxes)
        loads = _loads(unit, places, min(bands, finest))
        while (loads > capacity).any() and bands < finest:
            bands *= 2
            loads = _loads(unit, places, min(bands, finest))
    if (loads > capacity).any():
        raise ValueError(f"its finest band takes {int(loads.max())} of the {int(capacity.min())} bytes of a rank")
    return loads


def _loads(unit: Sequence[Member], places: Places, bands: int) -> Tensor:
    found = torch.zeros(bands, len(places.roles), dtype=torch.int64, device="cpu")
    for boxes, itemsize, pairs in unit:
        away = places.source[pairs.source] != places.target[pairs.target]
        sender, receiver = places.sender[pairs.source[away]], places.receiver[pairs.target[away]]
        box = pairs.box[away]
        lengths = [box.shape[_cut_along(box.shape, bands)] if box.start else 1 for box in boxes]
        sizes = [box.numel // length * itemsize for box, length in zip(boxes, lengths, strict=True)]
        length, size = (torch.tensor(column, dtype=torch.int64, device="cpu") for column in (lengths, sizes))
        for index, load in enumerate(found):
            room = (length * (index + 1) // bands - length * index // bands) * size
            room = ((room + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)[box]
            load.index_add_(0, sender, room).index_add_(0, receiver, room)
    return found


class Rounds:
    """Rounds as they fill: a band goes into the first of the last few in which every place has room for it."""

    def __init__(self, capacity: Tensor) -> None:
        self._capacity = capacity
        self.loads: list[Tensor] = []

    def add(self, loads: Tensor) -> list[int]:
        """Find a round for each band of a unit, by the loads that `cut` gave."""
        found = []
        for load in loads:
            number = 0  # of what is all copied in place, and in no round
            if load.any():
                number = max(0, len(self.loads) - _OPEN)
                while number < len(self.loads) and (self.loads[number] + load > self._capacity).any():
                    number += 1
                if number == len(self.loads):
                    self.loads.append(torch.zeros_like(load))
                self.loads[number] += load
            found.append(number)
        return found
