"""The sending side of a work stream, as the application sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from drivetrain_transport._channels.payload import size_of, to_frames
from drivetrain_transport._codec.frames import MAX_BYTES
from drivetrain_transport._codec.tensors import Blob
from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats
from drivetrain_transport._streams.numbers import Ranges, each
from drivetrain_transport._streams.sending import Sending, make_engine

log = logging.getLogger("drivetrain_transport")


class Payload(NamedTuple):
    """An encoded message."""

    head: bytes
    blobs: list[Blob]
    size: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a stream is handled, as its receivers know."""

    next: int
    """One past the last number that any receiver has seen; what `send` gives to the next message."""
    missing: Ranges
    """The numbers below `next` that are not handled, as (first, one past the last). Send those again."""

    def todo(self, stop: int) -> Iterator[int]:
        """The numbers below `stop` that are still to be sent: the missing ones, and those from `next` on."""
        yield from (number for number in each(self.missing) if number < stop)
        yield from range(self.next, stop)


class WorkSender:
    """Sends messages to whichever receivers have room, and knows which of them are handled. A context manager.

        with WorkSender.connect("tcp://127.0.0.1:5555", stream="worker-3") as sender:
            for sample in samples:
                sender.send(sample, timeout=60)

    Either side may bind, and be there first. Many senders and many receivers may share an address, and a side that
    connects may connect to several. A connection that breaks is made again by itself.

    **Flow control.** Each receiver grants credit: so many messages and so many bytes of one stream that it has not
    handled. `send` waits while no receiver has credit left; so both sides' memory is bounded, and nothing is dropped. A
    message goes to the receiver that holds the smallest part of its credit.

    **What is guaranteed.** A message is its stream's name and its number. It is kept here until a receiver says that it
    is handled (acknowledged by the application there).

    * A receiver dies, or its connection breaks: what it has not acknowledged is sent to another, marked as redelivered,
      or to itself when it returns. A receiver that returns says what it has handled and what it still holds, so neither
      is sent to it again, and no acknowledgement is lost with a connection.
    * This process dies: what is in the receivers' hands is still handled; what was in its own memory is gone. Started
      again under the same stream name, `resume` says which numbers are not handled, and the application sends those
      again. A number that is sent again must hold the same message: where the application cannot make it again, let
      each start have a stream of its own name, which is the default.
    * So each message is handled at least once by the group of receivers, as long as its sender lives or resumes; at
      most once by any one receiver process; and exactly once by all of them together, whoever is killed when, where
      they share a `Journal` and the effect is part of its transaction.

    **Order.** Messages that go to one receiver arrive in the order in which they were sent, except redelivered ones,
    which come when their receiver is lost, ascending, ahead of what is not sent yet. Between receivers there is none.

    Every method may be called from any thread; the async ones, from any event loop.
    """

    def __init__(self, engine: Sending, max_message_bytes: int) -> None:
        """Use `bind` or `connect`."""
        self._engine = engine
        self._max_bytes = max_message_bytes
        self._closed = False

    @classmethod
    def bind(
        cls,
        address: str = "tcp://127.0.0.1:0",
        *,
        stream: str | None = None,
        keys: Keys | None = None,
        liveness: float = 10.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Listen for receivers.

        Args:
            address: As for `Endpoint.bind`, and so are `keys` and `liveness`.
            stream: The stream's name; no two senders may live under one. By default one that no other start has.
            max_message_bytes: The largest message, in bytes. A receiver may take less.

        Raises:
            ValueError, OSError: As `Endpoint.bind`.
        """
        engine = make_engine(stream, keys, max_message_bytes)
        engine.links.bind(address, liveness)
        return cls(engine, max_message_bytes)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        stream: str | None = None,
        keys: Keys | None = None,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Connect to receivers that bind, at one or several addresses. Returns at once: they need not be there yet.

        Raises:
            ValueError: A malformed address, or one on another host without keys.
        """
        engine = make_engine(stream, keys, max_message_bytes)
        engine.links.connect([addresses] if isinstance(addresses, str) else addresses)
        return cls(engine, max_message_bytes)

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._engine.stream

    @property
    def address(self) -> str:
        """Where it listens, with the port that was taken; for a connecting side the addresses, comma-separated."""
        return ", ".join(self._engine.links.addresses)

    @property
    def unacknowledged(self) -> int:
        """How many messages were sent and are not known to be handled."""
        return len(self._engine.window.unsettled)

    @property
    def stats(self) -> ChannelStats:
        """`queued` are the messages that are not acknowledged, `waits` those of `send`, `flush` and `resume`,
        `duplicates` the calls of `send` for numbers that were handled already, `refused` what receivers refused."""
        return self._engine.counters.snapshot(self.stream)

    def send(self, obj: Any, *, timeout: float, number: int | None = None, copy: bool = True) -> int:
        """Hand over a message, when a receiver has credit for it, and return its number.

        It returns before the message is handled, or even written out: see `flush`.

        Args:
            obj: What `encode` takes.
            timeout: Seconds to wait for credit.
            number: The message's number; by default the one after the largest so far. Who gives it says that no other
                message ever had this number: one that is handled already is not sent again.
            copy: Tensors are copied, so that they may be changed at once. With False they travel from where they lie,
                and must stay as they are until the message is acknowledged.

        Raises:
            TimeoutError: No receiver had credit in time; says who has how much. Nothing was sent.
            FrameError: An earlier message was refused by its receiver, which says why. Each is reported once, and the
                message of this call was not sent.
            ValueError: It is over the size limit, a tensor cannot travel, or the number is negative or on its way.
            RuntimeError: The sender is closed, or no number was given and a receiver knows numbers of this stream that
                this sender does not know: `resume` was not called, or that receiver came after it.
            StreamTaken: Another sender sends under the same name.
            PeerRefused: Every address turned us away (keys on one side only, another version).
        """
        payload = self._encode(obj, copy)
        return self._engine.gate.wait(
            lambda: self._place(payload, number), timeout, lambda: self._late(payload.kind, timeout, number)
        )

    async def send_async(self, obj: Any, *, timeout: float, number: int | None = None, copy: bool = True) -> int:
        """The same as `send` without blocking the event loop. Cancelled, it has not sent."""
        payload = self._encode(obj, copy)
        return await self._engine.gate.wait_async(
            lambda: self._place(payload, number), timeout, lambda: self._late(payload.kind, timeout, number)
        )

    def resume(self, *, timeout: float, receivers: int = 1) -> Progress:
        """Ask how far the stream is, and go on from there. For a sender that was started again; before it sends.

        Args:
            timeout: Seconds to wait for the receivers.
            receivers: How many must have answered. With a journal that they share, one knows everything; without, what
                only an absent one has handled is missing, and would be repeated.

        Returns:
            The numbers to send again, and the next new one. A missing message that a living receiver still holds is
            not transmitted when it is sent again: it is tied to the one that is there.

        Raises:
            TimeoutError: Fewer receivers answered in time.
        """
        engine = self._engine

        def attempt() -> Progress | None:
            self._check_open()
            if len(engine.window.lanes) < receivers:
                return None
            engine.window.resume()
            return Progress(next=engine.window.next, missing=engine.window.settled.missing(engine.window.next))

        return engine.gate.wait(attempt, timeout, lambda: self._late(f"question ({receivers} asked)", timeout))

    def flush(self, *, timeout: float) -> None:
        """Wait until every message is acknowledged.

        Raises:
            TimeoutError: Some are not in time; says how many, and who has them.
            FrameError, StreamTaken: As for `send`.
        """
        self._engine.gate.wait(self._flushed, timeout, lambda: self._unflushed(timeout))

    async def flush_async(self, *, timeout: float) -> None:
        """The same as `flush` without blocking the event loop."""
        await self._engine.gate.wait_async(self._flushed, timeout, lambda: self._unflushed(timeout))

    def close(self, *, timeout: float = 5.0) -> int:
        """Wait up to `timeout` seconds for the acknowledgements, then close. Idempotent; a few seconds more at most.

        Returns:
            How many messages are not known to be handled. Those that receivers hold may still be. Also logged.
        """
        engine = self._engine
        check_timeout(timeout)
        if not self._closed:
            try:
                engine.gate.wait(lambda: True if not engine.window.unsettled else None, timeout, lambda: "")
            except TimeoutError:
                with engine.gate:
                    log.warning("%s", self._unflushed(timeout))
            with engine.gate:
                self._closed = True
                engine.gate.open()
        engine.links.close()
        return self.unacknowledged

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After a block that went well, TimeoutError when messages are not acknowledged in 5 s."""
        left = self.close(timeout=5.0 if kind is None else 0.0)
        if left and kind is None:
            raise TimeoutError(f"{left} messages of stream {self.stream!r} were not acknowledged when it closed")

    def _encode(self, obj: Any, copy: bool) -> Payload:
        head, blobs = to_frames(obj, self._max_bytes, copy)
        return Payload(head, blobs, size_of(head, blobs), type(obj).__name__)

    def _check_open(self) -> None:
        engine = self._engine
        if self._closed:
            raise RuntimeError(f"the sender of stream {self.stream!r} is closed")
        if engine.failure is not None:
            raise engine.failure()
        if not engine.window.lanes and (refusal := engine.links.refusal) is not None:
            raise refusal

    def _place(self, payload: Payload, number: int | None) -> int | None:
        self._check_open()
        window = self._engine.window
        window.raise_refusal(self.stream)
        if window.conflict and number is None:
            raise RuntimeError(
                f"stream {self.stream!r}: {window.conflict}. Call resume() first, or give the stream another name"
            )
        chosen = window.next if number is None else number
        if chosen < 0 or chosen in window.unsettled:
            raise ValueError(f"number {chosen} of stream {self.stream!r} is negative or on its way already")
        if chosen in window.settled:
            self._engine.counters.duplicates += 1
            return chosen
        return chosen if window.place(chosen, payload.head, payload.blobs, payload.size) else None

    def _flushed(self) -> bool | None:
        self._check_open()
        self._engine.window.raise_refusal(self.stream)
        return None if self._engine.window.unsettled else True

    def _late(self, kind: str, timeout: float, number: int | None = None) -> str:
        engine = self._engine
        blocker = engine.window.blocker(engine.window.next if number is None else number)
        return f"no receiver took a {kind} of stream {self.stream!r} within {timeout:g} s: {blocker or self._lanes()}"

    def _unflushed(self, timeout: float) -> str:
        window = self._engine.window
        numbers = sorted(window.unsettled)
        first = f", the first is number {numbers[0]}" if numbers else ""
        return (
            f"{len(numbers)} messages of stream {self.stream!r} are not acknowledged after {timeout:g} s{first}: "
            f"{self._lanes()}"
        )

    def _lanes(self) -> str:
        engine = self._engine
        if not engine.window.lanes:
            return f"no receiver is there, at {engine.links.describe()}"
        return "; ".join(
            f"{lane.name} holds {len(lane.window)} of {lane.credit} messages, {lane.bytes} of {lane.credit_bytes} bytes"
            for lane in engine.window.lanes
        )
