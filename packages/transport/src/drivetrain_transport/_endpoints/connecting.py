"""The side that finds the other one: a DEALER socket for messages, and one for heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from drivetrain_transport._address import Address, check_connect, needs_ipv6
from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._endpoints.core import FAREWELL_S, Core
from drivetrain_transport._endpoints.envelopes import (
    Attach,
    Attached,
    Cancel,
    Envelope,
    Failure,
    Goodbye,
    Hello,
    Probe,
    Refused,
    Reply,
    Request,
    Welcome,
    pack,
    unpack,
)
from drivetrain_transport._endpoints.peer import Handler, Peer, PeerState
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._endpoints.wire import Wire
from drivetrain_transport._errors import FrameError, PeerLost, PeerRefused
from drivetrain_transport._keys import Keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HEARTBEAT_S = 0.5

log = logging.getLogger("drivetrain_transport")


class Connecting(Core):
    """Finds a binding endpoint, and is ended with it: a broken connection is not mended but reported.

    ZeroMQ's heartbeats run on the life connection. They are written and answered by ZeroMQ's own thread, so neither
    a computation that holds the interpreter nor a large message on the data connection makes a living process look
    dead. After `liveness` seconds of silence each side breaks the connection; the binding side learns how long that is
    from the first heartbeat.
    """

    def __init__(
        self,
        address: Address,
        *,
        protocol: Protocol,
        handler: Handler | None,
        keys: Keys | None,
        max_bytes: int,
        name: str,
        timeout: float,
    ) -> None:
        self._target = check_connect(address, secured=keys is not None)
        super().__init__(str(address), protocol=protocol, handler=handler, keys=keys, max_bytes=max_bytes)
        self._name = name
        self._timeout = check_timeout(timeout)
        self.peer = Peer(self.address, self)
        self.ended = threading.Event()
        self._session = secrets.token_bytes(16)
        self._broken = 0
        self._data: Wire | None = None
        self._life: Wire | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._attached: asyncio.Future[None] = loop.create_future()
        try:
            async with asyncio.timeout(self._timeout):
                self._data = self._connect(self._take, None)
                self._hello()
                welcome = await self._welcome
                self.peer.limit(welcome.max_bytes)
                self._life = self._connect(self._take_life, welcome.liveness)
                self._life.send([pack(Attach(session=self._session))])
                await self._attached
        except TimeoutError:
            text = f"no endpoint answered at {self.address} within {self._timeout:g} s"
            raise TimeoutError(f"{text} ({self.trouble})" if self.trouble else text) from None
        self.set_peers((self.peer,))

    async def farewell(self) -> None:
        if self.peer.state != "open":
            return
        self.peer.end("closed", "was left: this endpoint closed")
        self._say(Goodbye())
        deadline = asyncio.get_running_loop().time() + FAREWELL_S
        while not self.ended.is_set() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    def release(self, linger: float) -> None:
        for wire in (self._data, self._life):
            if wire is not None:
                wire.close(linger)
        self.ended.set()

    def transmit(self, peer: Peer, envelope: Envelope, body: Sequence[Buffer] = ()) -> None:
        if peer.state == "open":
            self._say(envelope, body)

    def drop(self, peer: Peer, why: str) -> None:
        if peer.state == "open":
            self._say(Goodbye(reason=why))
            self._end("lost", f"was left: {why}", FAREWELL_S)

    def _connect(self, take: Callable[[list[memoryview]], None], liveness: float | None) -> Wire:
        socket = self.socket(zmq.DEALER)
        socket.ipv6 = needs_ipv6(self._target)
        if liveness is not None:
            socket.heartbeat_ivl = int(min(_HEARTBEAT_S, liveness / 4) * 1000)
            socket.heartbeat_timeout = socket.heartbeat_ttl = int(liveness * 1000)
        if self.keys is not None:
            socket.curve_serverkey = self.keys.public
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        wire = Wire(socket, take, self._disconnected, self._mismatched)
        socket.connect(str(self._target))  # now that nothing that happens to it escapes
        return wire

    def _say(self, envelope: Envelope, body: Sequence[Buffer] = ()) -> None:
        assert self._data is not None
        with contextlib.suppress(ConnectionError):  # the monitor is about to report its end
            self._data.send([pack(envelope), *body])

    def _hello(self) -> None:
        token = self.keys.token if self.keys is not None else ""
        hello = Hello(
            version=self.protocol.version,
            name=self._name,
            session=self._session,
            token=token,
            max_bytes=self.max_bytes,
        )
        self._say(hello)

    def _take(self, frames: list[memoryview]) -> None:
        try:
            envelope = unpack(frames[0])
            match envelope:
                case Welcome():
                    if not self._welcome.done():
                        self._welcome.set_result(envelope)
                case Refused(reason=reason):
                    self._turn_away(f"{self.address} refused us: {reason}")
                case Goodbye():
                    if self.peer.state == "open":
                        self._say(Goodbye())
                    self._end("goodbye", envelope.text, FAREWELL_S)
                case Request() | Reply() | Failure() | Cancel():
                    if self.peer.state == "open":
                        self.peer.receive(envelope, frames[1:])
                case Probe():
                    pass
                case _:
                    raise FrameError(f"{type(envelope).__name__} has no place on a data connection")
        except FrameError as error:
            self.refuse(str(error), self.peer)

    def _take_life(self, frames: list[memoryview]) -> None:
        try:
            if isinstance(unpack(frames[0]), Attached) and not self._attached.done():
                self._attached.set_result(None)
        except FrameError as error:
            self.refuse(str(error))

    def _mismatched(self, reason: int) -> None:
        if reason != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._turn_away(f"what listens at {self.address} is no endpoint: is it the right port?")
        elif self.keys is None:
            self._turn_away(f"{self.address} refused us: it has keys, and we have none: pass keys=load_keys(folder)")
        else:
            self._turn_away(f"{self.address} refused us: we have keys, and it has none")

    def _turn_away(self, text: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(PeerRefused(text))
            self._attached.cancel()

    def _disconnected(self) -> None:
        if not self._welcome.done():
            self._broken += 1
            question = "are the keys the same?" if self.keys is not None else "is it an endpoint?"
            self.trouble = f"the connection was made and broken, {self._broken} times so far: {question}"
            if self._broken == 1:
                log.warning("%s: the connection was made and broken: %s", self.address, question)
            self._hello()  # the first one may have gone down with the connection
        elif self._attached.cancelled():
            pass  # turned away
        elif not self._attached.done():
            self._attached.set_exception(PeerLost(f"{self.address} was lost while we met: the connection broke"))
        else:
            assert self._data is not None
            self._data.drain()  # it may have said goodbye, or answered, before it went
            self._leave()

    def _leave(self) -> None:
        self._end("lost", "was lost (the connection broke, or it was silent for too long)", 0.0)

    def _end(self, state: PeerState, text: str, linger: float) -> None:
        self.trouble = f"{self.address} {text}"
        self.peer.end(state, text)
        self.set_peers(())
        self.release(linger)  # ZeroMQ would connect again, to a stranger
