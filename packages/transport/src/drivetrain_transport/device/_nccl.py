"""NCCL, or RCCL, called directly: for tensors on GPUs.

Torch's own process group is not used, because it ends the process when an operation fails: it takes for granted
that nobody goes on after a member died. Communicators here are non-blocking, so that nothing is waited for inside
the library, and are aborted from outside when a deadline passes.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from drivetrain_transport.device._accelerator import collectives, on, stream_pointer
from drivetrain_transport.device._links import Link, LinkFailed

_T = TypeVar("_T")
_SUCCESS, _IN_PROGRESS = 0, 7
_BYTES = 1  # ncclUint8
_UNSET = -(1 << 31)
_END_S = 10.0

log = logging.getLogger("drivetrain_transport")


class _Id(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.17. Later libraries read as much of it as `size` says, and fill in the rest."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]


class _Library:
    def __init__(self) -> None:
        handle, pointer, size, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library = collectives()
        self._text = library.ncclGetErrorString
        self._text.restype, self._text.argtypes = ctypes.c_char_p, [number]

        def function(name: str, *arguments: type) -> Callable[..., int]:
            found: Callable[..., int] = getattr(library, name)
            found.argtypes, found.restype = list(arguments), number  # type: ignore[attr-defined]
            return found

        self.new_id = function("ncclGetUniqueId", ctypes.POINTER(_Id))
        self.init = function(
            "ncclCommInitRankConfig", ctypes.POINTER(handle), number, _Id, number, ctypes.POINTER(_Config)
        )
        self.state = function("ncclCommGetAsyncError", handle, ctypes.POINTER(number))
        self.finalize = function("ncclCommFinalize", handle)
        self.destroy = function("ncclCommDestroy", handle)
        self.abort = function("ncclCommAbort", handle)
        self.send = function("ncclSend", pointer, size, number, number, handle, pointer)
        self.receive = function("ncclRecv", pointer, size, number, number, handle, pointer)
        self.broadcast = function("ncclBroadcast", pointer, pointer, size, number, number, handle, pointer)
        self.group_start = function("ncclGroupStart")
        self.group_end = function("ncclGroupEnd")

    def check(self, result: int, what: str) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise LinkFailed(f"{what}: {self._text(result).decode()}")


class NcclLink:
    """One communicator, on a stream of its own. The members connect to each other when it is made.

    `over` says why nothing need be waited for any more, and is empty before. It is asked while something is waited
    for, so that a member's death, which the rendezvous notices, ends the wait before the deadline.

    The memory and the threads of the communicator are given back by `abort` and by `close`. A library that does not
    return from that within 10 seconds is left alone and logged: its thread ends with the process.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        control: Link,
        put: Callable[[str, bytes], None],
        get: Callable[[str], bytes],
        over: Callable[[], str],
        deadline: float,
    ) -> None:
        self._library = library = _Library()
        self._device = device
        self.control = control
        self._over = over
        self._comm = ctypes.c_void_p()
        self._begun: set[_NcclWork] = set()
        self._grouped: list[_NcclWork] | None = None
        self._stream = torch.Stream(device=device)
        identity = _Id()
        if rank == 0:
            library.check(library.new_id(ctypes.byref(identity)), "ncclGetUniqueId")
            put("id", bytes(identity))
        else:
            ctypes.memmove(ctypes.byref(identity), get("id"), ctypes.sizeof(identity))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21700, 0, _UNSET, _UNSET, _UNSET, None)
        try:
            with on(device):
                library.check(
                    library.init(ctypes.byref(self._comm), size, identity, rank, ctypes.byref(config)), "connecting"
                )
                self._settle(deadline, "connecting")
        except BaseException:
            self.abort()
            raise

    def broadcast(self, flat: torch.Tensor, root: int, deadline: float) -> _NcclWork:
        def start() -> int:
            at, stream = flat.data_ptr(), stream_pointer(self._stream)
            return self._library.broadcast(at, at, flat.nbytes, _BYTES, root, self._comm, stream)

        return self._begin(start, flat, deadline, "broadcast")

    def send(self, flat: torch.Tensor, to: int, deadline: float) -> _NcclWork:
        def start() -> int:
            stream = stream_pointer(self._stream)
            return self._library.send(flat.data_ptr(), flat.nbytes, _BYTES, to, self._comm, stream)

        return self._begin(start, flat, deadline, "send")

    def receive(self, flat: torch.Tensor, source: int, deadline: float) -> _NcclWork:
        def start() -> int:
            stream = stream_pointer(self._stream)
            return self._library.receive(flat.data_ptr(), flat.nbytes, _BYTES, source, self._comm, stream)

        return self._begin(start, flat, deadline, "receive")

    @contextmanager
    def together(self) -> Iterator[None]:
        self._grouped = []
        try:  # whatever interrupts this thread, its next call to the library is not one of this group
            self._library.check(self._library.group_start(), "ncclGroupStart")
            yield
        finally:
            begun, self._grouped = self._grouped, None
            ended = self._library.group_end()
        self._library.check(ended, "a group of transfers")
        self._settle(max((work.deadline for work in begun), default=0.0), "a group of transfers")
        event = self._stream.record_event()
        for work in begun:
            work.event = event

    def run(self, work: Callable[[], _T]) -> _T:
        return work()  # all waits are slept through in short turns

    def finish(self, deadline: float) -> None:
        event = torch.accelerator.current_stream(self._device).record_event()
        self._wait(event.query, deadline, "the transfer")

    def interrupt(self) -> None:
        self.control.interrupt()  # what waits here asks `over` itself

    def abort(self) -> None:
        self.control.abort()
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._bounded(lambda: self._library.abort(comm), "ncclCommAbort")
        self._begun.clear()

    def close(self) -> None:
        self.control.close()
        if not self._comm:
            return
        try:
            self._library.check(self._library.finalize(self._comm), "ncclCommFinalize")
            self._settle(time.monotonic() + _END_S, "ncclCommFinalize")
        except LinkFailed:
            self.abort()
            return
        comm, self._comm = self._comm, ctypes.c_void_p()
        self._bounded(lambda: self._library.destroy(comm), "ncclCommDestroy")

    def _begin(self, start: Callable[[], int], flat: torch.Tensor, deadline: float, what: str) -> _NcclWork:
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        work = _NcclWork(flat, self._device, deadline, self._begun)
        self._library.check(start(), what)
        if self._grouped is not None:
            self._grouped.append(work)
        else:
            self._settle(deadline, what)
            work.event = self._stream.record_event()
        return work

    def _settle(self, deadline: float, what: str) -> None:
        """Wait until the library has taken the last call in: what it does on the stream is there to be waited for."""
        state = ctypes.c_int(_SUCCESS)

        def settled() -> bool:
            self._library.check(self._library.state(self._comm, ctypes.byref(state)), what)
            self._library.check(state.value, what)
            return state.value == _SUCCESS

        if not settled():
            self._wait(settled, deadline, what)

    def _wait(self, true: Callable[[], bool], deadline: float, what: str) -> None:
        state = ctypes.c_int(_SUCCESS)
        turns = 0
        while not true():
            turns += 1
            if turns < 200:
                time.sleep(0)  # others of this process get their turn
                continue
            time.sleep(50e-6 if turns < 2000 else 1e-3)
            if reason := self._over():
                raise LinkFailed(reason)
            self._library.check(self._library.state(self._comm, ctypes.byref(state)), what)
            self._library.check(state.value, what)
            if time.monotonic() > deadline:
                raise LinkFailed(f"{what} was not done at the deadline")

    def _bounded(self, action: Callable[[], int], what: str) -> None:
        thread = threading.Thread(target=action, name=f"drivetrain-transport {what}", daemon=True)
        thread.start()
        thread.join(_END_S)
        if thread.is_alive():
            log.error("%s has not returned after %g s: its thread is left alone", what, _END_S)


class _NcclWork:
    def __init__(self, flat: torch.Tensor, device: torch.device, deadline: float, begun: set[_NcclWork]) -> None:
        self.deadline = deadline
        self.event: torch.Event | None = None
        self._flat = flat
        self._device = device
        self._begun = begun
        begun.add(self)

    def join(self) -> None:
        if self.event is None:
            raise RuntimeError("a transfer of a group is joined after the group")
        self._begun.discard(self)
        torch.accelerator.current_stream(self._device).wait_event(self.event)
