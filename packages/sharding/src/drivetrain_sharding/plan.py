"""From one layout to another: which box goes from which rank to which, and in which round. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_sharding._dealing import Places
from drivetrain_sharding._matching import count_ranks, match
from drivetrain_sharding._rounds import ALIGNMENT
from drivetrain_sharding._ways import Item, Step, Ways
from drivetrain_sharding.layout import Box, Layout


class LayoutMismatch(ValueError):
    """Two layouts that no plan can lead between; `problems` lists everything that is wrong with them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(f"no plan leads from the source's layout to the target's: {'; '.join(problems)}")
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A box of a whole tensor that one source rank gives to one target rank."""

    tensor: str
    """The target layout's name for it."""
    box: Box
    """Of the whole tensor."""
    source: int
    """A rank of the source layout."""
    target: int
    """A rank of the target layout."""
    taken: tuple[str, Box]
    """The source rank's parameter, and the box of it that holds the elements. As with `Piece.at`, it has a first
    dimension of size 1 more than `box` where the parameter stacks experts."""
    put: tuple[str, Box]
    """The target rank's parameter, and the box of it that is to hold them."""
    source_dtype: torch.dtype
    target_dtype: torch.dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """What is sent: the narrower of both dtypes, the target's where they are equally wide."""
        return self.source_dtype if self.source_dtype.itemsize < self.target_dtype.itemsize else self.target_dtype

    @property
    def nbytes(self) -> int:
        """The elements' size as they are sent."""
        return self.box.numel * self.wire_dtype.itemsize

    @property
    def room(self) -> int:
        """What it takes of a bucket: `nbytes` rounded up to 16, so that whatever follows it is aligned."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class Plan:
    """What every rank gives and gets, as `make_plan` found it; a rank's transfers are spelled out when asked for.

    In a round a place (a rank, or all ranks of one name in `places`) sends at most `bucket_bytes` and receives as much,
    counted by `Transfer.room`; where ranks of both layouts are at one place, half of that each way. So two buckets of
    memory let a place pack one round, and unpack another, while a third is under way. What goes from one source rank
    to one target rank in one round is in the same order in `sends` of the one and in `receives` of the other: one
    message. What a target rank finds at its own place is in no round, but in `copies`.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        bucket_bytes: int,
        places: tuple[tuple[str, ...], tuple[str, ...]] | None,
        ways: Ways,
    ) -> None:
        self.source = source
        self.target = target
        self.bucket_bytes = bucket_bytes
        self.places = places
        """The names of the places of source and target ranks; None: each rank is at a place of its own."""
        self._ways = ways

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return len(self._ways.loads)

    def sends(self, rank: int) -> tuple[tuple[Transfer, ...], ...]:
        """For each round, what a source rank sends."""
        _check_rank(rank, self.source, "source")
        return self._in_rounds(self._ways.spell(source=rank))

    def receives(self, rank: int) -> tuple[tuple[Transfer, ...], ...]:
        """For each round, what a target rank receives."""
        _check_rank(rank, self.target, "target")
        return self._in_rounds(self._ways.spell(target=rank))

    def copies(self, rank: int) -> tuple[Transfer, ...]:
        """What a target rank reads from source ranks at its own place, whole boxes; it needs no bucket."""
        _check_rank(rank, self.target, "target")
        return tuple(_transfer(item, step) for _, item, step in self._ways.spell(target=rank, local=True))

    def traffic(self) -> Tensor:
        """Bytes from each source rank (row) to each target rank (column), copies at one place included; int64."""
        return self._ways.traffic()

    @property
    def bytes_moved(self) -> int:
        """Bytes sent by all ranks together; copies at one place are not among them."""
        return int((self.traffic() * ~self._ways.places.same()).sum())

    @property
    def bytes_copied(self) -> int:
        """Bytes that target ranks read at their own places."""
        return int((self.traffic() * self._ways.places.same()).sum())

    @property
    def peak_bytes(self) -> int:
        """The most that buckets take at one place: what it sends in a round and in the next, and what it receives in it
        and in the one before."""
        if not self.rounds:
            return 0
        places, loads = self._ways.places, torch.nn.functional.pad(torch.stack(self._ways.loads), (0, 0, 1, 1))
        sent, received = loads[:, : len(places.senders)], loads[:, len(places.senders) :]
        count = int(torch.cat((places.senders, places.receivers)).max()) + 1
        held = torch.zeros(self.rounds, count, dtype=torch.int64, device="cpu")
        held[:, places.senders] += sent[1:-1] + sent[2:]
        held[:, places.receivers] += received[1:-1] + received[:-2]
        return int(held.max())

    def describe(self) -> str:
        """Bytes by link, rounds, the largest number of messages and the peak of extra memory, in a few lines."""
        places = self._ways.places
        traffic, same, near = self.traffic(), places.same(), places.near()
        moved = traffic * ~same
        sent, received = moved.sum(1), moved.sum(0)
        held = sum(spec.nbytes for spec in self.target.tensors)
        links = f"{_size(moved.sum())} between ranks"
        if self.places is not None:
            links = (
                f"{_size((traffic * same).sum())} copied in place, {_size((moved * near).sum())} within hosts, "
                f"{_size((moved * ~near).sum())} between hosts"
            )
        full = ""
        if self.rounds:
            filled = torch.stack(self._ways.loads) * places.roles / self.bucket_bytes
            full = f", {float(filled.amax(1).mean()):.0%} full"
        ranks = f"from {self.source.mesh.size} ranks to {self.target.mesh.size}"
        lines = (
            f"{len(self.target.tensors)} tensors, {_size(held)}, {ranks}",
            f"bytes: {links}",
            f"a source rank sends {_size(sent.max())} at most, {_size(sent.sum() // len(sent))} on average",
            f"a target rank gets {_size(received.max())} at most, {_size(received.sum() // len(received))} on average",
            f"{self.rounds} rounds of {_size(self.bucket_bytes)} at most{full}",
            f"a rank has {self._ways.most_messages()} messages in a round at most",
            f"peak extra memory: {_size(self.peak_bytes)} on a rank",
        )
        return "\n".join(lines)

    def _in_rounds(self, steps: Iterable[tuple[int, Item, Step]]) -> tuple[tuple[Transfer, ...], ...]:
        found: list[list[Transfer]] = [[] for _ in range(self.rounds)]
        for number, item, step in steps:
            found[number].append(_transfer(item, step))
        return tuple(map(tuple, found))


