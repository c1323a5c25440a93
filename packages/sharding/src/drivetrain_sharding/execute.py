"""Carrying a plan out: over any transport that sends and receives flat tensors, or by reading the source's memory.

    source rank   parameters ──cast──► bucket A | bucket B ──┐
                                                             │  a message for each pair of ranks and round
    target rank   parameters ◄──cast── bucket A | bucket B ◄─┘

While round r is under way, a source packs round r + 1 and a target has unpacked round r - 1. Everything that can be
checked is checked on every rank before the first byte moves. What happens later is an error on every rank that takes
part in the round, and leaves the target's parameters partly written: whoever serves from them must not, until the
digest of a whole update has proved them (`drivetrain_sharding.digest`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain_sharding.exchange import Exchange, Message
from drivetrain_sharding.plan import Plan, Transfer

Parameters = Mapping[str, Tensor]
"""By name, as they lie on a rank (`local_parameters`)."""


class TransferFailed(RuntimeError):
    """A round of an update was not completed: the target's parameters are of no version."""


class Executor:
    """One rank's part in a plan; run it for every update.

    It keeps its buckets, two for each direction and no larger than the plan's rounds, until `release`.

    Args:
        plan: the same on all ranks.
        exchange: moves messages.
        source_rank, target_rank: which ranks of the two layouts this process is: one of them or both.
        memory: gives the parameters of another source rank at this place, for `plan.copies`; needed where source ranks
            of other processes share the place (CUDA IPC, shared memory).
        device: where the buckets lie; None: with the parameters. A CPU takes messages for a transport that does not
            read a GPU's memory.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: Exchange,
        *,
        source_rank: int | None = None,
        target_rank: int | None = None,
        memory: Callable[[int], Parameters] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if source_rank is None and target_rank is None:
            raise ValueError("this process takes no part: give source_rank, target_rank or both")
        self._plan, self._exchange, self._memory = plan, exchange, memory
        self._source, self._target = source_rank, target_rank
        self._device = None if device is None else torch.device(device)
        self._sends = [] if source_rank is None else [_Round.of(some, "target") for some in plan.sends(source_rank)]
        self._receives = (
            [] if target_rank is None else [_Round.of(some, "source") for some in plan.receives(target_rank)]
        )
        self._copies = () if target_rank is None else plan.copies(target_rank)
        self._out: _Side | None = None
        self._into: _Side | None = None

    def run(self, source: Parameters | None = None, target: Parameters | None = None) -> None:
        """Send this rank's share of an update, and fill this rank's parameters with it.

        The source's parameters must keep their values until it returns. On a GPU, work is queued on the current
        stream, which is waited for only where messages lie on the CPU.

        Args:
            source: what this process holds as a source rank; None if it is none.
            target: likewise as a target rank. Written in place.

        Raises:
            ValueError: parameters are missing, unknown or of another shape or dtype than in the layout, here or on
                another rank. Nothing was sent.
            TransferFailed: a round broke off, or its deadline passed; names the round, its tensors and the ranks.
        """
        problems = self._problems(source, target)
        if not self._exchange.agree(not problems):
            here = "; ".join(problems) or "this rank is ready, but another one is not"
            raise ValueError(f"the update cannot start, and nothing was sent: {here}")
        self._out = self._side(self._out, self._sends, source)
        self._into = self._side(self._into, self._receives, target)
        if target is not None:
            _copy(*_views(self._copies, self._read(source), target))
        wait: Callable[[], None] | None = None
        for number in range(self._plan.rounds):
            sends = [] if self._out is None else self._out.pack(number)
            receives = [] if self._into is None else self._into.messages(number)
            following = self._step(number, functools.partial(self._start, sends, receives))
            if wait is not None:
                self._finish(number - 1, wait)
            wait = following
        if wait is not None:
            self._finish(self._plan.rounds - 1, wait)

    def release(self) -> None:
        """Give the buckets' memory back; the next run takes it again."""
        self._out = self._into = None

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        if not sends and not receives:
            return _nothing
        return self._exchange.start(sends, receives)

    def _finish(self, number: int, wait: Callable[[], None]) -> None:
        self._step(number, wait)
        if self._into is not None:
            self._into.unpack(number)

    def _step(self, number: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            some = (self._sends[number].transfers if self._sends else ()) + (
                self._receives[number].transfers if self._receives else ()
            )
            names = sorted({transfer.tensor for transfer in some})
            ends = sorted({f"{transfer.source} > {transfer.target}" for transfer in some})
            what = f"round {number + 1} of {self._plan.rounds} ({_few(names)}; ranks {_few(ends)})"
            raise TransferFailed(f"{what} was not completed: {error}") from error

    def _problems(self, source: Parameters | None, target: Parameters | None) -> list[str]:
        found: list[str] = []
        for side, rank, layout, held in (
            ("source", self._source, self._plan.source, source),
            ("target", self._target, self._plan.target, target),
        ):
            if (rank is None) != (held is None):
                found.append(
                    f"{side} parameters are {'missing' if held is None else 'given, and this is no such rank'}"
                )
            elif rank is not None and held is not None:
                found += layout.misfits(rank, held, strict=side == "target")
        return found

    def _read(self, source: Parameters | None) -> Callable[[int], Parameters]:
        def read(rank: int) -> Parameters:
            if rank == self._source and source is not None:
                return source
            if self._memory is None:
                raise ValueError(f"source rank {rank} is at this place, in another process: pass memory to read it by")
            return self._memory(rank)

        return read

    def _side(self, known: _Side | None, rounds: list[_Round], held: Parameters | None) -> _Side | None:
        if held is None:
            return None
        key = _identity(held)
        if known is not None and known.key == key:
            return known
        device = self._device or next((tensor.device for tensor in held.values()), torch.device("cpu"))
        return _Side(key, rounds, held, device)


class Pull:
    """What one target rank reads from the memory of source ranks: a process's own, CUDA IPC, shared memory.

    No bucket and no message: each box is cast and copied from where it lies to where it is to be.

    Args:
        plan: its places do not matter here.
        target_rank: of the target layout.
    """

    def __init__(self, plan: Plan, target_rank: int) -> None:
        self._plan, self._rank = plan, target_rank
        merged = itertools.chain(plan.copies(target_rank), *plan.receives(target_rank))
        self._transfers = tuple(merged)
        self._key: object = None
        self._views: tuple[list[Tensor], list[Tensor]] = ([], [])

    def prepare(self, sources: Callable[[int], Parameters], parameters: Parameters) -> None:
        """Check that all can be read and written. Nothing is changed.

        Args:
            sources: gives the parameters of a source rank, as they lie there.
            parameters: this target rank's.

        Raises:
            ValueError: parameters are missing, unknown or of another shape or dtype than in the layouts.
        """
        ranks = sorted({transfer.source for transfer in self._transfers})
        held = {rank: sources(rank) for rank in ranks}
        key = (_identity(parameters), {rank: _identity(some) for rank, some in held.items()})
        if key == self._key:
            return
        problems = self._plan.target.misfits(self._rank, parameters, strict=True)
        for rank in ranks:
            problems += self._plan.source.misfits(rank, held[rank])
        if problems:
            raise ValueError(f"the update cannot be read: {'; '.join(problems)}")
        self._views = _views(self._transfers, held.__getitem__, parameters)
        self._key = key

    def run(self, sources: Callable[[int], Parameters], parameters: Parameters) -> None:
        """Fill the parameters; `prepare` first where that was not done for these. On a GPU it does not wait."""
        self.prepare(sources, parameters)
        _copy(*self._views)


def pull(plan: Plan, target_rank: int, sources: Callable[[int], Parameters], parameters: Parameters) -> None:
    """`Pull.run`, once."""
    Pull(plan, target_rank).run(sources, parameters)


@dataclass(frozen=True, slots=True)
class _Round:
    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    """Of each transfer in the bucket."""
    messages: tuple[tuple[int, int, int], ...]
    """The other side's rank, and from where to where its message lies in the bucket."""

    @classmethod
    def of(cls, transfers: Sequence[Transfer], other: str) -> _Round:
        by_peer: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            by_peer.setdefault(getattr(transfer, other), []).append(transfer)
        ordered, offsets, messages, end = list[Transfer](), list[int](), list[tuple[int, int, int]](), 0
        for peer in sorted(by_peer):
            start = end
            for transfer in by_peer[peer]:
                ordered.append(transfer)
                offsets.append(end)
                end += transfer.room
            messages.append((peer, start, end))
        return cls(tuple(ordered), tuple(offsets), tuple(messages))

    @property
    def size(self) -> int:
        return self.messages[-1][2] if self.messages else 0


class _Side:
    """One direction of an executor: two buckets, and the views that are copied from and to at each round."""

    def __init__(self, key: object, rounds: list[_Round], held: Parameters, device: torch.device) -> None:
        self.key = key
        self._rounds, self._held, self._device = rounds, held, device
        size = max((some.size for some in rounds), default=0)
        pinned = device.type == "cpu" and any(tensor.device.type != "cpu" for tensor in held.values())
        self._buckets = [
            torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(min(2, len(rounds)))
        ]
        self._waits = pinned
        self._known: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def messages(self, number: int) -> list[Message]:
        bucket = self._buckets[number % 2]
        return [(peer, bucket[start:stop]) for peer, start, stop in self._rounds[number].messages]

    def pack(self, number: int) -> list[Message]:
        """Fill the round's bucket from the parameters; its messages."""
        slots, boxes = self._pairs("taken", number)
        _copy(slots, boxes)
        if self._waits and slots:
            torch.accelerator.synchronize()
        return self.messages(number)

    def unpack(self, number: int) -> None:
        """Fill the parameters from the round's bucket."""
        slots, boxes = self._pairs("put", number)
        _copy(boxes, slots)
        if self._waits and slots:
            torch.accelerator.synchronize()  # the bucket is filled again by the next round but one

    def _pairs(self, end: str, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Slots of the bucket, and the boxes of parameters that belong there."""
        if number not in self._known:
            some, bucket = self._rounds[number], self._buckets[number % 2]
            slots, boxes = list[Tensor](), list[Tensor]()
            for transfer, offset in zip(some.transfers, some.offsets, strict=True):
                name, box = getattr(transfer, end)
                slots.append(bucket[offset : offset + transfer.nbytes].view(transfer.wire_dtype).view(box.shape))
                boxes.append(box.of(self._held[name]))
            self._known[number] = slots, boxes
        return self._known[number]


def _views(
    transfers: Sequence[Transfer], sources: Callable[[int], Parameters], target: Parameters
) -> tuple[list[Tensor], list[Tensor]]:
    into = [transfer.put[1].of(target[transfer.put[0]]) for transfer in transfers]
    taken = [transfer.taken[1].of(sources(transfer.source)[transfer.taken[0]]) for transfer in transfers]
    return into, [
        one.view(other.shape) if one.shape != other.shape else one for one, other in zip(taken, into, strict=True)
    ]


def _copy(into: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
    """Copy all boxes: as few launches as their dtypes and strides allow."""
    with torch.no_grad():
        kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for one, other in zip(into, taken, strict=True):
            some = kinds.setdefault((one.dtype, other.dtype), ([], []))
            some[0].append(one)
            some[1].append(other)
        for to, source in kinds.values():
            torch._foreach_copy_(to, source, non_blocking=True)


def _identity(parameters: Parameters) -> object:
    return [(name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in parameters.items()]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _nothing() -> None:
    pass
