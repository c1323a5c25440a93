"""What a receiver has got: messages that wait, those in the application's hands, and what is handled. No sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain_transport._channels.payload import size_of
from drivetrain_transport._errors import FrameError, StreamTaken
from drivetrain_transport._stats import Counters
from drivetrain_transport._streams.numbers import Numbers, to_ranges
from drivetrain_transport._streams.wire import Item, Join, Offer, Push, Settle

if TYPE_CHECKING:
    from drivetrain_transport._endpoints.peer import Peer

_IDLE_STREAMS = 4096
_RETIRED = 16
_NAMED = 4


@dataclass(slots=True, eq=False)
class Entry:
    """One message that is not handled yet."""

    source: Source
    item: Item
    size: int

    @property
    def number(self) -> int:
        return self.item.number


@dataclass(slots=True, eq=False)
class Source:
    """One stream: its sender's newest connection, what is handled of it, and what is held."""

    stream: str
    life: bytes = b""
    retired: deque[bytes] = field(default_factory=lambda: deque(maxlen=_RETIRED))
    peer: Peer | None = None
    kick: Callable[[], None] | None = None
    """Called when there is something to tell the sender; None while there is none."""
    handled: Numbers = field(default_factory=Numbers)
    held: dict[int, Entry] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    """Handled, and the sender was not told. Without a sender it is not kept: the next Offer holds it."""
    rejected: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)

    def tell(self) -> None:
        if self.kick is not None:
            self.kick()


class Inbox:
    """A receiver's side of all its streams.

    A message is in the queue, in the application's hands (both are `held`), or handled. Its number stays known as
    handled for as long as its sender might send it again, which the sender's floor says.
    """

    def __init__(self, counters: Counters, *, name: str, credit: int, credit_bytes: int) -> None:
        self.sources: dict[str, Source] = {}
        self.held_bytes = 0
        self.held_bytes_high_water = 0
        self._name = name
        self._credit = credit
        self._credit_bytes = credit_bytes
        self._queue: deque[Entry] = deque()
        self._held = 0
        self._counters = counters

    def join(self, join: Join, peer: Peer, kick: Callable[[], None], journaled: Numbers | None) -> Offer:
        """A sender came, or came back; what it may send, and what it need not.

        Raises:
            StreamTaken: Another sender has taken the stream over since this one began.
        """
        source = self.sources.pop(join.stream, None) or Source(join.stream)
        self.sources[join.stream] = source  # the order is that of the last to join
        self._forget_idle()
        if join.life in source.retired:
            raise StreamTaken(f"another sender has taken stream {join.stream!r} over")
        inherited = source.life not in (b"", join.life)
        if inherited:
            source.retired.append(source.life)
        source.life, source.peer, source.kick = join.life, peer, kick
        if journaled is not None:
            source.handled.merge(journaled.below, journaled.ranges())
        source.handled.raise_to(join.floor)
        source.done.clear()
        source.rejected.clear()
        if source.refused:
            source.tell()
        return Offer(
            name=self._name,
            credit=self._credit,
            credit_bytes=self._credit_bytes,
            below=source.handled.below,
            handled=source.handled.ranges(),
            held=to_ranges(number for number in source.held if number not in source.handled),
            inherited=inherited,
        )

    def leave(self, peer: Peer) -> None:
        """A connection is gone. What it brought stays: its sender may be dead, and nobody else has it then."""
        for source in self.sources.values():
            if source.peer is peer:
                source.peer = source.kick = None
                source.done.clear()
                source.rejected.clear()

    def take(self, push: Push, peer: Peer) -> None:
        """Messages arrive.

        Raises:
            StreamTaken: Another sender has taken the stream over.
            FrameError: The sender never joined, or came back since over another connection.
        """
        source = self.sources.get(push.stream)
        if source is not None and push.life in source.retired:
            raise StreamTaken(f"another sender has taken stream {push.stream!r} over")
        if source is None or source.peer is not peer or source.life != push.life:
            raise FrameError(f"messages of stream {push.stream!r} over a connection where it did not join")
        source.handled.raise_to(push.floor)
        for item in push.items:
            size = size_of(item.head, item.blobs)
            self._counters.received(size)
            if item.number in source.handled:
                self._counters.duplicates += 1
                source.done.append(item.number)
            elif item.number in source.held:
                self._counters.duplicates += 1
            else:
                entry = source.held[item.number] = Entry(source, item, size)
                self._queue.append(entry)
                self._count(1, size)
        if source.done:
            source.tell()

    def pop(self) -> Entry | None:
        """The next message for the application; None while there is none."""
        while self._queue:
            entry = self._queue.popleft()
            if entry.number not in entry.source.handled:
                return entry
            self.duplicate(entry)
        return None

    def push_back(self, entry: Entry) -> None:
        """The application did not get it after all."""
        self._queue.appendleft(entry)

    def duplicate(self, entry: Entry) -> None:
        """It turns out to be handled already, by somebody else."""
        self._counters.duplicates += 1
        self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """It is handled."""
        source = entry.source
        if self._release(entry):
            source.handled.add(entry.number)
            source.done.append(entry.number)
            source.tell()

    def reject(self, entry: Entry) -> None:
        """Its sender is to send it again, to anybody."""
        source = entry.source
        if self._release(entry):
            source.rejected.append(entry.number)
            source.tell()

    def refuse(self, entry: Entry, why: str) -> None:
        """It is no message of ours; its sender is told and does not send it again."""
        source = entry.source
        if self._release(entry):
            self._counters.refused += 1
            source.handled.add(entry.number)
            source.refused.append((entry.number, why))
            source.tell()

    def owed(self, source: Source) -> Settle | None:
        """What the stream's sender is to be told now; None when it knows everything."""
        if not (source.done or source.rejected or source.refused):
            return None
        settle = Settle(
            stream=source.stream,
            handled=to_ranges(set(source.done)),
            rejected=to_ranges(set(source.rejected)),
            refused=source.refused,
        )
        source.done, source.rejected, source.refused = [], [], []
        return settle

    def unsettled(self) -> str:
        """What the application has in its hands, stream by stream, while nothing waits; empty when that is nothing."""
        parts = [
            f"{len(source.held)} of {self._credit} messages and {sum(entry.size for entry in source.held.values())} of "
            f"{self._credit_bytes} bytes of stream {source.stream!r}"
            for source in self.sources.values()
            if source.held
        ]
        rest = f" and {len(parts) - _NAMED} streams more" if len(parts) > _NAMED else ""
        return ", ".join(parts[:_NAMED]) + rest

    @property
    def held(self) -> int:
        """Messages that wait or are in the application's hands."""
        return self._held

    def _release(self, entry: Entry) -> bool:
        if entry.source.held.get(entry.number) is not entry:
            return False
        del entry.source.held[entry.number]
        self._count(-1, -entry.size)
        return True

    def _count(self, messages: int, size: int) -> None:
        self._held += messages
        self.held_bytes += size
        self.held_bytes_high_water = max(self.held_bytes_high_water, self.held_bytes)
        self._counters.queue(self._held)

    def _forget_idle(self) -> None:
        for stream in list(self.sources)[:-_IDLE_STREAMS]:
            source = self.sources[stream]
            if source.peer is None and not source.held:
                del self.sources[stream]
