"""Which boxes of a whole tensor ranks hold on either side of a plan, and how these boxes cut each other.

Tensors of one shape that are split in one way have all of this in common, whatever their names: it is worked out once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from drivetrain_sharding.layout import Box, Layout, Mesh, Parameter, Part, Split, TensorSpec


class Share(NamedTuple):
    """One box of a whole tensor and all ranks that hold just this one, at the same place of the same parameter."""

    box: Box
    at: Box
    ranks: tuple[int, ...]


Shares = tuple[Share, ...]


def shares(layout: Layout) -> dict[str, list[tuple[str, Shares]]]:
    """For each whole tensor the parameters that hold it, with their shares. Parameters of one geometry give the same
    tuple, the object itself."""
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    known: dict[object, list[Shares]] = {}
    members: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    found: dict[str, list[tuple[str, Shares]]] = {spec.name: [] for spec in layout.tensors}
    for parameter in layout.parameters:
        parts = tuple((shapes[part.tensor], part.splits, part.expert) for part in parameter.parts)
        key = (parts, parameter.dim, parameter.experts)
        if key not in known:
            known[key] = _shares(layout.mesh, parameter, [shape for shape, _, _ in parts], members)
        for part, held in zip(parameter.parts, known[key], strict=True):
            found[part.tensor].append((parameter.name, held))
    return found


def _shares(
    mesh: Mesh,
    parameter: Parameter,
    shapes: Sequence[tuple[int, ...]],
    members: dict[tuple[str, ...], list[tuple[int, ...]]],
) -> list[Shares]:
    """The shares of each part of a parameter, from a layout of this parameter alone, on a mesh without the dimensions
    that it is not split over."""
    splits: list[Split] = [split for part in parameter.parts for split in part.splits]
    used = {split.over for split in splits} | ({parameter.experts.over} if parameter.experts else set())
    small = Mesh(tuple(dim for dim in mesh.dims if dim[0] in used))
    names = tuple(name for name, _ in small.dims)
    if names not in members:
        members[names] = _members(mesh, small)
    parts = tuple(
        Part(tensor=str(index), splits=part.splits, expert=part.expert) for index, part in enumerate(parameter.parts)
    )
    alone = Layout(
        mesh=small,
        tensors=tuple(
            TensorSpec(name=str(index), dtype=torch.uint8, shape=shape) for index, shape in enumerate(shapes)
        ),
        parameters=(Parameter(name="", parts=parts, dim=parameter.dim, experts=parameter.experts),),
    )
    found: list[list[Share]] = [[] for _ in parts]
    for rank, ranks in enumerate(members[names]):
        for piece in alone.pieces(rank):
            found[int(piece.tensor)].append(Share(piece.box, piece.at, ranks))
    return [tuple(held) for held in found]


def _members(mesh: Mesh, small: Mesh) -> list[tuple[int, ...]]:
    """For each rank of `small`, the ranks of `mesh` that stand where it stands."""
    found: list[list[int]] = [[] for _ in range(small.size)]
    for rank in range(mesh.size):
        where, index = mesh.coordinates(rank), 0
        for name, size in small.dims:
            index = index * size + where[name]
        found[index].append(rank)
    return [tuple(ranks) for ranks in found]


class Holder(NamedTuple):
    """Where a rank has a box: the number of the parameter among those that hold the tensor, and of its share."""

    parameter: int
    share: int


class Crossing:
    """The boxes of one tensor that can go from one source rank to one target rank in one go: each lies in one share
    of the target, and all source ranks that hold any of it hold all of it."""

    def __init__(self, shape: Sequence[int], source: Sequence[Shares], target: Sequence[Shares]) -> None:
        self.boxes: list[Box] = []
        self.givers: list[dict[int, Holder]] = []
        """By box: the source ranks that hold it."""
        self.takers: list[tuple[int, ...]] = []
        """By box: the target ranks that need it."""
        self.put: list[Holder] = []
        """By box: where they need it."""
        self.unheld: set[int] = set()
        """Target ranks that need elements which no source rank holds."""
        given = disjoint(source)
        holders, cells = list(given.values()), list(given)
        wanted = [(Holder(p, s), share) for p, held in enumerate(target) for s, share in enumerate(held)]
        got = [0] * len(wanted)
        for cell, want, box in _meets(cells, [share.box for _, share in wanted]):
            self.boxes.append(box)
            self.givers.append(holders[cell])
            self.takers.append(wanted[want][1].ranks)
            self.put.append(wanted[want][0])
            got[want] += box.numel
        for (_, share), numel in zip(wanted, got, strict=True):
            if numel < share.box.numel:
                self.unheld.update(share.ranks)
        self.untaken = Box.whole(shape).numel - sum(box.numel for box in disjoint(target))
        """How many elements no target rank holds."""


def disjoint(sides: Sequence[Shares]) -> dict[Box, dict[int, Holder]]:
    """What ranks hold of a tensor, as boxes without common elements: by box, the ranks that hold it and where."""
    held = defaultdict[Box, dict[int, Holder]](dict)
    for parameter, side in enumerate(sides):
        for number, share in enumerate(side):
            for rank in share.ranks:
                held[share.box].setdefault(rank, Holder(parameter, number))
    boxes = list(held)
    if len(_overlaps(boxes, boxes)) == len(boxes):
        return held
    cut = list(_grid(boxes))
    found = defaultdict[Box, dict[int, Holder]](dict)
    for cell, box in _overlaps(cut, boxes):
        for rank, holder in held[boxes[box]].items():
            found[cut[cell]].setdefault(rank, holder)
    return found


def _grid(boxes: Sequence[Box]) -> Iterator[Box]:
    """The cells that the faces of all boxes cut space into."""
    faces = [
        sorted({box.start[dim] for box in boxes} | {box.stop[dim] for box in boxes})
        for dim in range(len(boxes[0].start))
    ]
    for sides in itertools.product(*(itertools.pairwise(ends) for ends in faces)):
        yield Box(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))


def _meets(first: Sequence[Box], second: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """All pairs of boxes with common elements, by their numbers, and these elements."""
    for a, b in _overlaps(first, second):
        box = first[a].meet(second[b])
        assert box is not None
        yield a, b, box


def _overlaps(first: Sequence[Box], second: Sequence[Box]) -> list[list[int]]:
    """The numbers of all pairs of boxes with common elements."""
    if not first or not second:
        return []
    (start, stop), (other_start, other_stop) = _corners(first), _corners(second)
    meet = torch.maximum(start[:, None], other_start) < torch.minimum(stop[:, None], other_stop)
    pairs: list[list[int]] = meet.all(-1).nonzero().tolist()
    return pairs


def _corners(boxes: Sequence[Box]) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([box.start for box in boxes], dtype=torch.int64, device="cpu"),
        torch.tensor([box.stop for box in boxes], dtype=torch.int64, device="cpu"),
    )
