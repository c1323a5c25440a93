"""What a receiver does on its endpoints' threads."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from typing import Any

from drivetrain_transport._channels.gate import Gate
from drivetrain_transport._channels.links import Links, Owner, Terms
from drivetrain_transport._channels.payload import HEADROOM
from drivetrain_transport._endpoints.core import Core
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._errors import PeerLost, RemoteError
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import Counters
from drivetrain_transport._streams.inbox import Inbox, Source
from drivetrain_transport._streams.journal import Journal
from drivetrain_transport._streams.wire import PROTOCOL, TAKEN, Join, Offer, Push, Settle, Taken

_CALL_S = 600.0


class Reporter:
    """Tells the sender of one stream what became of its messages, over one connection. Lives on that one's loop."""

    def __init__(self, owner: Receiving, core: Core, peer: Peer, stream: str) -> None:
        self.busy = False
        self._owner = owner
        self._core = core
        self._peer = peer
        self._stream = stream
        self._scheduled = False
        self._task: asyncio.Task[None] | None = None

    def kick(self) -> None:
        """There is something to tell. Called under the gate, on any thread."""
        if not self._scheduled:
            self._scheduled = self._core.post(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self.busy:
            return
        with self._owner.gate:
            source = self._owner.inbox.sources[self._stream]
            if source.peer is not self._peer:
                return
            settle = self._owner.inbox.owed(source)
            self.busy = settle is not None
            if self._owner.closing and not self.busy:
                self._owner.gate.open()  # whoever closes waits for this
        if settle is not None:
            self._task = asyncio.get_running_loop().create_task(self._tell(settle))

    async def _tell(self, settle: Settle) -> None:
        try:
            await self._peer.call_async(settle, timeout=_CALL_S)
        except PeerLost:
            pass  # the offer over the next connection says it
        except (RemoteError, TimeoutError, ValueError) as error:
            self._owner.drop(self._core, self._peer, f"stream {self._stream!r}: {error}")  # and then the same
        finally:
            self.busy = False
        self._flush()


class Receiving(Owner):
    """What a `WorkReceiver` does on its endpoints' loops."""

    def __init__(self, terms: Terms, credit: int, credit_bytes: int, journal: Journal | None) -> None:
        self.counters = Counters()
        self.gate = Gate(self.counters)
        self.inbox = Inbox(self.counters, name=terms.name, credit=credit, credit_bytes=credit_bytes)
        self.links = Links(self, terms)
        self.journal = journal
        self.closing = False
        self._reporters: dict[str, Reporter] = {}

    async def answer(self, peer: Peer, request: Any) -> Offer | Taken:
        match request:
            case Push():
                with self.gate:
                    self.inbox.take(request, peer)
                    self.gate.open()
                return TAKEN
            case Join():
                return self._offer(request, peer)
            case _:
                raise RuntimeError("this is a receiver, as you are: one of the two must be a sender")

    def joined(self, core: Core, peer: Peer) -> None:
        pass  # the sender speaks first

    def left(self, peer: Peer) -> None:
        with self.gate:
            self.inbox.leave(peer)
            self.gate.open()

    def disturbed(self) -> None:
        with self.gate:
            self.gate.open()

    def drop(self, core: Core, peer: Peer, why: str) -> None:
        """A sender failed a call."""
        with self.gate:
            self.counters.connections_dropped += 1
        self.links.drop(core, peer, why)

    def told(self) -> bool:
        """Whether every sender that is here knows everything."""
        return not any(
            source.peer is not None
            and (source.done or source.rejected or source.refused or self._reporters[source.stream].busy)
            for source in self.inbox.sources.values()
        )

    def senders(self) -> list[Source]:
        return [source for source in self.inbox.sources.values() if source.peer is not None]

    def _offer(self, join: Join, peer: Peer) -> Offer:
        core = self.links.core_here()
        journaled = self.journal.handled(join.stream) if self.journal is not None else None
        reporter = Reporter(self, core, peer, join.stream)
        with self.gate:
            offer = self.inbox.join(join, peer, reporter.kick, journaled)
            self._reporters[join.stream] = reporter
            for stream in self._reporters.keys() - self.inbox.sources.keys():
                del self._reporters[stream]
        return offer


def make_engine(
    name: str | None, credit: int, credit_bytes: int, journal: Journal | None, keys: Keys | None, max_bytes: int
) -> Receiving:
    if credit < 1 or credit_bytes < 1:
        raise ValueError(f"credit is {credit}, credit_bytes {credit_bytes}: both must be at least 1")
    known = name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
    terms = Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_bytes + HEADROOM, name=known)
    return Receiving(terms, credit, credit_bytes, journal)
