"""What a group needs of the library that moves its bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

_T = TypeVar("_T")


class LinkFailed(Exception):
    """The library reported an error, or the deadline passed. Private: groups say who was missing."""


class Work(Protocol):
    """A transfer that was begun. It and its tensor are kept until it is joined, or the link is given back."""

    def join(self) -> None:
        """What the caller does next with the tensor comes after the transfer: on the host, or in the current stream.

        Raises:
            LinkFailed: It failed, or was not there at its deadline.
        """


class Link(Protocol):
    """Moves flat tensors of bytes between the members, who are known by rank. One call is made at a time.

    Transfers between two members arrive in the order in which both sides begin them, and joining waits, so it is done
    in `run`. `deadline` is one of `time.monotonic()`.
    """

    @property
    def control(self) -> Link:
        """Moves what the host reads, in CPU memory, without a turn on a GPU's stream. May be the link itself."""

    def broadcast(self, flat: torch.Tensor, root: int, deadline: float) -> Work: ...

    def send(self, flat: torch.Tensor, to: int, deadline: float) -> Work: ...

    def receive(self, flat: torch.Tensor, source: int, deadline: float) -> Work: ...

    def together(self) -> AbstractContextManager[None]:
        """Transfers begun inside it go on at once, in whatever order the members begin theirs."""

    def run(self, work: Callable[[], _T]) -> _T:
        """Call what begins transfers and waits for them. An exception raised in the caller's thread by a signal's
        handler, as KeyboardInterrupt is, ends the wait at once; only `abort` may follow.
        """

    def finish(self, deadline: float) -> None:
        """Wait on the host until all that was begun and joined is done. Raises LinkFailed."""

    def interrupt(self) -> None:
        """The group is over: whatever is waited for fails now. From any thread."""

    def abort(self) -> None:
        """Give everything back now, whatever is under way; what was under way has stopped afterwards."""

    def close(self) -> None:
        """Give everything back; nothing is under way."""
