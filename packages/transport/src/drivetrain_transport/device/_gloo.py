"""Gloo, for tensors on the CPU: over TCP, without torch's global process groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from drivetrain_transport.device._links import LinkFailed

_CONNECT_S = 20.0
_SLOTS = 1 << 30
_END_S = 10.0
_T = TypeVar("_T")


class _Store(Store):
    """Hands gloo's addresses from member to member. Gloo asks for nothing else."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put = put
        self._get = get

    def set(self, key: str, value: Any) -> None:
        self._put(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  # gets have one
        for key in keys:
            self._get(key)


class GlooLink:
    """The members connect to each other when it is made; each listens on `host` for that, on a port of its own.

    A member that dies closes its connections: what others have under way with it fails at once. One that is stopped
    is noticed at the deadline. The threads and sockets are gone when `abort` or `close` returns.

    Gloo waits where no signal reaches: a main thread that waits there sees Ctrl-C when the wait is over. So what waits
    runs on a thread of the link's, and its caller waits for that thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        put: Callable[[str, bytes], None],
        get: Callable[[str], bytes],
        host: str,
        deadline: float,
    ) -> None:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=min(max(deadline - time.monotonic(), 0.001), _CONNECT_S))
        self._begun: set[_GlooWork] = set()
        self._gate = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "drivetrain-transport gloo")
        self._slots: dict[tuple[int, int], int] = {}
        self._rank = rank
        self._size = size
        try:
            self._group: Any = gloo(_Store(put, get), rank, size, options)
        except RuntimeError as error:
            raise LinkFailed(_first_line(error)) from None
        finally:
            del options  # it holds gloo's thread, and an error's traceback would hold it

    @property
    def control(self) -> GlooLink:
        return self

    def broadcast(self, flat: torch.Tensor, root: int, deadline: float) -> _Relay:
        """Down a binomial tree: who has the tensor passes it on, so that no member sends it to all others.

        Gloo's own broadcast is not used: it waits on threads of gloo's, which a member's death can leave waiting.
        """
        parent, children = _tree(self._rank, root, self._size)
        slots = [(child, self._slot(self._rank, child)) for child in children]
        received = None if parent is None else self.receive(flat, parent, deadline)

        return _Relay(received, lambda: [self._send(flat, child, slot, deadline) for child, slot in slots])

    def send(self, flat: torch.Tensor, to: int, deadline: float) -> _GlooWork:
        return self._send(flat, to, self._slot(self._rank, to), deadline)

    def receive(self, flat: torch.Tensor, source: int, deadline: float) -> _GlooWork:
        slot = self._slot(source, self._rank)
        return self._begin(lambda: self._group.recv([flat], source, slot), flat, deadline)

    @contextmanager
    def together(self) -> Iterator[None]:
        yield

    def run(self, work: Callable[[], _T]) -> _T:
        done = self._thread.submit(_without_grad, work)
        try:
            return done.result()
        except BaseException:
            if not done.done():  # it is not the work that raised
                self.interrupt()
                wait([done], _END_S)
            raise
        finally:
            del done  # it holds the work's exception, and that one's traceback would hold it

    def finish(self, deadline: float) -> None:
        """A join has waited."""

    def interrupt(self) -> None:
        # Gloo has no way to break a wait off, but one wait that runs into its timeout breaks off all others.
        with self._gate:
            if self._group is not None:
                probe = torch.zeros(1, dtype=torch.uint8)
                with suppress(RuntimeError):
                    self._group.recv_anysource([probe], _SLOTS).wait(timedelta(milliseconds=1))

    def abort(self) -> None:
        self.interrupt()
        self.close()

    def close(self) -> None:
        self._thread.shutdown()
        for work in list(self._begun):
            work.drop()  # each keeps the connections open
        with self._gate:
            self._group = None

    def _begin(self, start: Callable[[], Any], flat: torch.Tensor, deadline: float) -> _GlooWork:
        try:
            return _GlooWork(start(), flat, deadline, self._begun)
        except RuntimeError as error:
            raise LinkFailed(_first_line(error)) from None

    def _send(self, flat: torch.Tensor, to: int, slot: int, deadline: float) -> _GlooWork:
        return self._begin(lambda: self._group.send([flat], to, slot), flat, deadline)

    def _slot(self, source: int, to: int) -> int:
        number = self._slots.get((source, to), 0)
        self._slots[source, to] = number + 1
        return number % _SLOTS


class _GlooWork:
    def __init__(self, work: Any, flat: torch.Tensor, deadline: float, begun: set[_GlooWork]) -> None:
        self._work = work
        self._flat = flat
        self._deadline = deadline
        self._begun = begun
        begun.add(self)

    def join(self) -> None:
        work = self._work
        self.drop()
        if work is None:
            return
        try:
            work.wait(_left(self._deadline))
        except RuntimeError as error:
            raise LinkFailed(_first_line(error)) from None
        finally:
            del work  # it holds the connections, and an error's traceback would hold it

    def drop(self) -> None:
        self._work = None
        self._begun.discard(self)


class _Relay:
    """One member's part of a broadcast: what comes from above is passed on below. The root begins with that."""

    def __init__(self, received: _GlooWork | None, pass_on: Callable[[], list[_GlooWork]]) -> None:
        self._received = received
        self._pass_on = pass_on
        self._sent = pass_on() if received is None else []

    def join(self) -> None:
        if self._received is not None:
            self._received.join()
            self._received = None
            self._sent = self._pass_on()
        for work in self._sent:
            work.join()


def _without_grad(work: Callable[[], _T]) -> _T:
    with torch.no_grad():  # a mode is a thread's own
        return work()


def _tree(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """A member's parent (None for the root) and children in the binomial tree, the child with most below it first."""
    place = (rank - root) % size
    low = place & -place if place else 1 << (size - 1).bit_length()
    parent = None if place == 0 else (place - low + root) % size
    steps = [1 << bit for bit in reversed(range(low.bit_length() - 1))]
    return parent, [(place + step + root) % size for step in steps if place + step < size]


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2] if text.startswith("[") and "] " in text else text
