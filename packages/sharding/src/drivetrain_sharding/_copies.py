"""Copies of many boxes of tensors at once, found once for tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from drivetrain_sharding.layout import Box
from drivetrain_sharding.plan import Plan, Transfer

Parameters = Mapping[str, Tensor]
"""By name, as they lie on a rank (`local_parameters`)."""


class Copies:
    """Pairs of views: what is written, and what is read, of the same shape.

    They are kept in groups that a GPU copies in one launch: all of one pair of dtypes, and dense.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for into, taken in pairs:
            dense = into.is_contiguous() and taken.is_contiguous()
            group = self._groups.setdefault((into.dtype, taken.dtype, into.device, taken.device, dense), ([], []))
            group[0].append(into)
            group[1].append(taken)

    def run(self) -> None:
        """On a GPU it does not wait."""
        with torch.no_grad():
            for into, taken in self._groups.values():
                torch._foreach_copy_(into, taken, non_blocking=True)


class Reader:
    """Transfers that a target rank does itself, out of memory that it can read.

    Args:
        plan: whose layouts are meant.
        rank: of the target layout.
        transfers: some of the plan's to this rank.
    """

    def __init__(self, plan: Plan, rank: int, transfers: Sequence[Transfer]) -> None:
        self.transfers = transfers
        self._plan, self._rank = plan, rank
        self._ranks = sorted({transfer.source for transfer in transfers})
        self._key: object = None
        self._copies = Copies(())

    def prepare(self, sources: Callable[[int], Parameters], parameters: Parameters) -> list[str]:
        """What hinders the transfers from one of these to the other; nothing is changed yet.

        It looks closely only where these are other tensors than those of the last call without problems.
        """
        held = {rank: sources(rank) for rank in self._ranks}
        key = (identity(parameters), {rank: identity(some) for rank, some in held.items()})
        if key == self._key:
            return []
        self.release()
        problems = self._plan.target.misfits(self._rank, parameters, strict=True)
        for rank in self._ranks:
            problems += [f"source rank {rank}: {what}" for what in self._plan.source.misfits(rank, held[rank])]
        if not problems:
            views = (
                (box_of(transfer.put, parameters), box_of(transfer.taken, held[transfer.source]))
                for transfer in self.transfers
            )
            # Either may have a first dimension more, where experts are stacked.
            self._copies = Copies((into, taken.view(into.shape)) for into, taken in views)
            self._key = key
        return problems

    def run(self) -> None:
        """Copy, between the tensors that were prepared. On a GPU it does not wait."""
        self._copies.run()

    def release(self) -> None:
        """Let go of all tensors."""
        self._key = None
        self._copies = Copies(())


def box_of(place: tuple[str, Box], parameters: Parameters) -> Tensor:
    """The view that `Transfer.taken` or `Transfer.put` means."""
    name, box = place
    return box.of(parameters[name].detach())


def identity(parameters: Parameters) -> object:
    """Equal for the same memory in the same form, as long as somebody keeps it alive."""
    return [(name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in parameters.items()]
