"""Single tensors between members: all of a round at once, and rounds in flight while the caller goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from drivetrain_transport.device._buckets import as_bytes
from drivetrain_transport.device._links import Work
from drivetrain_transport.device._pairs import Pair, misfits
from drivetrain_transport.device._session import Operation, Session


class Moves(NamedTuple):
    """What a round is to move, by the other member's name."""

    sends: Sequence[tuple[str, torch.Tensor]]
    receives: Sequence[tuple[str, torch.Tensor]]

    def pairs(self, ranks: Mapping[str, int]) -> dict[int, Pair]:
        return {
            rank: Pair([t for to, t in self.sends if to == name], [t for source, t in self.receives if source == name])
            for name, rank in ranks.items()
        }


class Round:
    """Transfers that `TensorGroup.start` has started, and that move while the caller does something else."""

    def __init__(self, session: Session, operation: Operation, works: Sequence[Work], sent: int, received: int) -> None:
        """Use `TensorGroup.start`."""
        self._session = session
        self._operation = operation
        self._works = works
        self._bytes = sent, received
        self._through = False

    def wait(self) -> None:
        """Wait until all are through: what was sent may be changed, and what was received can be read. Idempotent.

        Raises:
            GroupBroken: A member was missing at the round's deadline, or was lost before; names it.
            RuntimeError: The group is closed, or in use by another thread.
        """
        if self._through:
            return
        with self._session.part(self._operation):
            self._join()
            self._session.end(self._operation)
        self._through = True
        self._session.counters.sent(self._bytes[0])
        self._session.counters.received(self._bytes[1])

    def _join(self) -> None:
        def join() -> None:
            for work in self._works:
                work.join()

        self._session.link.run(join)
        self._session.link.finish(self._operation.deadline)
        self._works = ()


def start(session: Session, moves: Moves, members: Sequence[str], operation: Operation) -> tuple[Round, list[str]]:
    """Compare both sides of each pair of members, and begin what fits.

    Returns:
        the round, and what does not fit and was not begun.
    """
    ranks = {name: members.index(name) for name in operation.channels}
    pairs, control, deadline = moves.pairs(ranks), session.link.control, operation.deadline
    found = control.run(lambda: misfits(pairs, members, control, deadline)) if pairs else {}
    fit = {name: rank for name, rank in ranks.items() if rank not in found}
    sends, receives = (
        [(as_bytes(tensor), fit[name]) for name, tensor in side if name in fit and tensor.numel()] for side in moves
    )
    with session.link.together():
        works = [session.link.receive(flat, rank, deadline) for flat, rank in receives]
        works += [session.link.send(flat, rank, deadline) for flat, rank in sends]
    sent, received = (sum(flat.nbytes for flat, _ in side) for side in (sends, receives))
    return Round(session, operation, works, sent, received), [*found.values()]
