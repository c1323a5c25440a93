"""The part of an endpoint that lives on its own thread: a loop, a ZeroMQ context, a beginning and an end."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from drivetrain_transport._endpoints.envelopes import Envelope
from drivetrain_transport._endpoints.peer import Handler, Peer
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

FAREWELL_S = 1.0
"""How long a closing endpoint waits for its peers' goodbye, and ZeroMQ for what is unsent."""

_JOIN_S = 10.0
_OVERHEAD = 1 << 16  # bytes; room for an envelope and for CURVE's boxes

log = logging.getLogger("drivetrain_transport")


class Core(ABC):
    """Runs an endpoint's loop on a thread of its own, so that it goes on while the owner's thread computes.

    `peers` and `closed` may be read from any thread, under `changed` to wait for them; everything else belongs to the
    loop's thread, which other threads reach through `post`.
    """

    def __init__(
        self, address: str, *, protocol: Protocol, handler: Handler | None, keys: Keys | None, max_bytes: int
    ) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_message_bytes is {max_bytes}: it must be positive")
        self.address = address
        self.protocol = protocol
        self.handler = handler
        self.keys = keys
        self.max_bytes = max_bytes
        self.peers: tuple[Peer, ...] = ()
        self.changed = threading.Condition()
        self.watch: Callable[[tuple[Peer, ...]], None] | None = None
        """Called on the loop with the peers whenever they have changed."""
        self.trouble = ""
        """What went wrong here last; empty while nothing did. May be read from any thread."""
        self.refused = 0
        self.closed = False
        self._left: tuple[Peer, ...] = ()  # those that left last; their last words may not be counted yet
        self._past = ChannelStats(name=address)
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._accepting = False
        self._asked_to_stop = False
        self._gate = threading.Lock()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"drivetrain-transport {address}", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the endpoint is open; raises what kept it from opening."""
        self._thread.start()
        atexit.register(self.stop)  # a forgotten endpoint says goodbye at the interpreter's exit
        try:
            self._started.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Say goodbye, close the sockets, end the thread. Idempotent; bounded.

        Raises:
            RuntimeError: The thread had failed (once; the cause is attached), or does not end: a handler blocks it, or
                threads that it started.
        """
        if os.getpid() != self._process:
            return  # a forked child has no thread to stop
        self._asked_to_stop = True
        if self._thread.ident is None:
            return  # it ends as soon as it starts
        self.post(self._request_stop)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the endpoint at {self.address} is not closed after {_JOIN_S:g} s: a handler blocks it")
        atexit.unregister(self.stop)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"the endpoint at {self.address} failed") from failure

    def post(self, action: Callable[[], None]) -> bool:
        """Run an action on the loop, from any thread; False when the endpoint has closed."""
        with self._gate:
            if self._accepting and self.on_own_thread():
                self._loop.call_soon(action)  # the other one wakes the loop, by a system call
            elif self._accepting:
                self._loop.call_soon_threadsafe(action)
            return self._accepting

    @property
    def encrypted(self) -> bool:
        return self.keys is not None

    def on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @abstractmethod
    async def open(self) -> None:
        """Open the sockets; for a connecting endpoint, meet the other side."""

    @abstractmethod
    async def farewell(self) -> None:
        """Say goodbye to the open peers and wait a moment for their answer."""

    @abstractmethod
    def release(self, linger: float) -> None:
        """Close the sockets."""

    @abstractmethod
    def transmit(self, peer: Peer, envelope: Envelope, body: Sequence[Buffer] = ()) -> None:
        """Send to a peer; a broken connection ends it."""

    @abstractmethod
    def drop(self, peer: Peer, why: str) -> None:
        """Say goodbye to a peer that fails its calls, and end it as lost. No effect on one that is gone."""

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        with self.changed:
            for peer in self._left:
                self._past += peer.stats
            self._left = tuple(peer for peer in self.peers if peer not in peers)
            self.peers = peers
            self.changed.notify_all()
        if self.watch is not None:
            self.watch(peers)

    @property
    def stats(self) -> ChannelStats:
        """The counts of all peers together, those that are gone among them."""
        with self.changed:
            total = sum((peer.stats for peer in (*self.peers, *self._left)), self._past)
        return msgspec.structs.replace(total, name=self.address, refused=self.refused)

    def refuse(self, reason: str, peer: Peer | None = None) -> None:
        """Count a message that was refused, and its sender when that is a peer."""
        self.refused += 1
        if peer is not None:
            peer.count_refused()
        log.warning("%s refused a message: %s", self.address, reason)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that drops nothing silently and cannot hold up the exit."""
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = self.max_bytes + _OVERHEAD
        return socket

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001  # whatever ended the thread belongs to the owner
            if self._started.done():
                self._failure = error
            else:
                self._started.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_error)
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._opening = self._loop.create_task(self.open())
        self.context = zmq.Context()
        self._accepting = True
        end, linger = "was left: this endpoint closed", 0.0
        try:
            if self._asked_to_stop:
                self._opening.cancel()
            await self._opening
            self._started.set_result(None)
            await self._stopped
            linger = FAREWELL_S
            await self.farewell()
        except Exception as error:
            end = f"was left: this endpoint failed with {error!r}"
            raise
        finally:
            for peer in self.peers:
                peer.end("closed", end)
            with self._gate:
                self._accepting = False
            await asyncio.sleep(0)  # what was posted before the gate closed still gets its answer
            self.release(linger)
            self.closed = True
            self.set_peers(())
            self.context.term()

    def _request_stop(self) -> None:
        self._opening.cancel()
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None and not self._stopped.done():
            self._stopped.set_exception(error)  # one of the endpoint's own callbacks: it cannot go on
        else:
            log.error("%s: %s", self.address, context["message"], exc_info=error)
