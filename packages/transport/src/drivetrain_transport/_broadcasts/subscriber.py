"""The side that gets the newest value."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from drivetrain_transport._broadcasts.publisher import POLL_S, PROTOCOL, Fetch, Published, Took, Unchanged, Value
from drivetrain_transport._channels.gate import Gate
from drivetrain_transport._channels.links import Links, Owner, Terms
from drivetrain_transport._channels.payload import HEADROOM, from_frames, size_of
from drivetrain_transport._codec.frames import MAX_BYTES
from drivetrain_transport._endpoints.core import Core
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._errors import FrameError, PeerLost
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats, Counters

T = TypeVar("T")

_GRACE_S = 0.5


class _Subscribing(Owner):
    def __init__(self, terms: Terms) -> None:
        self.identity = secrets.token_bytes(8)
        self.counters = Counters()
        self.gate = Gate(self.counters)
        self.links = Links(self, terms)
        self.seen: dict[str, tuple[bytes, int]] = {}
        """The epoch and the version of the last value of each topic."""
        self.skipped = 0
        self.told: Future[Any] | None = None
        """That the publisher knows which value came last; and then it knows of those before."""
        self.closed = False

    async def answer(self, peer: Peer, request: Any) -> NoReturn:
        kind = type(request).__name__
        raise RuntimeError(f"{kind} of {peer.name}: this is a subscriber, as you are; one must be a publisher")

    def joined(self, core: Core, peer: Peer) -> None:
        pass  # `disturbed` follows

    def left(self, peer: Peer) -> None:
        pass

    def disturbed(self) -> None:
        with self.gate:
            self.gate.open()

    def publisher(self) -> Peer | None:
        """Whom to ask; None while nobody is there."""
        if self.closed:
            raise RuntimeError("the subscriber is closed")
        standing = [peer for peer in self.links.peers if peer.state == "open"]
        if not standing and (refusal := self.links.refusal) is not None:
            raise refusal
        return standing[-1] if standing else None


class Subscriber(Generic[T]):
    """Gets the values of a `Publisher`, whenever the one or the other was started. A context manager.

        with Subscriber.connect("tcp://127.0.0.1:5556", type=WeightsReady) as subscriber:
            ready = subscriber.next(timeout=60)

    It asks when it is called, and only then: what is published meanwhile is skipped but for the newest, and counted. A
    publisher that dies and comes back is found again, and while it is gone the calls wait, until their deadline.

    Every method may be called from any thread; the async ones, from any event loop.
    """

    def __init__(self, engine: _Subscribing, kind: Any, max_message_bytes: int) -> None:
        """Use `bind` or `connect`."""
        self._engine = engine
        self._kind = kind
        self._max_bytes = max_message_bytes

    @classmethod
    def bind(
        cls,
        address: str = "tcp://127.0.0.1:0",
        *,
        type: type[T],
        keys: Keys | None = None,
        liveness: float = 10.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Listen for the publisher. Arguments and errors are those of `Endpoint.bind`; `type` is as for `decode`."""
        engine = _Subscribing(Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_message_bytes + HEADROOM))
        engine.links.bind(address, liveness)
        return cls(engine, type, max_message_bytes)

    @classmethod
    def connect(
        cls, address: str, *, type: type[T], keys: Keys | None = None, max_message_bytes: int = MAX_BYTES
    ) -> Self:
        """Connect to a publisher that binds. Returns at once: it need not be there yet.

        Raises:
            ValueError: A malformed address, or one on another host without keys.
        """
        engine = _Subscribing(Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_message_bytes + HEADROOM))
        engine.links.connect([address])
        return cls(engine, type, max_message_bytes)

    @property
    def address(self) -> str:
        """Where it listens or connects."""
        return ", ".join(self._engine.links.addresses)

    @property
    def skipped(self) -> int:
        """How many versions were never seen here, all topics together, from the first value that was."""
        return self._engine.skipped

    @property
    def stats(self) -> ChannelStats:
        """`waits` are those for a publisher to be there, `refused` the values that were not of this type."""
        return self._engine.counters.snapshot(self.address)

    def latest(self, *, timeout: float, topic: str = "") -> Published[T]:
        """The topic's last value, seen before or not; waits while there is none. Errors as for `next`."""
        return self.next(after=-1, timeout=timeout, topic=topic)

    async def latest_async(self, *, timeout: float, topic: str = "") -> Published[T]:
        """The same as `latest` without blocking the event loop."""
        return await self.next_async(after=-1, timeout=timeout, topic=topic)

    def next(self, *, timeout: float, after: int | None = None, topic: str = "") -> Published[T]:
        """The newest value, as soon as it is newer than `after`.

        Args:
            timeout: Seconds until a value must be here, all of it.
            after: A version of the publisher whose value was seen last. By default that of the value that this
                subscriber got last; when it has got none, the last value that there is comes at once. So does the first
                one of a publisher that was restarted.
            topic: Whose values.

        Raises:
            TimeoutError: There was none in time; says whether a publisher is there.
            FrameError: The newest value is not of this subscriber's type. It counts as seen.
            PeerRefused: The publisher turned us away (keys on one side only, another version).
            RuntimeError: The subscriber is closed.
        """
        engine, end = self._engine, time.monotonic() + timeout
        while True:
            left = max(end - time.monotonic(), 0.0)
            peer = engine.gate.wait(engine.publisher, left, lambda: self._absent(topic, timeout))
            fetch, left = self._question(topic, after, end)
            try:
                reply = peer.call(fetch, timeout=left + _GRACE_S)
            except PeerLost:
                continue
            except TimeoutError:
                reply = Unchanged()
            if isinstance(reply, Value):
                return self._take(peer, fetch, reply)
            if time.monotonic() >= end:
                raise TimeoutError(self._silent(peer, fetch, timeout))

    async def next_async(self, *, timeout: float, after: int | None = None, topic: str = "") -> Published[T]:
        """The same as `next` without blocking the event loop."""
        engine, end = self._engine, time.monotonic() + timeout
        while True:
            left = max(end - time.monotonic(), 0.0)
            peer = await engine.gate.wait_async(engine.publisher, left, lambda: self._absent(topic, timeout))
            fetch, left = self._question(topic, after, end)
            try:
                reply = await peer.call_async(fetch, timeout=left + _GRACE_S)
            except PeerLost:
                await asyncio.sleep(0)
                continue
            except TimeoutError:
                reply = Unchanged()
            if isinstance(reply, Value):
                return self._take(peer, fetch, reply)
            if time.monotonic() >= end:
                raise TimeoutError(self._silent(peer, fetch, timeout))

    def close(self) -> None:
        """Say goodbye and close; calls that wait raise RuntimeError. Idempotent; a few seconds at most."""
        engine = self._engine
        with engine.gate:
            engine.closed = True
            engine.gate.open()
        if engine.told is not None:
            wait([engine.told], _GRACE_S)  # a goodbye would overtake it in the publisher
        engine.links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _question(self, topic: str, after: int | None, end: float) -> tuple[Fetch, float]:
        left = max(end - time.monotonic(), 0.0)
        with self._engine.gate:
            epoch, version = self._engine.seen.get(topic, (b"", 0))
        after = version if after is None else after
        return Fetch(topic=topic, epoch=epoch, after=after, wait=min(left, POLL_S)), left

    def _take(self, peer: Peer, fetch: Fetch, reply: Value) -> Published[T]:
        engine = self._engine
        same = fetch.epoch == reply.epoch
        size = size_of(reply.head, reply.blobs)
        with engine.gate:
            epoch, version = engine.seen.get(fetch.topic, (b"", 0))
            if epoch != reply.epoch or version < reply.version:
                engine.seen[fetch.topic] = reply.epoch, reply.version
                engine.skipped += reply.version - version - 1 if epoch == reply.epoch else 0
            engine.counters.received(size)
        try:
            value = from_frames(reply.head, reply.blobs, self._kind, self._max_bytes)
        except FrameError:
            with engine.gate:
                engine.counters.refused += 1
            raise
        took = Took(topic=fetch.topic, epoch=reply.epoch, version=reply.version, subscriber=engine.identity)
        with engine.gate, contextlib.suppress(PeerLost):  # then nobody is there who would ask
            engine.told = peer.tell(took)
        return Published(
            value=value,
            topic=fetch.topic,
            version=reply.version,
            skipped=reply.version - fetch.after - 1 if same and fetch.after >= 0 else 0,
            restarted=bool(fetch.epoch) and not same,
        )

    def _absent(self, topic: str, timeout: float) -> str:
        return f"no value of topic {topic!r} within {timeout:g} s: no publisher is there, at " + (
            self._engine.links.describe()
        )

    def _silent(self, peer: Peer, fetch: Fetch, timeout: float) -> str:
        return f"{peer.name} published nothing of topic {fetch.topic!r} after version {fetch.after} in {timeout:g} s"
