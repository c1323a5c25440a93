"""The newest value of something, for whoever asks and whenever they come."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from drivetrain_transport._channels.gate import Gate
from drivetrain_transport._channels.links import Links, Owner, Terms
from drivetrain_transport._channels.payload import HEADROOM, size_of, to_frames
from drivetrain_transport._codec.frames import MAX_BYTES
from drivetrain_transport._codec.tensors import Blob
from drivetrain_transport._endpoints.core import Core
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats, Counters

T = TypeVar("T")

POLL_S = 10.0
"""A question that nobody has news for is answered after so long, and asked again."""


class Fetch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    topic: str
    epoch: bytes
    """Of the publisher whose value the subscriber has seen last; empty when it has seen none."""
    after: int
    wait: float


class Value(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    epoch: bytes
    version: int
    head: bytes
    blobs: list[Blob] = []


class Took(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The application has got this value. Nobody waits for the reply, Unchanged."""

    topic: str
    epoch: bytes
    version: int
    subscriber: bytes
    """Random, one for each subscriber: it stays the same over all of its connections."""


class Unchanged(msgspec.Struct, tag=True, frozen=True):
    pass


PROTOCOL = Protocol(requests=Fetch | Took, replies=Value | Unchanged, version="broadcast 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Generic[T]):
    """A value as a subscriber gets it."""

    value: T
    topic: str
    version: int
    """1 for the first value that a publisher gave the topic, 2 for the second, ..."""
    skipped: int
    """How many versions were published between the one that was seen before and this one, and never seen."""
    restarted: bool
    """The publisher is another than that of the value seen before; its versions began again, `skipped` is 0."""


@dataclass(slots=True)
class _Topic:
    version: int = 0
    head: bytes = b""
    blobs: list[Blob] = field(default_factory=list)
    takers: set[bytes] = field(default_factory=set)
    """The subscribers that have got this version."""


class _Publishing(Owner):
    def __init__(self, terms: Terms) -> None:
        self.epoch = secrets.token_bytes(8)
        self.counters = Counters()
        self.gate = Gate(Counters())  # the subscribers wait, not the publisher
        self.links = Links(self, terms)
        self.topics: dict[str, _Topic] = {}
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError(f"the publisher at {', '.join(self.links.addresses)} is closed")

    async def answer(self, peer: Peer, request: Any) -> Value | Unchanged:  # noqa: ARG002  # all are alike
        if isinstance(request, Took):
            self._taken(request)
            return Unchanged()
        assert isinstance(request, Fetch)

        def attempt() -> Value | None:
            topic = self.topics.get(request.topic)
            if topic is None or (request.epoch == self.epoch and topic.version <= request.after):
                return None
            self.counters.sent(size_of(topic.head, topic.blobs))
            return Value(epoch=self.epoch, version=topic.version, head=topic.head, blobs=topic.blobs)

        try:
            return await self.gate.wait_async(attempt, min(request.wait, POLL_S), lambda: "")
        except TimeoutError:
            return Unchanged()

    def _taken(self, took: Took) -> None:
        with self.gate:
            topic = self.topics.get(took.topic)
            if topic is not None and (self.epoch, topic.version) == (took.epoch, took.version):
                topic.takers.add(took.subscriber)
                self.gate.open()

    def joined(self, core: Core, peer: Peer) -> None:
        pass  # the subscriber speaks first

    def left(self, peer: Peer) -> None:
        pass

    def disturbed(self) -> None:
        with self.gate:
            self.gate.open()


class Publisher:
    """Keeps the last value of each topic, for subscribers that come at any time. A context manager.

        with Publisher.bind("tcp://127.0.0.1:5556") as publisher:
            version = publisher.publish(WeightsReady(step=7))

    Every subscriber asks for what is newer than what it has, and is answered at once or when there is something. So
    publishing waits for nobody; a late or restarted subscriber gets the last value at once; a slow one gets the newest
    and is told how many it skipped; and nothing is queued for anybody, so that memory is one value per topic, beside
    those that are just being written out.

    A publisher that dies takes its values along. Its successor's first value reaches every subscriber, whatever its
    version, because the two have different epochs.

    Every method may be called from any thread.
    """

    def __init__(self, engine: _Publishing, max_message_bytes: int) -> None:
        """Use `bind` or `connect`."""
        self._engine = engine
        self._max_bytes = max_message_bytes

    @classmethod
    def bind(
        cls,
        address: str = "tcp://127.0.0.1:0",
        *,
        keys: Keys | None = None,
        liveness: float = 10.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Listen for subscribers. Arguments and errors are those of `Endpoint.bind`."""
        engine = _Publishing(Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_message_bytes + HEADROOM))
        engine.links.bind(address, liveness)
        return cls(engine, max_message_bytes)

    @classmethod
    def connect(
        cls, addresses: str | Sequence[str], *, keys: Keys | None = None, max_message_bytes: int = MAX_BYTES
    ) -> Self:
        """Connect to subscribers that bind, at one or several addresses. Returns at once: they need not be there yet.

        Raises:
            ValueError: A malformed address, or one on another host without keys.
        """
        engine = _Publishing(Terms(protocol=PROTOCOL, keys=keys, max_bytes=max_message_bytes + HEADROOM))
        engine.links.connect([addresses] if isinstance(addresses, str) else addresses)
        return cls(engine, max_message_bytes)

    @property
    def address(self) -> str:
        """Where it listens, with the port that was taken; for a connecting side the addresses, comma-separated."""
        return ", ".join(self._engine.links.addresses)

    @property
    def stats(self) -> ChannelStats:
        """`messages_sent` counts each value once for each subscriber that got it."""
        return self._engine.counters.snapshot(self.address)

    def publish(self, obj: Any, *, topic: str = "", copy: bool = True) -> int:
        """Make this the topic's value. Waits for nobody.

        Args:
            obj: What `encode` takes.
            copy: Tensors are copied, so that they may be changed at once. With False they must stay as they are until
                the topic's next value is published, and the replies with this one are written out.

        Returns:
            The value's version.

        Raises:
            ValueError: It is over the size limit, or a tensor cannot travel.
            RuntimeError: The publisher is closed.
        """
        head, blobs = to_frames(obj, self._max_bytes, copy)
        engine = self._engine
        with engine.gate:
            engine.check_open()
            old = engine.topics.get(topic)
            version = old.version + 1 if old else 1
            engine.topics[topic] = _Topic(version, head, blobs)
            engine.gate.open()
        return version

    def wait_taken(self, subscribers: int, *, timeout: float, topic: str = "") -> None:
        """Wait until so many subscribers have got the topic's newest value, for example before closing.

        A subscriber counts when its `next` or `latest` has the value, in its own type: once, over however many
        connections, and also when it has left since.

        Raises:
            TimeoutError: Fewer have it in time; says how many.
            PeerRefused: Every address turned us away (keys on one side only, another version).
            RuntimeError: The publisher is closed, or was while this waited.
        """
        engine = self._engine

        def taken() -> int:
            return len(engine.topics[topic].takers) if topic in engine.topics else 0

        def attempt() -> bool | None:
            engine.check_open()
            if taken() >= subscribers:
                return True
            if (refusal := engine.links.refusal) is not None:
                raise refusal
            return None

        engine.gate.wait(
            attempt,
            timeout,
            lambda: (
                f"{taken()} of {subscribers} subscribers took the newest value of topic {topic!r} from "
                f"{engine.links.describe()} within {timeout:g} s"
            ),
        )

    def close(self) -> None:
        """Say goodbye and close. Replies that were begun arrive. `wait_taken` in other threads ends with RuntimeError.
        Idempotent; a few seconds at most."""
        engine = self._engine
        with engine.gate:
            engine.closed = True
            engine.gate.open()
        engine.links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
