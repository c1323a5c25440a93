"""What a sender has given out: which receiver has which message, and what is settled. No sockets, no threads."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from drivetrain_transport._codec.tensors import Blob
from drivetrain_transport._errors import FrameError
from drivetrain_transport._stats import Counters
from drivetrain_transport._streams.numbers import Numbers, each
from drivetrain_transport._streams.wire import SPAN, Offer, Settle


@dataclass(slots=True, eq=False)
class Message:
    """One message that is not settled."""

    number: int
    head: bytes
    blobs: list[Blob]
    size: int
    redelivered: bool = False
    lane: Lane | None = None
    """Who has it, or is about to get it; None while it waits for somebody."""


@dataclass(slots=True, eq=False)
class Lane:
    """One receiver: its credit, and what it holds of this stream."""

    name: str
    credit: int
    credit_bytes: int
    kick: Callable[[], None]
    """Called when `outgoing` has got something."""
    window: dict[int, int] = field(default_factory=dict)
    """The numbers it holds or is about to get, and their bytes. What it settles leaves."""
    bytes: int = 0
    outgoing: deque[Message] = field(default_factory=deque)
    turn: int = 0

    def has_room(self, size: int) -> bool:
        """Whether the credit allows another message; the first one is always allowed, whatever its size."""
        return not self.window or (len(self.window) < self.credit and self.bytes + size <= self.credit_bytes)

    def put(self, number: int, size: int) -> None:
        self.bytes += size - self.window.get(number, 0)
        self.window[number] = size

    def drop(self, number: int) -> None:
        self.bytes -= self.window.pop(number, 0)


class Window:
    """A sender's side of a stream.

    Every number that was given to a message is in exactly one of three places until it is settled: on a lane, among the
    orphans that wait for one, or, after `resume`, not sent yet. Whatever happens to a lane, its messages become
    orphans, and orphans go before new messages.
    """

    def __init__(self, counters: Counters) -> None:
        self.next = 0
        self.settled = Numbers()
        self.unsettled: dict[int, Message] = {}
        self.lanes: list[Lane] = []
        self.refusals: deque[str] = deque()
        self.conflict = ""
        """Why no new number may be taken: a receiver knows numbers of the stream that this sender does not know."""
        self._resumed = False
        self._orphans: list[tuple[int, Message]] = []
        self._turns = 0
        self._counters = counters

    def place(self, number: int, head: bytes, blobs: list[Blob], size: int) -> bool:
        """Give a message to a receiver; False while none has room, or `blocker` says why it has to wait."""
        for lane in self.lanes:
            if number in lane.window:  # a message of this sender's former life, which still waits there
                self._assign(Message(number, head, blobs, size), lane)
                return True
        if self._first_orphan() is not None or self.blocker(number):
            return False
        chosen = self._choose(size)
        if chosen is None:
            return False
        message = Message(number, head, blobs, size)
        self._assign(message, chosen)
        chosen.outgoing.append(message)
        chosen.kick()
        return True

    def blocker(self, number: int) -> str:
        """What else keeps a number from being sent; empty when nothing does."""
        if number - self.settled.below < SPAN:
            return ""
        first = self.settled.below
        message = self.unsettled.get(first)
        where = "was not sent" if message is None else f"is at {message.lane.name if message.lane else 'no receiver'}"
        return f"number {first} {where} and is not acknowledged, and {SPAN} numbers may be on their way at most"

    def offer(self, lane: Lane, offer: Offer) -> None:
        """A receiver came, or came back."""
        known = Numbers(offer.below, offer.handled)
        top = max([known.top, *(stop for _, stop in offer.held)])
        if top > self.next or (offer.inherited and top and not self._resumed):
            self.conflict = f"{lane.name} knows messages of it up to number {top - 1}, from before this sender began"
        self._settle([number for number in self.unsettled if number in known])
        self.settled.merge(offer.below, offer.handled)
        for number in each(offer.held):
            if number in self.settled:
                continue
            message = self.unsettled.get(number)
            lane.put(number, message.size if message else 0)
            if message is not None and message.lane is None:
                message.lane = lane
        self.lanes.append(lane)
        self._dispatch()

    def raise_refusal(self, stream: str) -> None:
        """Report one message that a receiver refused, if there is one: FrameError."""
        if self.refusals:
            raise FrameError(f"stream {stream!r}: {self.refusals.popleft()}")

    def resume(self) -> None:
        """Take over what the receivers know: the stream goes on behind the last number that they have seen."""
        tops = [self.settled.top, *(max(lane.window) + 1 for lane in self.lanes if lane.window)]
        self.next = max(self.next, *tops)
        self._resumed = True
        self.conflict = ""

    def settle(self, lane: Lane, settle: Settle) -> None:
        """A receiver is done with some messages."""
        refused = dict(settle.refused)
        handled = [*each(settle.handled), *refused]
        for number in handled:
            lane.drop(number)
        self._settle(handled)
        for number in handled:
            self.settled.add(number)
        self.refusals.extend(f"message {number} was refused by {lane.name}: {why}" for number, why in refused.items())
        self._counters.refused += len(refused)
        for number in each(settle.rejected):
            lane.drop(number)
            message = self.unsettled.get(number)
            if message is not None and message.lane is lane:
                self._orphan(message, redelivered=True)
        self._dispatch()

    def lose(self, lane: Lane) -> None:
        """A receiver is gone: what it held goes to the others, or waits for the next."""
        if lane not in self.lanes:
            return
        self.lanes.remove(lane)
        unsent = {message.number for message in lane.outgoing}
        for number in lane.window:
            message = self.unsettled.get(number)
            if message is not None and message.lane is lane:
                self._orphan(message, redelivered=number not in unsent)
        self._dispatch()

    def take(self, lane: Lane, count: int, size: int) -> list[Message]:
        """The next messages to transmit to a receiver: some, of so many bytes together, or one that is larger."""
        batch: list[Message] = []
        while lane.outgoing and len(batch) < count and (not batch or size >= lane.outgoing[0].size):
            message = lane.outgoing.popleft()
            if message.number not in self.unsettled:  # another receiver had it already
                lane.drop(message.number)
                continue
            size -= message.size
            batch.append(message)
        return batch

    def _assign(self, message: Message, lane: Lane) -> None:
        message.lane = lane
        lane.put(message.number, message.size)
        self.unsettled[message.number] = message
        self.next = max(self.next, message.number + 1)
        self._counters.sent(message.size)
        self._counters.queue(len(self.unsettled))

    def _choose(self, size: int) -> Lane | None:
        """The receiver that holds the smallest part of its credit; of equal ones, who was not chosen for longest."""
        free = [lane for lane in self.lanes if lane.has_room(size)]
        if not free:
            return None
        chosen = min(free, key=lambda lane: (len(lane.window) / lane.credit, lane.turn))
        self._turns += 1
        chosen.turn = self._turns
        return chosen

    def _settle(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.unsettled.pop(number, None)
        self._counters.queue(len(self.unsettled))

    def _orphan(self, message: Message, *, redelivered: bool) -> None:
        message.lane = None
        message.redelivered |= redelivered
        heapq.heappush(self._orphans, (message.number, message))

    def _first_orphan(self) -> Message | None:
        while self._orphans:
            number, message = self._orphans[0]
            if message.lane is None and self.unsettled.get(number) is message:
                return message
            heapq.heappop(self._orphans)
        return None

    def _dispatch(self) -> None:
        while (message := self._first_orphan()) is not None:
            lane = self._choose(message.size)
            if lane is None:
                return
            heapq.heappop(self._orphans)
            message.lane = lane
            lane.put(message.number, message.size)
            lane.outgoing.append(message)
            self._counters.redelivered += message.redelivered
            lane.kick()
