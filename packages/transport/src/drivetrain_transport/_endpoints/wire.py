"""One ZeroMQ socket on an asyncio loop: whole messages in by callback, out without waiting."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import zmq

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BATCH = 64  # messages taken in before other callbacks of the loop get their turn
_EVENT = struct.Struct("=HI")


class Wire:
    """Owned by the loop's thread; every method is called there.

    Nothing is dropped: queues have no high-water mark, so a send never waits and never fails for want of room. What
    is queued is bounded by the callers, each of which waits for its reply. Tensors' frames are not copied; ZeroMQ
    holds on to them until they are written out.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[memoryview]], None],
        on_disconnect: Callable[[], None] | None = None,
        on_mismatch: Callable[[int], None] | None = None,
    ) -> None:
        """`on_disconnect` is called when the connection breaks, and before it `on_mismatch`, with ZeroMQ's reason, when
        the two sides could not agree on how to talk: then ZeroMQ does not try again."""
        self._socket = socket
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._on_mismatch = on_mismatch
        self._loop = asyncio.get_running_loop()
        self._looking = True
        self._descriptor = int(socket.fd)
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)  # a descriptor signals only after one read has found nothing
        self._monitor: zmq.Socket[bytes] | None = None
        if on_disconnect is not None:
            self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            self._monitor_descriptor = int(self._monitor.fd)
            self._loop.add_reader(self._monitor_descriptor, self._drain_monitor)
            self._loop.call_soon(self._drain_monitor)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue one message.

        Raises:
            ConnectionError: There is no connection: the one that a ROUTER's first frame names no longer stands, or a
                DEALER's other side cannot be talked to, which `on_mismatch` says as well.
        """
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise ConnectionError("the connection no longer stands") from error
            raise
        # A send may take the descriptor's edge with it, and an incoming message would wait for the next one.
        self._look_soon()

    def drain(self) -> None:
        """Hand over what has arrived."""
        self._looking = False
        for _ in range(_BATCH):
            # Asking first keeps the interpreter lock, which a vain try to receive would give to a busy thread.
            if self._socket.closed or not int(self._socket.events) & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._on_message([memoryview(cast("Buffer", frame)) for frame in frames])
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self.drain)

    def close(self, linger: float) -> None:
        """Close the socket; what is queued may still be written for `linger` seconds."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_descriptor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=int(linger * 1000))

    def _drain_monitor(self) -> None:
        while self._monitor is not None and not self._monitor.closed:
            try:
                event, value = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            assert self._on_disconnect is not None
            assert self._on_mismatch is not None
            if event == zmq.EVENT_DISCONNECTED:
                self._on_disconnect()
            else:
                self._on_mismatch(value)
