"""The process at the other side: calls to it, and its calls to us."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from typing import Protocol as Interface

from drivetrain_transport._codec.frames import decode, encode, total_bytes
from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._endpoints.envelopes import Cancel, Envelope, Failure, Reply, Request
from drivetrain_transport._endpoints.pieces import join, split
from drivetrain_transport._endpoints.protocol import Protocol, members
from drivetrain_transport._errors import FrameError, PeerLost, RemoteError
from drivetrain_transport._stats import ChannelStats, Counters

if TYPE_CHECKING:
    from typing_extensions import Buffer

PeerState = Literal["open", "goodbye", "lost", "closed"]
"""open; goodbye: the other side closed; lost: it broke off, fell silent or failed a call; closed: this side closed."""

_CANCELLED = asyncio.CancelledError.__name__

log = logging.getLogger("drivetrain_transport")


class Link(Interface):
    """What a peer needs of its endpoint."""

    @property
    def protocol(self) -> Protocol: ...
    @property
    def handler(self) -> Handler | None: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def encrypted(self) -> bool: ...

    def post(self, action: Callable[[], None]) -> bool:
        """Run an action on the endpoint's loop, from any thread; False when the endpoint has closed."""

    def on_own_thread(self) -> bool: ...

    def refuse(self, reason: str, peer: Peer | None = None) -> None:
        """Count a message that was refused, on the endpoint's loop."""

    def transmit(self, peer: Peer, envelope: Envelope, body: Sequence[Buffer] = ()) -> None:
        """Send, on the endpoint's loop; a broken connection ends the peer."""


class _Body(NamedTuple):
    """An encoded request or reply, as it is sent and received."""

    frames: Sequence[Buffer]
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    number: int
    request: str
    """The request's type, for messages."""
    reply: Future[_Body] = field(default_factory=Future)
    start: float = field(default_factory=time.monotonic)


