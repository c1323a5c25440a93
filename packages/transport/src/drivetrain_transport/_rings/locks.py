"""Locks between processes that the kernel takes back from whoever dies.

Two kinds, for two questions:

* `RobustLock`, a robust process-shared pthread mutex inside the shared memory: who may change the header now? It costs
  half a microsecond, waits without turning, excludes threads as well as processes, and passes to the next one when its
  holder is killed. (Locks on files cost two system calls per change, have no wait with a deadline, and let go of the
  interpreter lock while they are held.)
* `hold` and `is_held`, a lock on one byte of the memory's file (an open file description lock): is this process still
  alive? The kernel drops it when the process's last descriptor of that file is closed, which for a killed process is
  after its memory is gone: whoever finds it dropped knows that nothing of that process writes any more. A process
  number would have to be compared with a start time, is not that of a zombie, and means nothing in another container.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
from typing import Any

_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, in glibc and in musl
_MONOTONIC = 1
_SLICE = 0.1  # seconds; between two of them Python's signal handlers have their turn
_OFD_GETLK, _OFD_SETLK = 36, 37
_WRITE_LOCK, _UNLOCKED = 1, 2
_FIRST_BYTE = 1 << 40  # beyond any memory's end: only the lock lies there


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _FileLock(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_short),
        ("whence", ctypes.c_short),
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("pid", ctypes.c_int),
    ]


class RobustLock:
    """A mutex at an address in shared memory. Not recursive."""

    SIZE = 64
    """Bytes it may take up; the C libraries need 40 to 48."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._trylock, self.unlock, self._consistent = (
            _function(ctypes.PyDLL, f"pthread_mutex_{name}", ctypes.c_void_p)
            for name in ("trylock", "unlock", "consistent")
        )
        # `unlock(address)` gives it back, and has no effect if this thread does not hold it (a robust mutex answers
        # EPERM). It is the C function itself, because on the way into a method Ctrl-C could come first.

    def make(self) -> None:
        """Bring it into being in fresh memory, once, before anybody else knows the memory."""
        attributes = ctypes.create_string_buffer(64)
        for name, *values in (("init",), ("setpshared", _SHARED), ("setrobust", _ROBUST)):
            kinds = [ctypes.c_void_p, *([ctypes.c_int] * len(values))]
            _check(_function(ctypes.PyDLL, f"pthread_mutexattr_{name}", *kinds)(attributes, *values))
        make = _function(ctypes.PyDLL, "pthread_mutex_init", ctypes.c_void_p, ctypes.c_void_p)
        _check(make(self.address, attributes))

    def acquire(self, deadline: float) -> bool:
        """Take it; False when `time.monotonic()` passed the deadline first. A dead holder's lock is taken over.

        What the dead one protected must be in order at every moment. An exception out of here (Ctrl-C) leaves open
        whether it was taken: call `unlock` in any case.
        """
        try:
            code = self._trylock(self.address)
            while code == errno.EBUSY:
                now = time.monotonic()
                if now >= deadline:
                    return False
                code = self._wait(min(deadline, now + _SLICE))
            if code == errno.EOWNERDEAD:
                code = self._consistent(self.address)
        except BaseException:
            self._consistent(self.address)  # if it came between the two lines above; no effect otherwise
            raise
        _check(code)
        return True

    def _wait(self, until: float) -> int:
        clocklock = _clocklock()
        if clocklock is None:  # glibc before 2.30, musl
            until += time.time() - time.monotonic()
            clocklock = _function(ctypes.CDLL, "pthread_mutex_timedlock", ctypes.c_void_p, ctypes.c_void_p)
            code = clocklock(self.address, ctypes.byref(_timespec(until)))
        else:
            code = clocklock(self.address, _MONOTONIC, ctypes.byref(_timespec(until)))
        return errno.EBUSY if code == errno.ETIMEDOUT else int(code)


def hold(descriptor: int, number: int) -> bool:
    """Lock byte `number` of the file for as long as this open file is open; False if another open file has it.

    A child process that inherits the descriptor by fork keeps the lock alive: it has to close it.
    """
    request = _FileLock(_WRITE_LOCK, os.SEEK_SET, _FIRST_BYTE + number, 1, 0)
    if _fcntl()(descriptor, _OFD_SETLK, ctypes.byref(request)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EACCES):
        return False
    raise OSError(code, f"cannot lock a byte of shared memory: {os.strerror(code)}")


def is_held(descriptor: int, number: int) -> bool:
    """Whether another open file has locked byte `number`."""
    request = _FileLock(_WRITE_LOCK, os.SEEK_SET, _FIRST_BYTE + number, 1, 0)
    if _fcntl()(descriptor, _OFD_GETLK, ctypes.byref(request)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot ask for a lock on shared memory: {os.strerror(code)}")
    return int(request.type) != _UNLOCKED


def _timespec(moment: float) -> _TimeSpec:
    seconds = int(moment)
    return _TimeSpec(seconds, int((moment - seconds) * 1e9))


def _check(code: int) -> None:
    if code:
        raise OSError(code, f"a lock in shared memory failed: {os.strerror(code)}")


@functools.cache
def _function(load: type[ctypes.CDLL], name: str, *kinds: Any) -> Any:
    """A C function; with PyDLL it keeps the interpreter lock, for what never waits and is over in a moment."""
    function = load(None)[name]
    function.argtypes = kinds
    function.restype = ctypes.c_int
    return function


@functools.cache
def _clocklock() -> Any:
    try:
        return _function(ctypes.CDLL, "pthread_mutex_clocklock", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    except AttributeError:
        return None


@functools.cache
def _fcntl() -> Any:
    function = ctypes.PyDLL(None, use_errno=True)["fcntl"]
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
