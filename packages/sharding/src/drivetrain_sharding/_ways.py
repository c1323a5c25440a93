"""The ways of all boxes of a model, worked out once for all tensors of one geometry, and spelled out rank by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_sharding._dealing import Dealer, Pairs, Places
from drivetrain_sharding._geometry import Crossing, Share, Shares, shares
from drivetrain_sharding._matching import Match
from drivetrain_sharding._rounds import Member, Rounds, band, cut
from drivetrain_sharding.layout import Box, Layout


class Step(NamedTuple):
    """One transfer of every tensor of one geometry; `taken` and `put` have the number of the parameter."""

    band: int
    source: int
    target: int
    box: Box
    taken: tuple[int, Box]
    put: tuple[int, Box]


class Kind(NamedTuple):
    """What tensors have in common whose shapes, dtypes, boxes and holders are the same."""

    crossing: Crossing
    itemsize: int
    """Of an element as it is sent."""
    ways: Sequence[Pairs]
    """Where copies leave a choice, tensors take turns at several choices."""


class Item(NamedTuple):
    """One tensor: who holds it, its kind, and which of the kind's ways it goes."""

    match: Match
    source: Sequence[tuple[str, Shares]]
    target: Sequence[tuple[str, Shares]]
    kind: Kind
    way: int

    @property
    def pairs(self) -> Pairs:
        return self.kind.ways[self.way]


class Ways:
    """The way of every tensor of a match. `problems` says which elements nobody holds; if there are none, `schedule`
    comes before anything else."""

    def __init__(self, source: Layout, target: Layout, matched: Sequence[Match], places: Places) -> None:
        self.places = places
        self.problems: list[str] = []
        self.loads: list[Tensor] = []
        """By round: the loads, see `_rounds`."""
        self._rounds: list[list[int]] = [[] for _ in matched]
        """By tensor: the rounds of its bands."""
        given, wanted = shares(source), shares(target)
        sides = [(given[mine.name], wanted[theirs.name]) for mine, theirs in matched]
        number = _Numbers()
        alike = defaultdict[object, list[int]](list)
        for index, (mine, theirs) in enumerate(matched):
            boxes = tuple(tuple(number(held) for _, held in side) for side in sides[index])
            alike[mine.shape, mine.dtype, theirs.dtype, boxes].append(index)
        dealer = Dealer(places, source.mesh.size)
        items: dict[int, Item] = {}
        for indices in alike.values():
            kind = self._kind([matched[index] for index in indices], *sides[indices[0]], dealer)
            for turn, index in enumerate(indices):
                items[index] = Item(matched[index], *sides[index], kind, turn % len(kind.ways))
        self.items = [items[index] for index in range(len(matched))]

    def _kind(
        self,
        matched: Sequence[Match],
        source: Sequence[tuple[str, Shares]],
        target: Sequence[tuple[str, Shares]],
        dealer: Dealer,
    ) -> Kind:
        given, wanted = matched[0]
        crossing = Crossing(given.shape, [held for _, held in source], [held for _, held in target])
        names = ", ".join(match.target.name for match in matched)
        if crossing.unheld:
            self.problems.append(
                f"no source rank holds all of {names} that target ranks {sorted(crossing.unheld)} need"
            )
        if crossing.untaken:
            self.problems.append(f"no target rank holds {crossing.untaken} elements of {names}")
        itemsize = min(given.dtype.itemsize, wanted.dtype.itemsize)
        turns = min(len(matched), max(map(len, crossing.givers), default=1))
        ways = [dealer.deal(crossing, itemsize * len(matched[turn::turns])) for turn in range(turns)]
        return Kind(crossing, itemsize, ways)

    def schedule(self, bucket_bytes: int) -> None:
        """Find a round for each band of each tensor. Tensors that share a parameter on either side are cut and go
        together: what stacked experts load ranks with evens out only over all of them.

        Raises:
            ValueError: the bucket is too small.
        """
        capacity = bucket_bytes // self.places.roles
        rounds = Rounds(capacity)
        known: dict[object, Tensor] = {}
        for unit in self._units():
            items = [self.items[index] for index in unit]
            key = tuple((id(item.kind), item.way) for item in items)
            if key not in known:
                members = [Member(item.kind.crossing.boxes, item.kind.itemsize, item.pairs) for item in items]
                try:
                    known[key] = cut(members, self.places, capacity)
                except ValueError as error:
                    name = items[0].match.target.name
                    raise ValueError(f"bucket_bytes={bucket_bytes} is too small for {name}: {error}") from None
            numbers = rounds.add(known[key])
            for index in unit:
                self._rounds[index] = numbers
        self.loads = rounds.loads

    def _units(self) -> list[list[int]]:
        """The tensors, by number, in groups that share parameters."""
        leader = list(range(len(self.items)))

        def find(index: int) -> int:
            while leader[index] != index:
                leader[index] = leader[leader[index]]
                index = leader[index]
            return index

        first: dict[tuple[int, str], int] = {}
        for index, item in enumerate(self.items):
            for side, held in enumerate((item.source, item.target)):
                for parameter, _ in held:
                    low, high = sorted((find(first.setdefault((side, parameter), index)), find(index)))
                    leader[high] = low
        units = defaultdict[int, list[int]](list)
        for index in range(len(self.items)):
            units[find(index)].append(index)
        return list(units.values())

    def spell(
        self, *, source: int | None = None, target: int | None = None, local: bool = False
    ) -> Iterator[tuple[int, Item, Step]]:
        """What a rank gives or gets: round, tensor and step; if `local`, between ranks at one place, else the rest."""
        known: dict[object, list[Step]] = {}
        for item, rounds in zip(self.items, self._rounds, strict=True):
            bands = 1 if local else len(rounds)
            where = tuple(id(held) for side in (item.source, item.target) for _, held in side)
            key = (id(item.kind), item.way, bands, len(item.source), where)
            if key not in known:
                pairs = item.pairs
                chosen = (self.places.source[pairs.source] == self.places.target[pairs.target]) == local
                if source is not None:
                    chosen &= pairs.source == source
                if target is not None:
                    chosen &= pairs.target == target
                known[key] = list(_steps(item, Pairs(*(column[chosen] for column in pairs)), bands))
            for step in known[key]:
                yield rounds[step.band], item, step

    def traffic(self) -> Tensor:
        """Bytes from each source rank to each target rank."""
        found = torch.zeros(len(self.places.source), len(self.places.target), dtype=torch.int64, device="cpu")
        alike = defaultdict[tuple[int, int], list[Item]](list)
        for item in self.items:
            alike[id(item.kind), item.way].append(item)
        for items in alike.values():
            kind, pairs = items[0].kind, items[0].pairs
            sizes = [box.numel * kind.itemsize * len(items) for box in kind.crossing.boxes]
            size = torch.tensor(sizes, dtype=torch.int64, device="cpu")
            found.index_put_((pairs.source, pairs.target), size[pairs.box], accumulate=True)
        return found

    def most_messages(self) -> int:
        """The largest number of peers that a rank has in a round, those at its own place not counted."""
        known: dict[object, Item] = {}
        rounds = defaultdict[int, set[tuple[int, int, int, int]]](set)
        for item, numbers in zip(self.items, self._rounds, strict=True):
            for index, number in enumerate(numbers):
                key = (id(item.kind), item.way, len(numbers), index)
                known[key] = item
                rounds[number].add(key)
        most = 0
        for parts in set(map(frozenset, rounds.values())):  # many rounds are alike
            peers = torch.zeros(len(self.places.source), len(self.places.target), dtype=torch.bool, device="cpu")
            for key in parts:
                pairs = known[key].pairs
                there = [band(box, *key[2:]) is not None for box in known[key].kind.crossing.boxes]
                chosen = torch.tensor(there, dtype=torch.bool, device="cpu")[pairs.box]
                peers[pairs.source[chosen], pairs.target[chosen]] = True
            peers &= ~self.places.same()
            most = max(most, int(peers.sum(0).max()), int(peers.sum(1).max()))
        return most


