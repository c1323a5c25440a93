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

from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain_transport._codec.frames import decode, encode
from drivetrain_transport._codec.tensors import Blob
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._streams.numbers import Ranges

if TYPE_CHECKING:
    from typing_extensions import Buffer

SPAN = 1 << 16
"""The most numbers between the first that is not settled and the last that was sent."""

BATCH_BYTES = 1 << 22
"""The most of several messages in one Push."""

HEADROOM = BATCH_BYTES + (1 << 20)
"""What an endpoint must take beyond the largest message: the rest of a batch, and the words around it."""

_INLINE_BYTES = 1 << 14


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


def to_frames(obj: Any, max_bytes: int, copy: bool) -> tuple[bytes, list[Blob]]:
    """An object as an item holds it. With `copy` the tensors in it may be changed afterwards.

    Raises:
        ValueError: It is over `max_bytes`, or a tensor in it cannot travel.
        TypeError: It is nothing that msgspec can encode.
    """
    head, *tensors = encode(obj, max_bytes=max_bytes)
    blobs = [Blob(bytes(memoryview(tensor)) if copy else tensor) for tensor in tensors]
    first = bytes(head)
    if len(first) > _INLINE_BYTES:
        return b"", [Blob(first), *blobs]
    return first, blobs


def from_frames(head: bytes, blobs: list[Blob], kind: Any, max_bytes: int) -> Any:
    """The object again; FrameError when it is not of this kind. The tensors take over the frames' memory."""
    frames: list[Buffer] = [blob.data for blob in blobs]
    return decode([head, *frames] if head else frames, kind, max_bytes=max_bytes, copy=False)


def size_of(head: bytes, blobs: list[Blob]) -> int:
    """The bytes of a message."""
    return len(head) + sum(memoryview(blob.data).nbytes for blob in blobs)
