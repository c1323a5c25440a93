"""The memory of a ring: anonymous (memfd), found through the process that holds it, gone with the last one.

There is no name in any file system, hence nothing to remove: the kernel frees the memory when the last process that
has it mapped ends, in whichever way it ends. It also is not counted against `/dev/shm`, which containers keep at
64 MiB. The price: who wants to attach needs the address of a process that has it, and must be allowed to look at that
process (the same user, the same process namespace).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
from typing import NamedTuple

from drivetrain_transport._errors import PeerLost
from drivetrain_transport._rings.free import free_memory

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"shm://(\d{1,10})/(\d{1,10})/([A-Za-z0-9._-]{1,64})\.([0-9a-f]{16})")
_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4
_HUGE_PAGES, _POPULATE_WRITE = 14, 23  # madvise; Python has no name for the second one


class RingMemory(NamedTuple):
    """One mapping of the memory, and a descriptor of its file.

    The descriptor's open file is another one than the mapping's: whoever has the mapping, such as a child by fork, does
    not keep alive what is locked through the descriptor.
    """

    name: str
    token: str
    """Tells this memory from another of the same name, after the process numbers have come round."""
    descriptor: int
    map: mmap.mmap

    @property
    def address(self) -> str:
        """Where other processes find it, as long as this process has it."""
        return f"shm://{os.getpid()}/{self.descriptor}/{self.name}.{self.token}"


def make_memory(name: str, size: int) -> RingMemory:
    """Fresh memory of zeros, all of it really there.

    Raises:
        ValueError: The name has other characters than letters, digits, dot, underscore and hyphen, or over 64.
        OSError: The memory is not to be had, or this is not Linux.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a ring: use 1 to 64 letters, digits, dots, underscores or hyphens")
    if sys.platform != "linux":
        raise OSError(f"a ring in shared memory needs Linux, this is {sys.platform}: use an Endpoint")
    if size > (free := free_memory()):
        raise OSError(errno.ENOMEM, f"ring {name}: no {size} bytes of memory, {free} are free: make it smaller")
    token = os.urandom(8).hex()
    descriptor = _memfd(f"drivetrain-ring.{name}.{token}")
    try:
        os.fchmod(descriptor, 0o600)
        try:
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise OSError(error.errno, f"ring {name}: no {size} bytes of memory: {error.strerror}") from error
        import fcntl

        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)  # nobody's mapping loses its pages
        return _memory(name, token, descriptor, size)
    finally:
        os.close(descriptor)


def open_memory(address: str) -> RingMemory:
    """The memory that a process has at this address.

    Raises:
        ValueError: It is no address of a ring.
        PeerLost: That process is gone, or has let go of the ring.
        PermissionError: It is another user's.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is no address of a ring: take the `address` of one that is open")
    pid, number, name, token = found.groups()
    path = f"/proc/{pid}/fd/{number}"
    try:
        if os.readlink(path) != f"/memfd:drivetrain-ring.{name}.{token} (deleted)":
            raise FileNotFoundError
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise PeerLost(
            f"cannot attach to {address}: process {pid} is gone, has closed the ring, or is in another container"
        ) from None
    except PermissionError as error:
        raise PermissionError(error.errno, f"cannot attach to {address}: process {pid} is another user's") from None
    try:
        return _memory(name, token, descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _memory(name: str, token: str, descriptor: int, size: int) -> RingMemory:
    mapping = _map(descriptor, size)
    return RingMemory(name, token, os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), mapping)


def _memfd(name: str) -> int:
    flags = _CLOSE_ON_EXEC | _ALLOW_SEALING
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    # Interpreters that were built for old C libraries lack it, the library they run on has it.
    function = ctypes.CDLL(None, use_errno=True)["memfd_create"]
    descriptor = int(function(ctypes.c_char_p(name.encode()), ctypes.c_uint(flags)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"no shared memory for {name}: {os.strerror(ctypes.get_errno())}")
    return descriptor


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Map it with every page in this process's tables, so that no first touch is left to the messages."""
    mapping = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # kernels without huge pages, or with those for shared memory off
        mapping.madvise(_HUGE_PAGES)
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        bytes(memoryview(mapping)[:: mmap.PAGESIZE])
    return mapping
