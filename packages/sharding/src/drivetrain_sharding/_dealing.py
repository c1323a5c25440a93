"""Who gives what to whom: of the source ranks that hold a box, the closest, and of those the one with least to send."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_sharding._geometry import Crossing


class Places:
    """Where ranks are: names with a `/` between components, outer ones first. One name is one memory."""

    def __init__(self, names: tuple[Sequence[str], Sequence[str]] | None, sources: int, targets: int) -> None:
        self._names = None
        numbers = [list(range(sources)), list(range(sources, sources + targets))]
        if names is not None:
            self._names = tuple([tuple(name.split("/")) for name in side] for side in names)
            known: dict[str, int] = {}
            numbers = [[known.setdefault(name, len(known)) for name in side] for side in names]
        self.source = torch.tensor(numbers[0], dtype=torch.int64, device="cpu")
        """By source rank, the number of its place."""
        self.target = torch.tensor(numbers[1], dtype=torch.int64, device="cpu")
        self.senders, self.sender = torch.unique(self.source, return_inverse=True)
        """The numbers of the places that send; by source rank, which of them is its own."""
        self.receivers, receiver = torch.unique(self.target, return_inverse=True)
        self.receiver = receiver + len(self.senders)
        """By target rank, which of the places that receive is its own, counted on from those that send."""
        both = torch.cat((torch.isin(self.senders, self.receivers), torch.isin(self.receivers, self.senders)))
        self.roles = both.to(torch.int64) + 1
        """In this count: 2 at places that send and receive, which divide a bucket between both; else 1."""

    @property
    def known(self) -> bool:
        """Whether there are names: otherwise, all ranks are equally far."""
        return self._names is not None

    def same(self) -> Tensor:
        """Whether a source rank (row) and a target rank (column) are at one place."""
        return self.source[:, None] == self.target

    def near(self) -> Tensor:
        """Whether the first component of their places is one."""
        if self._names is None:
            return self.same()
        known: dict[str, int] = {}
        first, second = (
            torch.tensor([known.setdefault(name[0], len(known)) for name in side], dtype=torch.int64, device="cpu")
            for side in self._names
        )
        return first[:, None] == second

    def common(self, source: int, target: int) -> int:
        """How many components the places of two ranks share, and one more if it is one place."""
        if self._names is None:
            return 0
        first, second = self._names[0][source], self._names[1][target]
        if first == second:
            return len(first) + 1
        for count, (a, b) in enumerate(zip(first, second, strict=False)):
            if a != b:
                return count
        return min(len(first), len(second))


class Pairs(NamedTuple):
    """Each way of a box, as three columns: by whom, to whom, the number of the box in its `Crossing`."""

    source: Tensor
    target: Tensor
    box: Tensor


class Dealer:
    """Chooses source ranks, and remembers what it has given them to send."""

    def __init__(self, places: Places, sources: int) -> None:
        self._places = places
        self._source, self._target = places.source.tolist(), places.target.tolist()
        self._sent = [0] * sources
        self._nearest: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def deal(self, crossing: Crossing, weight: int) -> Pairs:
        """Choose a source for each box and each target that needs it. `weight`: what an element that leaves its place
        adds to the load of who sends it."""
        source: list[int] = []
        target: list[int] = []
        number: list[int] = []
        open_: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # by candidates: which ways are theirs
        for index, (box, givers, takers) in enumerate(
            zip(crossing.boxes, crossing.givers, crossing.takers, strict=True)
        ):
            first, holders = len(source), tuple(givers)
            source += holders[:1] * len(takers)
            target += takers
            number += [index] * len(takers)
            if len(holders) == 1:
                here = self._source[holders[0]]
                away = sum(self._target[taker] != here for taker in takers)
                self._sent[holders[0]] += weight * box.numel * away
            elif not self._places.known:
                open_[holders] += range(first, len(source))
            else:
                for way, taker in enumerate(takers, first):
                    candidates = self._closest(holders, taker)
                    source[way] = candidates[0]
                    if self._source[candidates[0]] != self._target[taker]:
                        open_[candidates].append(way)
        for candidates in sorted(open_, key=lambda ranks: (len(ranks), ranks)):  # the least choice first
            loads = [(self._sent[rank], rank) for rank in candidates]
            heapq.heapify(loads)
            for way in open_[candidates]:
                load, rank = loads[0]
                heapq.heapreplace(loads, (load + weight * crossing.boxes[number[way]].numel, rank))
                source[way] = rank
            for load, rank in loads:
                self._sent[rank] = load
        return Pairs(*(torch.tensor(column, dtype=torch.int64, device="cpu") for column in (source, target, number)))

    def _closest(self, holders: tuple[int, ...], target: int) -> tuple[int, ...]:
        key = (holders, target)
        if key not in self._nearest:
            common = [self._places.common(holder, target) for holder in holders]
            best = max(common)
            self._nearest[key] = tuple(holder for holder, shared in zip(holders, common, strict=True) if shared == best)
        return self._nearest[key]
