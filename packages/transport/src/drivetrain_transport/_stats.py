"""What a channel has done so far, in one form for every kind of channel."""

from __future__ import annotations

import msgspec


class _Counts(msgspec.Struct, kw_only=True):
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    waits: int = 0
    """How often somebody had to wait for the other side."""
    wait_seconds: float = 0.0
    """How long, all waits together."""

    redelivered: int = 0
    """Messages that were sent again, because nobody said that they had arrived."""
    duplicates: int = 0
    """Messages that arrived, and were dropped, because they had been handled or nobody waited for them any more."""
    refused: int = 0
    """Messages that were no message here: noise, unknown senders, wrong keys, other versions."""

    connections_dropped: int = 0
    """Connections that this side ended because the other side failed a call over them; they are made again."""

    queued: int = 0
    """Messages now on their way: handed over, and not yet known to have arrived."""
    queued_high_water: int = 0
    """The most that were ever on their way at once."""


class ChannelStats(_Counts, frozen=True, kw_only=True):  # type: ignore[misc]  # dataclasses could not, structs can
    """Counts of one channel from its beginning to the moment it was asked. A number that a channel has no use for is 0.

    Bytes are those of messages: their frames together, without what the wire below adds.
    """

    name: str
    """Whose counts these are: a peer's name, an address, a stream's or a segment's name."""

    def __add__(self, other: ChannelStats) -> ChannelStats:
        """Both together, under this one's name. High-water marks add up to a bound: they may lie at different times."""
        if not isinstance(other, ChannelStats):
            return NotImplemented
        fields = {field: getattr(self, field) + getattr(other, field) for field in _Counts.__struct_fields__}
        return ChannelStats(name=self.name, **fields)


class Counters(_Counts):
    """The numbers of a `ChannelStats` while they grow. Each is to be changed by one thread at a time; any may read."""

    def sent(self, size: int) -> None:
        """Count a message of this many bytes that went out."""
        self.messages_sent += 1
        self.bytes_sent += size

    def received(self, size: int) -> None:
        """Count a message of this many bytes that came in."""
        self.messages_received += 1
        self.bytes_received += size

    def waited(self, seconds: float) -> None:
        """Count a wait that is over."""
        self.waits += 1
        self.wait_seconds += seconds

    def queue(self, now: int) -> None:
        """So many messages are on their way now."""
        self.queued = now
        if now > self.queued_high_water:
            self.queued_high_water = now

    def snapshot(self, name: str) -> ChannelStats:
        """The numbers as they are now."""
        return ChannelStats(name=name, **msgspec.structs.asdict(self))
