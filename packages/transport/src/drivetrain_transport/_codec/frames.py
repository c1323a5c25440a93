"""Messages as frames: the first one holds the object, each other one a tensor's bytes.

frame 0     "DT", the byte order ("<" or ">"), the format's version (4 bytes together), then MessagePack;
            a tensor in it is an extension that holds its dtype, its shape and the number of its frame
frame 1...  the tensors, each in C order
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from drivetrain_transport._codec.tensors import (
    MAX_DIMENSIONS,
    TooLarge,
    WireTensor,
    check_target,
    fill,
    from_wire,
    to_wire,
)
from drivetrain_transport._errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_BYTES = 4 << 30
"""The default limit on one message, all its frames together (4 GiB)."""

_MAGIC = b"DT" + (b"<" if sys.byteorder == "little" else b">")
_VERSION = 1
_HEADER = _MAGIC + bytes([_VERSION])
_TENSOR = 0x54  # the MessagePack extension code of a tensor


class _TensorRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
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
    room = max_bytes

    def enc_hook(part: Any) -> msgspec.msgpack.Ext:
        nonlocal room
        tensor = to_wire(part, room)
        if tensor is None:
            raise TypeError(f"objects of type {type(part).__name__} cannot travel: use structs, builtins and tensors")
        room -= memoryview(tensor.data).nbytes
        frames.append(tensor.data)
        ref = _TensorRef(tensor.dtype, tensor.shape, len(frames) - 1)
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(ref))

    body = bytearray(_HEADER)
    too_large = "a {} {} bytes is over the limit of {}: send it in parts, or raise the limit"
    try:
        msgspec.msgpack.Encoder(enc_hook=enc_hook).encode_into(obj, body, len(_HEADER))
    except TooLarge as error:
        size = max_bytes - room + error.size
        raise ValueError(too_large.format(f"{type(obj).__name__} of more than", size, max_bytes)) from None
    frames[0] = body
    size = total_bytes(frames)
    if size > max_bytes:
        raise ValueError(too_large.format(f"{type(obj).__name__} of", size, max_bytes))
    return frames


def decode(
    frames: Sequence[Buffer],
    type: Any,
    *,
    max_bytes: int = MAX_BYTES,
    copy: bool = True,
    into: Mapping[str, Any] | None = None,
) -> Any:
    """Turn frames back into an object of the given type. The tensors in it are writable and share no memory.

    With `into`, tensors are written to memory that the caller has already, such as the parameters of a model:

        into = {f"named.{name}": tensor for name, tensor in model.state_dict().items()}
        decode(frames, Update, into=into)       # class Update(Struct): named: dict[str, torch.Tensor]

    Args:
        frames: What `encode` returned, or what arrived of it. Nothing in them is trusted.
        type: The type to expect: a struct, a union of tagged ones, ... A field annotated `torch.Tensor` gets a torch
            tensor (on the CPU) and one annotated `numpy.ndarray` an array, whatever the sender held.
        max_bytes: Refuse larger messages, before anything is allocated.
        copy: False hands the frames' memory over to the tensors where it is writable and aligned. Only for frames
            that nobody else holds, as those that a socket has just received.
        into: Tensors and arrays by the path of their field: names, keys and indices as they are in the message, with
            dots between them. What arrives there is copied into that tensor, on whatever device it lies, and the
            object holds it; dtype and shape must be equal. Tensors of other paths are decoded as ever. Either all are
            written or, after a FrameError, none.

    Raises:
        FrameError: The frames are truncated, too large, of another version, or do not fit the type or `into`; the text
            says which, with the path of the field.
        ValueError: `into` holds something that no tensor can be written to.
    """
    if not frames:
        raise FrameError("a message has at least one frame, this one has none")
    size = total_bytes(frames)
    if size > max_bytes:
        raise FrameError(f"a message of {size} bytes is over the limit of {max_bytes}")
    head = memoryview(frames[0])
    _check_header(bytes(head[: len(_HEADER)]))
    body = head[len(_HEADER) :]
    if len(frames) == 1 and not into:  # as small messages are
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, FrameError, TypeError):
            return _plain(type).decode(body)
        # What is wrong with it is found out below.
    try:
        reading = _Reading(frames, _targets(body, into) if into else {}, copy)
        obj = msgspec.msgpack.Decoder(type, dec_hook=reading.dec_hook, ext_hook=reading.ext_hook).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message of the expected type: {error}") from error
    reading.finish()
    return obj


@functools.lru_cache(maxsize=128)
def _plain(type: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for messages without tensors; making one takes longer than decoding with it."""
    return msgspec.msgpack.Decoder(type, dec_hook=_no_tensor, ext_hook=_no_tensor)


def _no_tensor(*_: Any) -> Any:
    raise FrameError("this message is more than plain")


class _Reading:
    """The tensors of one message while it is decoded."""

    def __init__(self, frames: Sequence[Buffer], targets: Mapping[int, tuple[str, Any]], copy: bool) -> None:
        self._frames = frames
        self._targets = targets
        self._copy = copy
        self._waiting = set(range(1, len(frames)))
        self._homeless = 0  # references that no field has taken yet
        self._writes: list[Callable[[], object]] = []

    def ext_hook(self, code: int, data: memoryview) -> _TensorRef:
        self._homeless += 1
        return _reference(code, data)

    def dec_hook(self, kind: Any, ref: Any) -> Any:
        if not isinstance(ref, _TensorRef):
            raise FrameError(f"expected {kind.__name__}, got {ref.__class__.__name__}")
        if ref.frame not in self._waiting:
            raise FrameError(f"frame {ref.frame} is missing, or is claimed by two tensors")
        self._waiting.remove(ref.frame)
        self._homeless -= 1
        tensor = WireTensor(ref.dtype, ref.shape, self._frames[ref.frame])
        if ref.frame not in self._targets:
            return from_wire(kind, tensor, copy=self._copy)
        path, target = self._targets[ref.frame]
        try:
            self._writes.append(fill(target, tensor))
        except FrameError as error:
            raise FrameError(f"{path}: {error}") from None
        return target

    def finish(self) -> None:
        """The message fits its type: see that each tensor has a field, and write those that go into given memory."""
        count = max(len(self._waiting), self._homeless)
        if count:
            raise FrameError(
                f"{count} tensors, of {len(self._frames) - 1} frames, belong to no field annotated as a tensor"
            )
        for write in self._writes:
            write()


def _reference(code: int, data: memoryview) -> _TensorRef:
    if code != _TENSOR:
        raise FrameError(f"MessagePack extension {code} has no meaning here")
    return msgspec.msgpack.decode(data, type=_TensorRef)


def _targets(body: memoryview, into: Mapping[str, Any]) -> dict[int, tuple[str, Any]]:
    """The caller's memory by the number of the frame that goes there, with the path of the field."""
    content = msgspec.msgpack.decode(body, ext_hook=_reference)
    targets: dict[int, tuple[str, Any]] = {}
    taken = set()
    for path, frame in _paths(content, ""):
        if path in into:
            check_target(into[path], path)
            if path in taken:
                raise FrameError(f"two tensors of the message have the path {path!r}")
            taken.add(path)
            targets[frame] = path, into[path]
    return targets


def _paths(content: Any, path: str) -> Iterator[tuple[str, int]]:
    """Where the tensors are in a message that was decoded without types, and the numbers of their frames."""
    if isinstance(content, _TensorRef):
        yield path, content.frame
    elif isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _paths(value, f"{path}.{key}" if path else str(key))


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
