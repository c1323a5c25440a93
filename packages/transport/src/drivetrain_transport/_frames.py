"""Messages as frames: the first one holds the object, each other one a tensor's bytes.

frame 0     "DT", the byte order ("<" or ">"), the format's version (4 bytes together), then MessagePack;
            a tensor in it is an extension that holds its dtype, its shape and the number of its frame
frame 1...  the tensors, each in C order
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain_transport._errors import FrameError
from drivetrain_transport._tensors import WireTensor, from_wire, to_wire

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_BYTES = 4 << 30
"""The default limit on one message, all its frames together (4 GiB)."""

_MAGIC = b"DT" + (b"<" if sys.byteorder == "little" else b">")
_VERSION = 1
_HEADER = _MAGIC + bytes([_VERSION])
_TENSOR = 0x54  # the MessagePack extension code of a tensor


class _TensorRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    frame: int


def encode(obj: Any, *, max_bytes: int = MAX_BYTES) -> list[Buffer]:
    """Turn an object that msgspec can encode, and the tensors in it, into frames.

    Tensors may be torch tensors of any dense dtype and numpy arrays of numbers or bools, anywhere in the object.
    Those on the CPU and contiguous are not copied: their frames alias them and keep them alive. Whoever changes such
    a tensor in place before the frames are written out changes the message. Gradients do not travel.

    Args:
        obj: A `msgspec.Struct`, or anything else msgspec knows; a tensor by itself as well.
        max_bytes: The largest message allowed, in bytes, all frames together.

    Raises:
        ValueError: The message is larger than max_bytes, or a tensor cannot travel (sparse, quantized, meta, DTensor).
        TypeError: msgspec cannot encode a part of the object.
    """
    frames: list[Buffer] = [b""]

    def enc_hook(part: Any) -> msgspec.msgpack.Ext:
        tensor = to_wire(part)
        if tensor is None:
            raise TypeError(f"objects of type {type(part).__name__} cannot travel: use structs, builtins and tensors")
        frames.append(tensor.data)
        ref = _TensorRef(tensor.dtype, tensor.shape, len(frames) - 1)
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(ref))

    body = bytearray(_HEADER)
    msgspec.msgpack.Encoder(enc_hook=enc_hook).encode_into(obj, body, len(_HEADER))
    frames[0] = body
    size = total_bytes(frames)
    if size > max_bytes:
        raise ValueError(
            f"a {type(obj).__name__} of {size} bytes is over the limit of {max_bytes}: "
            "send it in parts, or raise the limit"
        )
    return frames


def decode(frames: Sequence[Buffer], type: Any, *, max_bytes: int = MAX_BYTES, copy: bool = True) -> Any:
    """Turn frames back into an object of the given type. The tensors in it are writable and share no memory.

    Args:
        frames: What `encode` returned, or what arrived of it. Nothing in them is trusted.
        type: The type to expect: a struct, a union of tagged ones, ... A field annotated `torch.Tensor` gets a torch
            tensor (on the CPU) and one annotated `numpy.ndarray` an array, whatever the sender held.
        max_bytes: Refuse larger messages, before anything is allocated.
        copy: False hands the frames' memory over to the tensors where it is writable and aligned. Only for frames
            that nobody else holds, as those that a socket has just received.

    Raises:
        FrameError: The frames are truncated, too large, of another version, or do not fit the type; the text says
            which, with the path of the field.
    """
    if not frames:
        raise FrameError("a message has at least one frame, this one has none")
    size = total_bytes(frames)
    if size > max_bytes:
        raise FrameError(f"a message of {size} bytes is over the limit of {max_bytes}")
    head = memoryview(frames[0])
    _check_header(bytes(head[: len(_HEADER)]))
    waiting = dict(enumerate(frames[1:], start=1))

    def ext_hook(code: int, data: memoryview) -> _TensorRef:
        if code != _TENSOR:
            raise FrameError(f"MessagePack extension {code} has no meaning here")
        return msgspec.msgpack.decode(data, type=_TensorRef)

    def dec_hook(kind: Any, ref: Any) -> Any:
        if not isinstance(ref, _TensorRef):
            raise FrameError(f"expected {kind.__name__}, got {ref.__class__.__name__}")
        if ref.frame not in waiting:
            raise FrameError(f"frame {ref.frame} is missing, or is claimed by two tensors")
        return from_wire(kind, WireTensor(ref.dtype, ref.shape, waiting.pop(ref.frame)), copy=copy)

    try:
        obj = msgspec.msgpack.Decoder(type, dec_hook=dec_hook, ext_hook=ext_hook).decode(head[len(_HEADER) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message of the expected type: {error}") from error
    if waiting:
        raise FrameError(f"{len(waiting)} of {len(frames) - 1} tensor frames belong to no field annotated as a tensor")
    return obj


def total_bytes(frames: Sequence[Buffer]) -> int:
    """The size of a message in bytes, all its frames together."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _check_header(header: bytes) -> None:
    if header[:2] != _MAGIC[:2] or len(header) < len(_HEADER):
        raise FrameError(f"not a message: it starts with {header!r} instead of {_HEADER!r}")
    if header[:3] != _MAGIC:
        raise FrameError("a message in the other byte order: both sides must have the same")
    if header != _HEADER:
        raise FrameError(
            f"a message of format {header[3]}, this is format {_VERSION}: install one version on both sides"
        )
