"""An object inside a message of a channel: encoded once, decoded by whoever it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain_transport._codec.frames import decode, encode
from drivetrain_transport._codec.tensors import Blob

if TYPE_CHECKING:
    from typing_extensions import Buffer

BATCH_BYTES = 1 << 22
"""The most that several objects in one message hold together."""

HEADROOM = BATCH_BYTES + (1 << 20)
"""What an endpoint must take beyond the largest object: the rest of a batch, and the words around it."""

_INLINE_BYTES = 1 << 14


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
