"""The side that listens: any number of peers on one ROUTER socket."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from drivetrain_transport._address import Address, check_bind
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
from drivetrain_transport._endpoints.peer import Handler, Peer
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._endpoints.wire import Wire
from drivetrain_transport._errors import FrameError
from drivetrain_transport._keys import Keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PROBE_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A connecting endpoint as the binding one sees it: ZeroMQ's names of its two connections."""

    name: str
    session: bytes
    max_bytes: int
    data: bytes
    life: bytes = b""
    peer: Peer | None = None
    """None until the life connection is attached."""


class Binding(Core):
    """Listens on a ROUTER, for any number of peers.

    A connection that breaks is noticed by sending to it: ZeroMQ then says that there is nobody. So each seat gets a
    Probe on both its connections, once a second or four times per liveness. That a silent connection breaks is the
    doing of ZeroMQ's heartbeats, see `Connecting`.
    """

    def __init__(
        self,
        address: Address,
        *,
        protocol: Protocol,
        handler: Handler | None,
        keys: Keys | None,
        max_bytes: int,
        liveness: float,
    ) -> None:
        if not 0.5 <= liveness <= 3600:
            raise ValueError(f"liveness is {liveness} s: it must lie between 0.5 and 3600")
        self._target = check_bind(address, secured=keys is not None)
        super().__init__(str(address), protocol=protocol, handler=handler, keys=keys, max_bytes=max_bytes)
        self._liveness = liveness
        self._seats: dict[bytes, _Seat] = {}  # by the name of the data connection
        self._by_peer: dict[Peer, _Seat] = {}
        self._wire: Wire | None = None

    async def open(self) -> None:
        socket = self.socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.ipv6 = ":" in self._target.host and self._target.scheme == "tcp"
        # A host that vanished must not keep the messages queued for it in memory.
        socket.setsockopt(zmq.TCP_MAXRT, int(self._liveness * 4000))
        if self.keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        try:
            socket.bind(str(self._target))
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(error.errno, f"cannot bind {self._target}: {error.strerror}") from error
        self.address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._wire = Wire(socket, self._take)
        self._probing = asyncio.get_running_loop().create_task(self._keep_probing())

    async def farewell(self) -> None:
        for seat in self._by_peer.values():
            assert seat.peer is not None
            seat.peer.end("closed", "was left: this endpoint closed")
            self._send(seat.data, Goodbye())
        deadline = asyncio.get_running_loop().time() + FAREWELL_S
        while self._by_peer and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
            self._probe()

    def release(self, linger: float) -> None:
        if self._wire is not None:
            self._probing.cancel()
            self._wire.close(linger)
            if self._target.scheme == "ipc" and not self._target.host.startswith("@"):
                Path(self._target.host).unlink(missing_ok=True)

    def transmit(self, peer: Peer, envelope: Envelope, body: Sequence[Buffer] = ()) -> None:
        seat = self._by_peer.get(peer)
        if seat is not None and not self._send(seat.data, envelope, body):
            self._lose(seat)

    def drop(self, peer: Peer, why: str) -> None:
        seat = self._by_peer.pop(peer, None)
        if seat is not None:
            peer.end("lost", f"was left: {why}")
            self._send(seat.data, Goodbye(reason=why))  # its answer vacates the seat
            self.set_peers(tuple(self._by_peer))

    def _send(self, connection: bytes, envelope: Envelope, body: Sequence[Buffer] = ()) -> bool:
        assert self._wire is not None
        try:
            self._wire.send([connection, pack(envelope), *body])
        except ConnectionError:
            return False
        return True

    def _take(self, frames: list[memoryview]) -> None:
        connection = bytes(frames[0])
        seat = self._seats.get(connection)
        try:
            envelope = unpack(frames[1] if len(frames) > 1 else b"")
            match envelope:
                case Hello():
                    self._greet(connection, envelope)
                case Attach(session=session):
                    self._attach(connection, session)
                case Goodbye() if seat is not None:
                    self._send(connection, Goodbye())
                    self._vacate(seat)
                    if seat.peer is not None:
                        seat.peer.end("goodbye", envelope.text)
                case Request() | Reply() | Failure() | Cancel() if seat is not None and seat.peer is not None:
                    if seat.peer.state == "open":
                        seat.peer.receive(envelope, frames[2:])
                case _:
                    raise FrameError(f"{type(envelope).__name__} from a connection that has not said hello")
        except FrameError as error:
            self.refuse(str(error), seat.peer if seat is not None else None)

    def _greet(self, connection: bytes, hello: Hello) -> None:
        reason = ""
        if self.keys is not None and not hmac.compare_digest(hello.token, self.keys.token):
            reason = "you do not hold the keys of this run"
        elif hello.version != self.protocol.version:
            reason = f"the protocol here is version {self.protocol.version!r}, yours is {hello.version!r}"
        if reason:
            self._send(connection, Refused(reason=reason))
            raise FrameError(f"hello of {hello.name!r}: {reason}")
        if connection not in self._seats:
            self._seats[connection] = _Seat(
                name=hello.name, session=hello.session, max_bytes=hello.max_bytes, data=connection
            )
        self._send(connection, Welcome(liveness=self._liveness, max_bytes=self.max_bytes))

    def _attach(self, connection: bytes, session: bytes) -> None:
        for seat in self._seats.values():
            if seat.peer is None and hmac.compare_digest(seat.session, session):
                break
        else:
            raise FrameError("a life connection of a session that is not known")
        seat.life = connection
        seat.peer = Peer(seat.name, self)
        seat.peer.limit(seat.max_bytes)
        self._by_peer[seat.peer] = seat
        self._send(connection, Attached())
        self.set_peers(tuple(self._by_peer))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(min(_PROBE_S, self._liveness / 4))
            self._probe()

    def _probe(self) -> None:
        for seat in list(self._seats.values()):
            connections = (seat.data, seat.life) if seat.life else (seat.data,)
            if not all(self._send(connection, Probe()) for connection in connections):
                self._lose(seat)

    def _lose(self, seat: _Seat) -> None:
        assert self._wire is not None
        self._wire.drain()  # it may have said goodbye, or answered, before it went
        if seat.data in self._seats:
            self._vacate(seat)
            if seat.peer is not None:
                seat.peer.end("lost", f"was lost (its connection broke, or it was silent for {self._liveness:g} s)")

    def _vacate(self, seat: _Seat) -> None:
        del self._seats[seat.data]
        if seat.peer is not None and self._by_peer.pop(seat.peer, None) is not None:
            self.set_peers(tuple(self._by_peer))
