"""Carrying a plan out: over any transport that sends and receives flat tensors, or by reading the source's memory.

    source rank   parameters ──cast──► bucket A | bucket B ──┐
                                                             │  a message for each pair of ranks and round
    target rank   parameters ◄──cast── bucket A | bucket B ◄─┘

While round r is under way, a source packs round r + 1 and a target has unpacked round r - 1. Everything that can be
checked is checked on every rank before the first byte moves, and at the end all ranks wait for each other: one that
returns knows that all have sent and received everything. What goes wrong in between is an error on every rank, and
leaves the target's parameters partly written: whoever serves from them must not, until the digest of a whole update has
proved them (`drivetrain_sharding.digest`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from drivetrain_sharding._buckets import Buckets, Round
from drivetrain_sharding._copies import Parameters, Reader, identity
from drivetrain_sharding.exchange import Exchange
from drivetrain_sharding.layout import Layout
from drivetrain_sharding.plan import Plan, Transfer


class TransferFailed(RuntimeError):
    """An update was not completed: parameters of target ranks are of no version."""


class Executor:
    """One rank's part in a plan; run it for every update.

    It keeps its buckets, two for each direction and no larger than the plan's rounds, and views of the parameters,
    until `release`.

    Args:
        plan: the same on all ranks.
        exchange: moves messages.
        source_rank, target_rank: which ranks of the two layouts this process is: one of them or both.
        memory: gives the parameters of another source rank at this place, for `plan.copies`; needed where source ranks
            of other processes share the place (CUDA IPC, shared memory).
        device: where the buckets lie; None: with the parameters. A CPU takes messages for a transport that does not
            read a GPU's memory.

    Raises:
        ValueError: no rank is given; or both are, and the plan does not have them at one place.
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
        if source_rank is not None and target_rank is not None:
            places = plan.places
            if places is None or places[0][source_rank] != places[1][target_rank]:
                raise ValueError(
                    f"this process is source rank {source_rank} and target rank {target_rank}, and the plan has them "
                    "at two places: give make_plan places in which both have the same name"
                )
        self._plan, self._exchange, self._memory = plan, exchange, memory
        self._source, self._target = source_rank, target_rank
        where = None if device is None else torch.device(device)
        self._out = self._into = None
        self._copies: Reader | None = None
        if source_rank is not None:
            sends = [Round(some, "target") for some in plan.sends(source_rank)]
            self._out = _Side(plan.source, source_rank, sends, "taken", where)
        if target_rank is not None:
            receives = [Round(some, "source") for some in plan.receives(target_rank)]
            self._into = _Side(plan.target, target_rank, receives, "put", where)
            self._copies = Reader(plan, target_rank, plan.copies(target_rank))

    def run(self, source: Parameters | None = None, target: Parameters | None = None) -> None:
        """Send this rank's share of an update, and fill this rank's parameters with it.

        It returns when all ranks have, and the source's parameters must keep their values until then. On a GPU, work
        is queued on the current stream; for the sake of which the host waits once in a round at most, and once more
        before and after all of them where places are shared.

        Args:
            source: what this process holds as a source rank; None if it is none.
            target: likewise as a target rank. Written in place.

        Raises:
            ValueError: parameters are missing, unknown or of another shape or dtype than in the layout, here or on
                another rank. Nothing was sent. The executor can be run again.
            TransferFailed: a round broke off, or its deadline passed, or not all ranks came or got to the end; names
                the step, its tensors and the ranks. The exchange may not be able to go on.
        """
        self._begin(source, target)
        wait: Callable[[], None] | None = None
        for number in range(self._plan.rounds):
            following = self._start(number)
            if wait is not None:
                self._finish(number - 1, wait)
            wait = following
        if wait is not None:
            self._finish(self._plan.rounds - 1, wait)
        self._end(source, target)

    def release(self) -> None:
        """Give the buckets' memory back, and let go of the parameters; the next run takes them again."""
        for part in (self._out, self._into, self._copies):
            if part is not None:
                part.release()

    def _begin(self, source: Parameters | None, target: Parameters | None) -> None:
        try:
            problems = self._prepare(source, target)
            self._settle(source, target)
        except BaseException:
            self._exchange.agree(False)
            raise
        with self._named("the start of the update", self._transfers()):
            agreed = self._exchange.agree(not problems)
        if not agreed:
            here = "; ".join(problems) or "this rank is ready, but another one is not"
            raise ValueError(f"the update cannot start, and nothing was sent: {here}")
        if self._copies is not None:
            with self._named("copying what is at this place", self._copies.transfers):
                self._copies.run()

    def _start(self, number: int) -> Callable[[], None]:
        with self._named(self._round(number), self._transfers(number)):
            sends = [] if self._out is None else self._out.buckets.packed(number)
            receives = [] if self._into is None else self._into.buckets.messages(number)
            return self._exchange.start(sends, receives) if sends or receives else _nothing

    def _finish(self, number: int, wait: Callable[[], None]) -> None:
        with self._named(self._round(number), self._transfers(number)):
            wait()
            if self._into is not None:
                self._into.buckets.unpack(number)

    def _end(self, source: Parameters | None, target: Parameters | None) -> None:
        with self._named("the end of the update, when this rank was through with it", self._transfers()):
            self._settle(source, target)
            if not self._exchange.agree(True):
                raise RuntimeError("another rank is not through")

    def _prepare(self, source: Parameters | None, target: Parameters | None) -> list[str]:
        """Whatever is wrong with the parameters; if nothing is, all is ready to be sent, received and copied."""
        found: list[str] = []
        for side, part, held in (("source", self._out, source), ("target", self._into, target)):
            if part is not None and held is not None:
                found += part.prepare(held)
            elif part is not None:
                found.append(f"{side} parameters are missing")
            elif held is not None:
                found.append(f"{side} parameters are given, and this is no {side} rank")
        if self._copies is not None and target is not None and not found:
            found += self._copies.prepare(lambda rank: self._read(rank, source), target)
        return found

    def _read(self, rank: int, source: Parameters | None) -> Parameters:
        if rank == self._source and source is not None:
            return source
        if self._memory is None:
            raise ValueError(f"source rank {rank} is at this place, in another process: pass memory to read it by")
        return self._memory(rank)

    def _settle(self, *sides: Parameters | None) -> None:
        """Wait for what is queued, where other processes read this one's parameters or are read by it."""
        if self._plan.places is not None:
            for device in {tensor.device for held in sides if held is not None for tensor in held.values()}:
                _wait_for(device)

    def _round(self, number: int) -> str:
        return f"round {number + 1} of {self._plan.rounds}"

    def _transfers(self, number: int | None = None) -> Iterator[Transfer]:
        """This rank's, of one round or of all; without what it copies."""
        for part in (self._out, self._into):
            if part is not None:
                for some in part.rounds if number is None else part.rounds[number : number + 1]:
                    yield from some.transfers

    @contextmanager
    def _named(self, what: str, transfers: Iterable[Transfer]) -> Iterator[None]:
        """Says in an error what was going on. The buckets are given up: a message may still be on its way to them."""
        try:
            yield
        except Exception as error:
            some = list(transfers)
            names = sorted({transfer.tensor for transfer in some})
            ends = sorted({(transfer.source, transfer.target) for transfer in some})
            ranks = [f"{source} > {target}" for source, target in ends]
            self.release()
            raise TransferFailed(f"{what} ({_few(names)}; ranks {_few(ranks)}) failed: {error}") from error