def make_plan(
    source: Layout,
    target: Layout,
    *,
    bucket_bytes: int = 256 << 20,
    places: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Plan:
    """Find how the target's ranks get what they hold from the source's.

    A target rank receives every element of its parameters once, padding not at all. Where several source ranks hold an
    element, it comes from the closest one, and from the one with the least to send among the equally close.

    Args:
        source: The layout of those who have the tensors. Its ranks and those of the target count from 0 each.
        target: The layout of those who are to get them. Ties are names for the same tensor on both sides.
        bucket_bytes: The most that a place sends in a round, and that it receives; half of it where it does both.
            Larger tensors are cut into bands.
        places: Where the source's and the target's ranks are, by rank: names whose components are separated by `/`,
            outer ones first (`host0/gpu1`). The closest rank is the one that shares the most components. Ranks of one
            and the same name can read each other's memory: one process, or one device and CUDA IPC. None: every rank
            is at a place of its own, and all are equally far.

    Raises:
        LayoutMismatch: names or ties on one side only, shapes that differ, dtypes that differ and are not floating
            point, elements that no source rank or no target rank holds, ranks without a place.
        ValueError: the bucket is too small to hold the finest cut.
    """
    names = None if places is None else (tuple(places[0]), tuple(places[1]))
    if bucket_bytes < 2 * ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes}: use {2 * ALIGNMENT} or more")
    missing = [*count_ranks(source, names and names[0], "source"), *count_ranks(target, names and names[1], "target")]
    if missing:
        raise LayoutMismatch(missing)
    matched, problems = match(source, target)
    ways = Ways(source, target, matched, Places(names, source.mesh.size, target.mesh.size))
    if problems := problems + ways.problems:
        raise LayoutMismatch(problems)
    ways.schedule(bucket_bytes)
    return Plan(source, target, bucket_bytes, names, ways)


def _transfer(item: Item, step: Step) -> Transfer:
    return Transfer(
        tensor=item.match.target.name,
        box=step.box,
        source=step.source,
        target=step.target,
        taken=(item.source[step.taken[0]][0], step.taken[1]),
        put=(item.target[step.put[0]][0], step.put[1]),
        source_dtype=item.match.source.dtype,
        target_dtype=item.match.target.dtype,
    )


def _check_rank(rank: int, layout: Layout, side: str) -> None:
    if not 0 <= rank < layout.mesh.size:
        raise ValueError(f"rank {rank}: the {side}'s ranks are 0 to {layout.mesh.size - 1}")


def _size(count: int | Tensor) -> str:
    """Bytes for a reader: `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
