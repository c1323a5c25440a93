"""The receiving side of a work stream, as the application sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from drivetrain_transport._channels.payload import from_frames
from drivetrain_transport._codec.frames import MAX_BYTES
from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._errors import FrameError
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats
from drivetrain_transport._streams.inbox import Entry
from drivetrain_transport._streams.journal import Journal
from drivetrain_transport._streams.receiving import Receiving, make_engine

T = TypeVar("T")

log = logging.getLogger("drivetrain_transport")


class Delivery(Generic[T]):
    """One message in the application's hands, until it is acknowledged or rejected.

    As a context manager it acknowledges when the block ends well, and rejects when it raises.
    """

    def __init__(self, value: T, entry: Entry, receiver: WorkReceiver[T]) -> None:
        """Receivers make deliveries."""
        self.value = value
        """The message."""
        self.recorded = False
        """Whether the journal has it as handled, in a transaction that is committed."""
        self._entry = entry
        self._receiver = receiver
        self._over = False
        self._acked = False

    def __repr__(self) -> str:
        return f"<Delivery {self.number} of {self.stream!r}{' again' if self.redelivered else ''}>"

    @property
    def stream(self) -> str:
        """The name of its stream."""
        return self._entry.source.stream

    @property
    def number(self) -> int:
        """Its number in the stream."""
        return self._entry.number

    @property
    def redelivered(self) -> bool:
        """Whether it was sent to somebody before, who may have begun to handle it."""
        return self._entry.item.redelivered

    def ack(self) -> None:
        """It is handled: it is not delivered again. Where the receiver has a journal, recorded there first. Idempotent.

        Raises:
            RuntimeError: It was rejected; or the receiver is closed and has no journal: it will be delivered again.
            TimeoutError: The journal was in another process's transaction for too long; it is still in your hands.
            JournalFailed: The journal's file cannot be written; it is still in your hands.
        """
        self._receiver._finish(self, handled=True)

    def reject(self) -> None:
        """It is not handled, and not going to be here: its sender is to send it again, to whoever has room. Idempotent.

        Raises:
            RuntimeError: It was acknowledged.
        """
        self._receiver._finish(self, handled=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            self._receiver._finish(self, handled=kind is None)


class WorkReceiver(Generic[T]):
    """Takes messages from any number of senders, and tells each which are handled. A context manager.

        with WorkReceiver.bind("tcp://127.0.0.1:5555", type=Sample) as receiver:
            while True:
                with receiver.receive(timeout=60) as delivery:
                    train_on(delivery.value)

    See `WorkSender` for what is guaranteed. In short: a message that was received and not acknowledged when this
    process dies is delivered again, to another receiver or to the next life of this one; one that was acknowledged is
    not, if the acknowledgement had left this process or there is a `Journal`. Within one process no message is
    delivered twice, unless it was rejected.

    What arrived from a sender that is lost since is delivered all the same: it may be dead, and nobody else has the
    message. If it lives, and has sent the message to another receiver meanwhile, both deliver it; with a journal that
    they share, one of them drops it, or is told `AlreadyHandled`.

    Memory is bounded by the credit of each stream; a message that is larger than `credit_bytes` comes alone. What was
    received and is neither acknowledged nor rejected counts against the credit, like what still waits here: who holds
    as many deliveries as the credit allows gets no more of that stream, and `receive` says so in its TimeoutError.

    Every method may be called from any thread; the async ones, from any event loop.
    """

    def __init__(self, engine: Receiving, kind: Any, max_message_bytes: int, auto_ack: bool) -> None:
        """Use `bind` or `connect`."""
        self._engine = engine
        self._kind = kind
        self._max_bytes = max_message_bytes
        self._auto_ack = auto_ack
        self._last: Delivery[T] | None = None
        self._closed = False

    @classmethod
    def bind(
        cls,
        address: str = "tcp://127.0.0.1:0",
        *,
        type: type[T],
        credit: int = 1024,
        credit_bytes: int = 256 << 20,
        journal: Journal | None = None,
        auto_ack: bool = False,
        name: str | None = None,
        keys: Keys | None = None,
        liveness: float = 10.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Listen for senders.

        Args:
            address: As for `Endpoint.bind`, and so are `keys` and `liveness`.
            type: What the messages are; see `decode`.
            credit: How many messages of one stream may be here without having been handled, those in your hands
                included: more than you collect before you acknowledge. 1 or more.
            credit_bytes: The same in bytes.
            journal: Where handled messages are recorded. It is not closed with the receiver.
            auto_ack: Acknowledge each message when the next one is asked for, and on `close`. For one thread.
            name: What senders call this receiver in their errors; by default host and process number.
            max_message_bytes: The largest message; larger ones are refused.

        Raises:
            ValueError, OSError: As `Endpoint.bind`; ValueError also for a credit that is not positive.
        """
        engine = make_engine(name, credit, credit_bytes, journal, keys, max_message_bytes)
        engine.links.bind(address, liveness)
        return cls(engine, type, max_message_bytes, auto_ack)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        type: type[T],
        credit: int = 1024,
        credit_bytes: int = 256 << 20,
        journal: Journal | None = None,
        auto_ack: bool = False,
        name: str | None = None,
        keys: Keys | None = None,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Connect to senders that bind, at one or several addresses. Returns at once: they need not be there yet.

        Raises:
            ValueError: A malformed address, one on another host without keys, or a credit that is not positive.
        """
        engine = make_engine(name, credit, credit_bytes, journal, keys, max_message_bytes)
        engine.links.connect([addresses] if isinstance(addresses, str) else addresses)
        return cls(engine, type, max_message_bytes, auto_ack)

    @property
    def address(self) -> str:
        """Where it listens, with the port that was taken; for a connecting side the addresses, comma-separated."""
        return ", ".join(self._engine.links.addresses)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams whose senders are connected now."""
        with self._engine.gate:
            return tuple(source.stream for source in self._engine.senders())

    @property
    def held_bytes_high_water(self) -> int:
        """The most bytes of messages that were ever here without having been handled."""
        return self._engine.inbox.held_bytes_high_water

    @property
    def stats(self) -> ChannelStats:
        """`queued` are the messages here that are not handled, `waits` those of `receive`, `duplicates` the messages
        that were dropped because they were here or handled already, `refused` those that were none of this type."""
        return self._engine.counters.snapshot(self.address)

    def receive(self, *, timeout: float) -> Delivery[T]:
        """The next message; wait for it at most so many seconds.

        Raises:
            TimeoutError: None came in time; says which senders are there, and what of the credit your own
                unacknowledged deliveries take up.
            PeerRefused: Every address turned us away (keys on one side only, another version).
            JournalFailed: The journal's file cannot be read; the message waits here.
            RuntimeError: The receiver is closed.
        """
        end = time.monotonic() + check_timeout(timeout)
        self._ack_last()
        while True:
            left = max(end - time.monotonic(), 0.0)
            entry = self._engine.gate.wait(self._pop, left, lambda: self._late(timeout))
            if (delivery := self._deliver(entry)) is not None:
                return delivery

    async def receive_async(self, *, timeout: float) -> Delivery[T]:
        """The same as `receive` without blocking the event loop. Cancelled, it has taken nothing."""
        end = time.monotonic() + check_timeout(timeout)
        self._ack_last()
        while True:
            left = max(end - time.monotonic(), 0.0)
            entry = await self._engine.gate.wait_async(self._pop, left, lambda: self._late(timeout))
            if (delivery := self._deliver(entry)) is not None:
                return delivery

    def deliveries(self, *, timeout: float) -> Iterator[Delivery[T]]:
        """One message after the other, until none has come for `timeout` seconds."""
        while True:
            try:
                yield self.receive(timeout=timeout)
            except TimeoutError:
                return

    def close(self, *, timeout: float = 5.0) -> int:
        """Tell the senders what is handled, at most for so long, then close. Idempotent; a few seconds more at most.

        Returns:
            How many messages were here without having been handled. Their senders give them to others.
        """
        engine = self._engine
        check_timeout(timeout)
        if not self._closed:
            if self._auto_ack:
                self._ack_last()
            with engine.gate:
                self._closed = engine.closing = True
                engine.gate.open()
            try:
                engine.gate.wait(lambda: True if engine.told() else None, timeout, lambda: "")
            except TimeoutError:
                log.warning("%s closed before every sender knew what is handled: they may send it again", self.address)
        engine.links.close()
        return engine.inbox.held

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. With auto_ack, a block that raised leaves its last message unacknowledged."""
        if kind is not None:
            self._last = None
        self.close(timeout=5.0 if kind is None else 1.0)

    def _ack_last(self) -> None:
        last, self._last = self._last, None
        if last is not None and not last._over:
            last.ack()

    def _pop(self) -> Entry | None:
        if self._closed:
            raise RuntimeError(f"the receiver at {self.address} is closed")
        entry = self._engine.inbox.pop()
        if entry is None and (refusal := self._engine.links.refusal) is not None:
            raise refusal
        return entry

    def _deliver(self, entry: Entry) -> Delivery[T] | None:
        """Hand a message out, unless it is handled already or is none of ours."""
        engine, item = self._engine, entry.item
        try:
            if engine.journal is not None and engine.journal.is_handled(entry.source.stream, entry.number):
                with engine.gate:
                    engine.inbox.duplicate(entry)
                return None
            value = from_frames(item.head, item.blobs, self._kind, self._max_bytes)
        except FrameError as error:
            log.warning("message %d of stream %r is refused: %s", entry.number, entry.source.stream, error)
            with engine.gate:
                engine.inbox.refuse(entry, str(error))
            return None
        except BaseException:
            with engine.gate:
                engine.inbox.push_back(entry)
            raise
        item.head, item.blobs = b"", []  # the value has taken the tensors' memory over
        delivery: Delivery[T] = Delivery(value, entry, self)  # Delivery[T](...) would take twice as long
        if self._auto_ack:
            self._last = delivery
        return delivery

    def _finish(self, delivery: Delivery[T], *, handled: bool) -> None:
        engine, entry = self._engine, delivery._entry
        if delivery._over:
            if handled != delivery._acked:
                raise RuntimeError(f"{delivery!r} was {'acknowledged' if delivery._acked else 'rejected'} already")
            return
        if handled and engine.journal is not None and not delivery.recorded:
            engine.journal.record(entry.source.stream, entry.number)
            delivery.recorded = True
        if handled and self._closed and not delivery.recorded:
            raise RuntimeError(f"the receiver at {self.address} is closed: {delivery!r} will be delivered again")
        delivery._over, delivery._acked = True, handled
        with engine.gate:
            if handled:
                engine.inbox.settle(entry)
            else:
                engine.inbox.reject(entry)

    def _late(self, timeout: float) -> str:
        kind = getattr(self._kind, "__name__", str(self._kind))
        senders = [source.stream for source in self._engine.senders()]
        where = f"connected are {', '.join(senders)}" if senders else f"no sender is there, at {self._where()}"
        hands = self._engine.inbox.unsettled()
        credit = f"; in your hands, not acknowledged and counted against the credit: {hands}" if hands else ""
        return f"no {kind} arrived within {timeout:g} s: {where}{credit}"

    def _where(self) -> str:
        return self._engine.links.describe()
