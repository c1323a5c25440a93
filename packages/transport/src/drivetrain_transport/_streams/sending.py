"""What a sender does on its endpoints' threads."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from drivetrain_transport._channels.gate import Gate
from drivetrain_transport._channels.links import Links, Owner, Terms
from drivetrain_transport._channels.payload import BATCH_BYTES, HEADROOM
from drivetrain_transport._endpoints.core import Core
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._errors import FrameError, PeerLost, RemoteError, StreamTaken
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import Counters
from drivetrain_transport._streams.numbers import check
from drivetrain_transport._streams.window import Lane, Message, Window
from drivetrain_transport._streams.wire import PROTOCOL, SPAN, TAKEN, Item, Join, Offer, Push, Settle, Taken

_BATCH = 1024
_DEPTH = 2
"""Batches on their way to one receiver: one is written while the other is read."""

_CALL_S = 600.0
"""For a reply that follows as soon as the batch has arrived. A receiver that is gone is noticed long before."""


class Outlet:
    """Transmits what the window puts on one lane, a batch at a time. Lives on the loop of the lane's endpoint."""

    def __init__(self, owner: Sending, core: Core, peer: Peer, offer: Offer) -> None:
        self.lane = Lane(offer.name, offer.credit, offer.credit_bytes, self._kick)
        self._owner = owner
        self._core = core
        self._peer = peer
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    def _kick(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._core.post(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        while len(self._tasks) < _DEPTH and self._peer.state == "open":
            with self._owner.gate:
                batch = self._owner.window.take(self.lane, _BATCH, BATCH_BYTES)
                floor = self._owner.window.settled.below
            if not batch:
                return
            task = asyncio.get_running_loop().create_task(self._push(batch, floor))
            self._tasks.add(task)
            task.add_done_callback(self._pushed)

    def _pushed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._flush()

    async def _push(self, batch: list[Message], floor: int) -> None:
        owner = self._owner
        items = [Item(message.number, message.redelivered, message.head, message.blobs) for message in batch]
        push = Push(stream=owner.stream, life=owner.life, floor=floor, items=items)
        try:
            await self._peer.call_async(push, timeout=_CALL_S)
        except PeerLost:
            pass  # `left` gives the lane's messages to others
        except (RemoteError, TimeoutError, FrameError) as error:
            owner.drop(self._core, self._peer, error)
        except ValueError as error:
            if len(batch) > 1:
                for message in batch:
                    await self._push([message], floor)
            else:
                owner.refuse(self.lane, batch[0].number, str(error))


class Sending(Owner):
    """What a `WorkSender` does on its endpoints' loops."""

    def __init__(self, stream: str, terms: Terms) -> None:
        self.stream = stream
        self.life = secrets.token_bytes(8)
        self.counters = Counters()
        self.gate = Gate(self.counters)
        self.window = Window(self.counters)
        self.links = Links(self, terms)
        self.failure: Callable[[], BaseException] | None = None
        self._outlets: dict[Peer, Outlet] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, peer: Peer, request: Any) -> Taken:
        if not isinstance(request, Settle):
            raise RuntimeError("this is a sender, as you are: one of the two must be a receiver")
        check(request.handled, request.rejected, limit=4 * SPAN)
        with self.gate:
            outlet = self._outlets.get(peer)
            self.window.settle(outlet.lane if outlet else Lane(peer.name, 1, 1, _nothing), request)
            self.gate.open()
        return TAKEN

    def joined(self, core: Core, peer: Peer) -> None:
        if self.failure is not None:
            return  # another sender speaks for the stream: never join again
        task = asyncio.get_running_loop().create_task(self._join(core, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def left(self, peer: Peer) -> None:
        with self.gate:
            outlet = self._outlets.pop(peer, None)
            if outlet is not None:
                self.window.lose(outlet.lane)
            self.gate.open()

    def disturbed(self) -> None:
        with self.gate:
            self.gate.open()

    def drop(self, core: Core, peer: Peer, error: Exception) -> None:
        """A receiver failed a call. What it has is told when it joins anew, over the next connection."""
        if isinstance(error, RemoteError) and error.kind == StreamTaken.__name__:
            text = f"{error.message}; this sender may send no more: use another name for one of the two"
            self.failure = lambda: StreamTaken(text)
        with self.gate:
            self.counters.connections_dropped += 1
            self.gate.open()
        self.links.drop(core, peer, f"stream {self.stream!r}: {error}")

    def refuse(self, lane: Lane, number: int, why: str) -> None:
        """A message cannot be sent to this receiver, ever."""
        with self.gate:
            self.window.settle(lane, Settle(stream=self.stream, handled=(), refused=[(number, why)]))
            self.gate.open()

    async def _join(self, core: Core, peer: Peer) -> None:
        with self.gate:
            join = Join(stream=self.stream, life=self.life, floor=self.window.settled.below)
        try:
            offer = await peer.call_async(join, timeout=_CALL_S)
            if not isinstance(offer, Offer):
                raise FrameError(f"{peer.name} answered Join with {type(offer).__name__}")
            check(offer.handled, offer.held, limit=4 * SPAN)
        except PeerLost:
            return
        except (RemoteError, TimeoutError, ValueError) as error:
            self.drop(core, peer, error)
            return
        outlet = Outlet(self, core, peer, offer)
        with self.gate:
            if peer.state == "open":
                self._outlets[peer] = outlet
                self.window.offer(outlet.lane, offer)
                self.gate.open()


def make_engine(stream: str | None, keys: Keys | None, max_bytes: int) -> Sending:
    if stream == "":
        raise ValueError("stream is empty: give it a name, or None for one that is new")
    name = stream or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    return Sending(name, Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_bytes + HEADROOM, name=name))


def _nothing() -> None:
    pass
