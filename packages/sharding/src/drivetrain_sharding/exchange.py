"""What carries the messages of a plan: the contract, and ready ones over torch.distributed and over plain functions."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

Message = tuple[int, Tensor]
"""A rank of the other side's layout, and a flat uint8 tensor that is sent to it or filled by it."""


class Exchange(Protocol):
    """What an executor needs of a transport. Ranks are those of the plan's layouts."""

    def agree(self, ok: bool) -> bool:
        """Whether all ranks of both sides said that it is ok; called once by each, before anything is sent."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start all messages of a round, in whatever order; the result waits until they are through, and raises what
        went wrong. Between a source and a target rank there is one message in a round. It must have a deadline."""


class TorchExchange:
    """An `Exchange` over a `torch.distributed` group (gloo, NCCL, RCCL) that has all ranks of both sides.

    With NCCL a wait is the stream's, not the host's: a member that is lost shows by NCCL's own timeout.

    Args:
        source_ranks, target_ranks: which process of the group is which rank of the layouts.
        timeout: seconds that a round may take.
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
        self._group, self._timeout = group, timeout

    def agree(self, ok: bool) -> bool:
        device = "cpu" if dist.get_backend(self._group) == "gloo" else torch.accelerator.current_accelerator()
        vote = torch.tensor([int(ok)], device=device)
        work = dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._wait([work])
        return bool(vote.item())

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        operations = [
            *(
                dist.P2POp(dist.irecv, flat, group_peer=self._sources[rank], group=self._group)
                for rank, flat in receives
            ),
            *(dist.P2POp(dist.isend, flat, group_peer=self._targets[rank], group=self._group) for rank, flat in sends),
        ]
        works = dist.batch_isend_irecv(operations)
        return lambda: self._wait(works)

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait(datetime.timedelta(seconds=self._timeout))


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
