"""What a sender and a receiver of a work stream say to each other.

    sender                                        receiver
      |---- Join(stream, life, floor) ---------------->|    on every new connection
      |<--- Offer(credit, handled, held) --------------|    what it may be sent, and what it knows of the stream
      |---- Push(messages) --------------------------->|    as far as the credit goes
      |<--- Taken -------------------------------------|
      |<--- Settle(handled, rejected, refused) --------|    gives the credit back
      |---- Taken ------------------------------------>|

Each is a call of one endpoint to the other, so it arrives once and in order, or the connection is known to be lost; and
what was lost with it is in the next Offer.
"""

from __future__ import annotations

import msgspec

from drivetrain_transport._codec.tensors import Blob
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._streams.numbers import Ranges

SPAN = 1 << 16
"""The most numbers between the first that is not settled and the last that was sent."""


class Item(msgspec.Struct, array_like=True, gc=False):
    """One message: the frames of an encoded object."""

    number: int
    redelivered: bool
    head: bytes
    """The first frame; empty when it is large, and then comes first among the blobs."""
    blobs: list[Blob] = []


class Join(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    stream: str
    life: bytes
    """Random, one for each start of a sender. A stream belongs to the sender that came last."""
    floor: int
    """Every number below it is settled."""


class Offer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    name: str
    credit: int
    credit_bytes: int
    below: int
    """Everything below it is handled, as far as the receiver and its journal know."""
    handled: Ranges
    """And what is handled above it."""
    held: Ranges
    """Messages that wait here for the application, or are in its hands."""
    inherited: bool
    """Whether the receiver knows the stream from another life of its sender."""


class Push(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    stream: str
    life: bytes
    floor: int
    items: list[Item]


class Settle(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    stream: str
    handled: Ranges
    rejected: Ranges = ()
    """Handed back by the application: to be sent again, to anybody."""
    refused: list[tuple[int, str]] = []
    """No messages of the receiver's type, and why; they are not to be sent again."""


class Taken(msgspec.Struct, tag=True, frozen=True):
    pass


PROTOCOL = Protocol(requests=Join | Push | Settle, replies=Offer | Taken, version="work stream 1")

TAKEN = Taken()
