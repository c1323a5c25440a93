"""What carries the messages of a plan: the contract, and ready ones over torch.distributed and over plain functions."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

Message = tuple[int, Tensor]
"""A rank of the other side's layout, and a flat uint8 tensor that is sent to it or filled by it."""


class Exchange(Protocol):
    """What an executor needs of a transport. Ranks are those of the plan's layouts. Everything that waits must have a
    deadline."""

    def agree(self, ok: bool) -> bool:
        """Whether all ranks of both sides said that it is ok; called by each before anything is sent, and once more
        when it is through with its part."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start all messages of a round, in whatever order; the result waits until they are through, and raises what
        went wrong. Between a source and a target rank there is one message in a round."""


class TorchExchange:
    """An `Exchange` over a `torch.distributed` group (gloo, NCCL, RCCL) of the ranks of both sides.

    A group in which something failed cannot be used any more.

    Args:
        source_ranks, target_ranks: which process of the group is which rank of the layouts.
        timeout: seconds that ranks wait for each other at the start of an update, and that it may take from there on.
        group: None is the default group.
    """

    def __init__(
        self,
        source_ranks: Sequence[int],
        target_ranks: Sequence[int],
        *,
        timeout: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._sources, self._targets = tuple(source_ranks), tuple(target_ranks)
        self._members = sorted({*source_ranks, *target_ranks})
        self._group, self._timeout = group, timeout
        self._deadline: float | None = None
        """Of the update that is under way."""

    def agree(self, ok: bool) -> bool:
        starts = self._deadline is None
        verdict = self._poll(ok)
        self._deadline = time.monotonic() + self._timeout if starts and verdict else None
        return verdict

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        return self._messages(
            [(self._targets[rank], flat) for rank, flat in sends],
            [(self._sources[rank], flat) for rank, flat in receives],
        )

    def _poll(self, ok: bool) -> bool:
        """Whether all say that it is ok."""
        vote = torch.tensor([int(ok)], dtype=torch.uint8)
        if dist.get_backend(self._group) != "gloo":
            vote = vote.to(torch.accelerator.current_accelerator())
            work = dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
            self._wait([work], ["the agreement of all ranks"])
            return bool(vote.item())
        # Gloo's collectives go on after a deadline, and keep the process from ending; its messages do not.
        first, *others = self._members
        if dist.get_rank(self._group) != first:
            self._messages([(first, vote)], [])()
            self._messages([], [(first, vote)])()
            return bool(vote.item())
        votes = [torch.empty_like(vote) for _ in others]
        self._messages([], list(zip(others, votes, strict=True)))()
        verdict = vote * all(votes)
        self._messages([(other, verdict) for other in others], [])()
        return bool(verdict.item())

    def _messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start messages to and from processes of the group."""
        operations = [
            *(dist.P2POp(dist.irecv, flat, group_peer=peer, group=self._group) for peer, flat in receives),
            *(dist.P2POp(dist.isend, flat, group_peer=peer, group=self._group) for peer, flat in sends),
        ]
        if not operations:
            return _nothing
        names = [
            *(f"the message from {self._named(peer)}" for peer, _ in receives),
            *(f"the message to {self._named(peer)}" for peer, _ in sends),
        ]
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(names):  # NCCL has one for all
            names = [", ".join(names)]
        return lambda: self._wait(works, names)

    def _wait(self, works: Sequence[dist.Work | None], names: Sequence[str]) -> None:
        deadline = self._deadline or time.monotonic() + self._timeout
        for work, name in zip(works, names, strict=True):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                if work is not None:
                    work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as error:
                raise RuntimeError(f"{name} did not get through (the limit is {self._timeout:g} s): {error}") from error

    def _named(self, peer: int) -> str:
        sides = (("source", self._sources), ("target", self._targets))
        return " and ".join(f"{side} rank {ranks.index(peer)}" for side, ranks in sides if peer in ranks)


class CallableExchange:
    """An `Exchange` made of two functions that move one flat tensor each and wait for it: `send(tensor, rank)` and
    `receive(tensor, rank)`. For transports where a send does not wait for its receive, or where no rank is both a
    source and a target.

    Args:
        send, receive: raise when their deadline passes.
        agree: whether all ranks said True; None: every rank answers for itself alone, and finds out that another was
            not ready by the deadline.
    """

    def __init__(
        self,
        send: Callable[[Tensor, int], None] | None,
        receive: Callable[[Tensor, int], None] | None,
        *,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._send, self._receive, self._agree = send, receive, agree

    def agree(self, ok: bool) -> bool:
        return ok if self._agree is None else self._agree(ok)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        def finish() -> None:
            for rank, flat in receives:
                assert self._receive is not None, "a target rank needs receive"
                self._receive(flat, rank)

        for rank, flat in sends:
            assert self._send is not None, "a source rank needs send"
            self._send(flat, rank)
        return finish


def _nothing() -> None:
    pass