class Pull:
    """What one target rank reads from the memory of source ranks: a process's own, CUDA IPC, shared memory.

    No bucket and no message: each box is cast and copied from where it lies to where it is to be. It keeps views of
    the parameters that it was run or prepared with last.

    Args:
        plan: its places do not matter here.
        target_rank: of the target layout.
    """

    def __init__(self, plan: Plan, target_rank: int) -> None:
        received = itertools.chain.from_iterable(plan.receives(target_rank))
        self._reader = Reader(plan, target_rank, (*plan.copies(target_rank), *received))

    def prepare(self, sources: Callable[[int], Parameters], parameters: Parameters) -> Callable[[], None]:
        """Check that all can be read and written. Nothing is changed.

        Args:
            sources: gives the parameters of a source rank, as they lie there.
            parameters: this target rank's.

        Returns:
            what fills the parameters; on a GPU it does not wait. Call it before anything else is prepared.

        Raises:
            ValueError: parameters are missing, unknown or of another shape or dtype than in the layouts.
        """
        if problems := self._reader.prepare(sources, parameters):
            raise ValueError(f"the update cannot be read: {'; '.join(problems)}")
        return self._reader.run

    def run(self, sources: Callable[[int], Parameters], parameters: Parameters) -> None:
        """`prepare`, and what that returns."""
        self.prepare(sources, parameters)()


def pull(plan: Plan, target_rank: int, sources: Callable[[int], Parameters], parameters: Parameters) -> None:
    """`Pull.run`, once."""
    Pull(plan, target_rank).run(sources, parameters)


class _Side:
    """One direction of an executor."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        rounds: Sequence[Round],
        end: Literal["taken", "put"],
        device: torch.device | None,
    ) -> None:
        self.rounds = rounds
        self._layout, self._rank, self._end, self._device = layout, rank, end, device
        self._buckets: Buckets | None = None

    @property
    def buckets(self) -> Buckets:
        """Those of the parameters that were prepared last."""
        assert self._buckets is not None
        return self._buckets

    def prepare(self, held: Parameters) -> list[str]:
        """Whatever is wrong with the parameters; if nothing is, there are buckets for them."""
        if self._buckets is not None and self._buckets.key == identity(held):
            return []
        self.release()
        problems = self._layout.misfits(self._rank, held, strict=self._end == "put")
        if not problems:
            device = self._device or next((tensor.device for tensor in held.values()), torch.device("cpu"))
            self._buckets = Buckets(self.rounds, self._end, held, device)
        return problems

    def release(self) -> None:
        self._buckets = None


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _nothing() -> None:
    pass