def _steps(item: Item, pairs: Pairs, bands: int) -> Iterator[Step]:
    """These of the tensor's ways, cut into bands."""
    crossing = item.kind.crossing
    for source, target, number in torch.stack(pairs, 1).tolist():
        taken, put = crossing.givers[number][source], crossing.put[number]
        given, wanted = item.source[taken.parameter][1][taken.share], item.target[put.parameter][1][put.share]
        for index in range(bands):
            if box := band(crossing.boxes[number], bands, index):
                yield Step(
                    index, source, target, box, (taken.parameter, _at(box, given)), (put.parameter, _at(box, wanted))
                )


class _Numbers:
    """Gives shares with equal boxes and ranks one number, wherever in their parameters they lie."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._numbers: dict[object, int] = {}

    def __call__(self, held: Shares) -> int:
        if id(held) not in self._by_id:
            key = tuple((share.box, share.ranks) for share in held)
            self._by_id[id(held)] = self._numbers.setdefault(key, len(self._numbers))
        return self._by_id[id(held)]


def _at(box: Box, share: Share) -> Box:
    """Where a box lies in the parameter that has a share which contains it."""
    lead = len(share.at.start) - len(share.box.start)
    by = [at - start for at, start in zip(share.at.start[lead:], share.box.start, strict=True)]
    moved = box.moved(by)
    return Box(share.at.start[:lead] + moved.start, share.at.stop[:lead] + moved.stop)
