"""A batch through a link: what is packed, moved and unpacked, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain_transport.device._buckets import HEADER_BYTES, Batch, Bucket, Direct
from drivetrain_transport.device._links import Work

Move = Callable[[torch.Tensor], Work]


class Refused(Exception):
    """The other side's list is another. Private: groups make it a GroupBroken."""


class Staging:
    """Two buckets, taken when they are first needed and kept for the next operation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buckets: list[torch.Tensor] = []

    def buckets(self, size: int) -> list[torch.Tensor]:
        if not self._buckets or self._buckets[0].nbytes < size:
            self._buckets.clear()
            self._buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._buckets

    def drop(self) -> None:
        self._buckets.clear()


def write(batch: Batch, move: Move, staging: Staging) -> None:
    """Move a batch out: while one bucket is on its way, the other one is packed."""
    header = torch.frombuffer(bytearray(batch.header()), dtype=torch.uint8).to(staging.device)
    begun = [move(header)]
    buckets = staging.buckets(batch.bucket) if batch.bucket else []
    busy: list[Work | None] = [None, None]
    turn = 0
    for step in batch.steps:
        if isinstance(step, Direct):
            begun.append(move(batch.flat(step)))
            continue
        if (before := busy[turn]) is not None:
            before.join()
        batch.pack(step, buckets[turn])
        busy[turn] = move(buckets[turn][: step.size])
        turn = 1 - turn
    for work in [*begun, *busy]:
        if work is not None:
            work.join()


def read(batch: Batch, move: Move, staging: Staging, finish: Callable[[], None]) -> None:
    """Move a batch in: while one bucket is on its way, the other one is unpacked. Compares the lists first.

    Raises:
        Refused: The lists differ; nothing was written.
    """
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=staging.device)
    move(header).join()
    finish()
    if difference := batch.difference(bytes(header.tolist())):
        raise Refused(difference)
    buckets = staging.buckets(batch.bucket) if batch.bucket else []
    begun: list[Work] = []
    busy: list[tuple[Work, Bucket] | None] = [None, None]
    turn = 0

    def empty(turn: int) -> None:
        if (full := busy[turn]) is not None:
            full[0].join()
            batch.unpack(full[1], buckets[turn])
            busy[turn] = None

    for step in batch.steps:
        if isinstance(step, Direct):
            begun.append(move(batch.flat(step)))
            continue
        empty(turn)
        busy[turn] = (move(buckets[turn][: step.size]), step)
        turn = 1 - turn
    empty(turn)
    empty(1 - turn)
    for work in begun:
        work.join()