class Peer:
    """The process at the other side of an endpoint. Endpoints make peers; users call them.

    A peer is one connection: a process that comes back after it was lost is a new peer.
    """

    def __init__(self, name: str, link: Link) -> None:
        self._name = name
        self._link = link
        self._max_bytes = link.max_bytes
        self._state: PeerState = "open"
        self._end = ""
        self._numbers = itertools.count()
        self._pending: dict[int, _Call] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._counters = Counters()  # changed on the endpoint's loop

    def __repr__(self) -> str:
        return f"<Peer {self._name!r} {self._state}>"

    @property
    def name(self) -> str:
        """What the connecting side calls itself; for the binding side, its address."""
        return self._name

    @property
    def state(self) -> PeerState:
        """Whether the peer can be called, and if not, why."""
        return self._state

    @property
    def stats(self) -> ChannelStats:
        """Requests and replies both ways, and the tensors and structs in them in bytes.

        `waits` and `wait_seconds` are those of calls for their replies, `queued` the calls that wait now, `duplicates`
        the replies that came when their call had given up, `refused` what the peer sent that is no message.
        """
        return self._counters.snapshot(self._name)

    def call(self, request: Any, *, timeout: float) -> Any:
        """Send a request and wait for the reply. From any thread, any number at a time; not in a handler.

        The request's CPU tensors are not copied. When this returns the other side has them, and they may be changed;
        after a TimeoutError a part may still be on its way, and they may only be dropped.

        Args:
            request: A member of the protocol's requests.
            timeout: Seconds until the reply must be here. When they are over, the handler at the other side is
                cancelled.

        Raises:
            TimeoutError: No reply in time; names the peer, the request's type and the seconds.
            PeerLost: The peer was lost or closed, before or meanwhile.
            RemoteError: The other side's handler raised.
            FrameError: What came back is no reply of the protocol.
            ValueError: The request is not one of the protocol's, or over the size limit of either side; or the timeout
                is no number of seconds.
            RuntimeError: Called on the endpoint's own thread, where waiting would block the reply.
        """
        if self._link.on_own_thread():
            raise RuntimeError(f"Peer.call would block the loop that takes in {self._name}'s reply: await call_async")
        check_timeout(timeout)
        call = self._start(request)
        try:
            body = call.reply.result(timeout)
        except TimeoutError:
            raise TimeoutError(self._late(call, timeout)) from None
        finally:
            self._leave(call)
        return self._read(body, self._link.protocol.replies)

    async def call_async(self, request: Any, *, timeout: float) -> Any:
        """The same as `call` without blocking, on any event loop; in a handler as well.

        Cancelling it cancels the handler at the other side. Until it returns the request's tensors must stay as they
        are.
        """
        check_timeout(timeout)
        call = self._start(request)
        try:
            async with asyncio.timeout(timeout):
                body = await self._reply(call)
        except TimeoutError:
            raise TimeoutError(self._late(call, timeout)) from None
        finally:
            self._leave(call)
        return self._read(body, self._link.protocol.replies)

    def tell(self, request: Any) -> Future[Any]:
        """Send a request of which only the arrival matters, and return at once. For channels.

        Returns:
            What is done as soon as the other side has answered, or is lost.

        Raises:
            PeerLost: The endpoint has closed.
        """
        return self._start(request).reply

    def _start(self, request: Any) -> _Call:
        kinds = members(self._link.protocol.requests)
        if type(request) not in kinds:
            expected = ", ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{type(request).__name__} is no request of the protocol: it has {expected}")
        body = self._encode(request)
        call = _Call(number=next(self._numbers), request=type(request).__name__)
        call.reply.set_running_or_notify_cancel()  # from here on only this peer settles it
        if not self._link.post(lambda: self._send(call, body)):
            raise self._lost(call)
        return call

    async def _reply(self, call: _Call) -> _Body:
        if not self._link.on_own_thread():
            return await asyncio.wrap_future(call.reply)
        done = asyncio.get_running_loop().create_future()  # here the reply is settled, so nobody has to wake this loop

        def settle(_: Future[_Body]) -> None:
            if not done.done():
                done.set_result(None)

        call.reply.add_done_callback(settle)
        await done
        return call.reply.result()

    def _leave(self, call: _Call) -> None:
        if not call.reply.done():
            self._link.post(lambda: self._forget(call))

    def _encode(self, obj: Any) -> _Body:
        frames = encode(obj, max_bytes=self._max_bytes)
        return _Body(*split(frames)) if self._link.encrypted else _Body(frames, ())

    def _read(self, body: _Body, kinds: type[Any] | UnionType) -> Any:
        try:
            return decode(join(body.frames, body.pieces), kinds, max_bytes=self._link.max_bytes, copy=False)
        except FrameError as error:
            reason = str(error)
            self._link.post(lambda: self._link.refuse(reason, self))
            raise

    def _late(self, call: _Call, timeout: float) -> str:
        return f"{self._name} did not answer {call.request} within {timeout:g} s"

    def _lost(self, call: _Call) -> PeerLost:
        return PeerLost(f"{self._name} {self._end or 'is out of reach'}: {call.request} gets no reply")

    # What follows runs on the endpoint's loop only.

    def _send(self, call: _Call, body: _Body) -> None:
        if self._state != "open":
            call.reply.set_exception(self._lost(call))
            return
        self._pending[call.number] = call
        self._counters.queue(len(self._pending))
        self._transmit(Request(call=call.number, pieces=body.pieces), body.frames)

    def _transmit(self, envelope: Request | Reply | Failure, body: Sequence[Buffer] = ()) -> None:
        self._counters.sent(total_bytes(body))
        self._link.transmit(self, envelope, body)

    def _forget(self, call: _Call) -> None:
        if self._settle(call.number) is not None:
            self._link.transmit(self, Cancel(call=call.number))

    def _settle(self, number: int) -> _Call | None:
        """The call that waits for this reply, and waits no longer; None when nobody waits for it."""
        call = self._pending.pop(number, None)
        if call is not None:
            self._counters.queue(len(self._pending))
            self._counters.waited(time.monotonic() - call.start)
        return call

    def limit(self, max_bytes: int) -> None:
        """Send no message larger than this, which is what the other side takes. For the endpoint."""
        self._max_bytes = min(max_bytes, self._link.max_bytes)

    def end(self, state: PeerState, text: str) -> None:
        """The conversation is over: fail the calls that wait, cancel the handlers that run. For the endpoint."""
        if self._state != "open":
            return
        self._state, self._end = state, text
        for number in list(self._pending):
            if call := self._settle(number):
                call.reply.set_exception(self._lost(call))
        for task in self._tasks.values():
            task.cancel()

    def count_refused(self) -> None:
        """Count a message of this peer that was none. For the endpoint."""
        self._counters.refused += 1

    def receive(self, envelope: Request | Reply | Failure | Cancel, frames: Sequence[Buffer]) -> None:
        """Take in one message of an open conversation. For the endpoint."""
        if not isinstance(envelope, Cancel):
            self._counters.received(total_bytes(frames))
        match envelope:
            case Request(call=number, pieces=pieces):
                if number not in self._tasks:
                    task = asyncio.get_running_loop().create_task(self._serve(number, _Body(frames, pieces)))
                    self._tasks[number] = task
                    task.add_done_callback(lambda _: self._tasks.pop(number))  # one cancelled early never runs at all
            case Cancel(call=number):
                if number in self._tasks:
                    self._tasks[number].cancel()
            case Reply(call=number, pieces=pieces):
                if call := self._settle(number):
                    call.reply.set_result(_Body(frames, pieces))
                else:
                    self._counters.duplicates += 1
            case Failure(call=number, kind=kind, message=message):
                if call := self._settle(number):
                    call.reply.set_exception(RemoteError(kind, message, peer=self._name))
                elif kind != _CANCELLED:  # which would be the answer to our own Cancel
                    self._counters.duplicates += 1

    async def _serve(self, number: int, body: _Body) -> None:
        protocol, handler = self._link.protocol, self._link.handler
        try:
            if handler is None:
                raise RuntimeError("this endpoint has no handler: it makes calls, and takes none")
            request = self._read(body, protocol.requests)
            reply = await handler(self, request)
            if type(reply) not in members(protocol.replies):
                raise TypeError(f"the handler returned a {type(reply).__name__}, which is no reply of the protocol")
            answer = self._encode(reply)
        except asyncio.CancelledError:
            self._fail(number, _CANCELLED, "the handler was cancelled")
            raise
        except Exception as error:  # it belongs to the caller, who gets it
            log.warning("the handler failed a call of %s", self._name, exc_info=True)
            self._fail(number, type(error).__name__, str(error))
        else:
            if self._state == "open":
                self._transmit(Reply(call=number, pieces=answer.pieces), answer.frames)

    def _fail(self, number: int, kind: str, message: str) -> None:
        if self._state == "open":
            self._transmit(Failure(call=number, kind=kind, message=message))


Handler = Callable[[Peer, Any], Awaitable[Any]]
"""`async def handler(peer, request) -> reply`, run on the endpoint's own loop, one task for each request.

What it raises becomes `RemoteError` at the caller. It is cancelled when the caller gives up or is lost. A reply's CPU
tensors are handed over without a copy: do not change them afterwards. Long computations belong in another thread, or no
other call is answered meanwhile (the peer stays alive all the same).
"""
