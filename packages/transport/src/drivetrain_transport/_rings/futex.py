"""Sleeping on a word of shared memory until another process changes it and says so (Linux futex)."""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from typing import Any

_CALLS = {  # little-endian ones: the word is the lower half of one of 64 bits
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "ppc64le": 221,
}
_WAIT, _WAKE = 0, 1  # not the private forms: those do not meet across processes
_POLL_SECONDS = 0.001


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until somebody wakes this word, or `seconds` have passed; not at all if the word is not `expected`.

    It may also return early (a signal, and always on a processor whose system call is not known here, where it only
    sleeps for a millisecond): the caller looks again at what it waits for. Lets other threads run.
    """
    number = _CALLS.get(platform.machine())
    if number is None:
        time.sleep(min(seconds, _POLL_SECONDS))
        return
    whole = int(seconds)
    limit = _TimeSpec(whole, int((seconds - whole) * 1e9))
    _syscall(ctypes.CDLL)(number, address, _WAIT, expected, ctypes.byref(limit), None, 0)


def wake(address: int, count: int) -> None:
    """Wake up to `count` of those who sleep on this word."""
    number = _CALLS.get(platform.machine())
    if number is not None:
        _syscall(ctypes.PyDLL)(number, address, _WAKE, count, None, None, 0)


@functools.cache
def _syscall(load: type[ctypes.CDLL]) -> Any:
    # A function object of its own, so that nobody else's argument types are changed.
    function = load(None)["syscall"]
    function.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    function.restype = ctypes.c_long
    return function
