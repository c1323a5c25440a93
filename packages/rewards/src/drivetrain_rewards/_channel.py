"""Messages over a pair of pipes: a length of four bytes (big-endian), then JSON."""

from __future__ import annotations

import os
import select
import struct
import time

import msgspec

_LIMIT = 256 << 20  # bytes of one message; a longer length is no length but noise


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker."""

    function: str
    sys_path: list[str]
    """The pool's `sys.path`, so that the function is found where the pool would find it."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's answer to it."""

    error: str = ""
    """Why the function could not be imported; empty when it was."""


class Channel:
    """One end of the pair. Both ends work with deadlines on `time.monotonic`; None waits for ever."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def send(self, data: bytes, deadline: float | None) -> None:
        """Write one message.

        Raises:
            ValueError: The message is over the limit.
            TimeoutError: The other end did not take it in time.
            BrokenPipeError: The other end is gone.
        """
        if len(data) > _LIMIT:
            raise ValueError(f"a message of {len(data)} bytes is over the limit of {_LIMIT}")
        view = memoryview(struct.pack(">I", len(data)) + data)
        while view:
            self._wait(self._writer, select.POLLOUT, deadline)
            view = view[os.write(self._writer, view) :]

    def receive(self, deadline: float | None) -> bytes:
        """Read one message.

        Raises:
            TimeoutError: It did not come in time.
            EOFError: The other end is gone, or what it sends is no message.
        """
        (size,) = struct.unpack(">I", self._read(4, deadline))
        if size > _LIMIT:
            raise EOFError(f"a length of {size} bytes is over the limit of {_LIMIT}")
        return self._read(size, deadline)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._reader, select.POLLIN, deadline)
            piece = os.read(self._reader, size - len(data))
            if not piece:
                raise EOFError("the other end is gone")
            data += piece
        return bytes(data)

    def _wait(self, descriptor: int, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)):
            raise TimeoutError("the deadline is over")
