"""Lists of named tensors as messages: large tensors by themselves, small ones packed into buckets.

How a list is cut depends on its names, dtypes and shapes and on the size of buckets alone, so both sides cut alike.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

_ALIGN = 16
HEADER_BYTES = 64
_HEADER = struct.Struct("<16sQQ")

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Part(NamedTuple):
    """Where one tensor lies in a bucket, in bytes."""

    tensor: int
    start: int
    size: int


class Bucket(NamedTuple):
    parts: tuple[Part, ...]
    size: int


class Direct(NamedTuple):
    """A tensor that is a message of its own."""

    tensor: int


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket | Direct]:
    """The messages for tensors of these sizes in bytes, in the order in which they are sent.

    Tensors of a bucket's size or more go by themselves. The smaller ones fill buckets in their order, whichever large
    ones lie between them. Those without elements are not sent.
    """
    steps: list[Bucket | Direct] = []
    parts: list[Part] = []
    end = 0
    for index, size in enumerate(sizes):
        if size >= bucket_bytes:
            steps.append(Direct(index))
            continue
        if size == 0:
            continue
        start = -(-end // _ALIGN) * _ALIGN
        if start + size > bucket_bytes:
            steps.append(Bucket(tuple(parts), end))
            parts, start = [], 0
        parts.append(Part(index, start, size))
        end = start + size
    if parts:
        steps.append(Bucket(tuple(parts), end))
    return steps


class Batch:
    """A list of named tensors, checked and cut.

    Raises:
        ValueError: Two have one name, or one is not dense, not on the device, large and not contiguous, or (when it is
            to be written) overlaps itself; names it and says the mend.
    """

    def __init__(self, tensors: NamedTensors, *, device: torch.device, bucket_bytes: int, written: bool) -> None:
        pairs = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
        self.names = [name for name, _ in pairs]
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"two tensors of the list are named {twice!r}: names tell them apart")
        self.tensors = [checked(name, tensor, device, bucket_bytes, written) for name, tensor in pairs]
        self.sizes = [tensor.nbytes for tensor in self.tensors]
        self.bytes = sum(self.sizes)
        self.steps = cut(self.sizes, bucket_bytes)
        self.bucket = max((step.size for step in self.steps if isinstance(step, Bucket)), default=0)
        """The bytes that the largest bucket needs."""
        text = "\n".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in zip(self.names, self.tensors, strict=True))
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()

    def header(self) -> bytes:
        """What the receiving side compares before it takes anything in."""
        return _HEADER.pack(self.digest, len(self.names), self.bytes).ljust(HEADER_BYTES, b"\0")

    def difference(self, header: bytes) -> str:
        """How the other side's list differs from this one; empty when it is the same."""
        if any(header[_HEADER.size :]):
            return "the other side moves no named list: all call the same operations in the same order"
        digest, count, size = _HEADER.unpack(header[: _HEADER.size])
        if digest == self.digest:
            return ""
        theirs, ours = f"{count} tensors of {size} bytes", f"{len(self.names)} of {self.bytes}"
        return f"{theirs} were sent, {ours} expected, and names, dtypes or shapes differ: both sides pass the same list"

    def flat(self, step: Direct) -> torch.Tensor:
        """The bytes of a tensor that goes by itself, without a copy."""
        return as_bytes(self.tensors[step.tensor])

    def pack(self, step: Bucket, bucket: torch.Tensor) -> None:
        """Copy a bucket's tensors into it."""
        mine, slots = self._pairs(step, bucket)
        torch._foreach_copy_(slots, mine)

    def unpack(self, step: Bucket, bucket: torch.Tensor) -> None:
        """Copy a bucket's contents to its tensors."""
        mine, slots = self._pairs(step, bucket)
        torch._foreach_copy_(mine, slots)

    def _pairs(self, step: Bucket, bucket: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine, slots = [], []
        for index, start, size in step.parts:
            tensor, slot = self.tensors[index], bucket[start : start + size]
            if tensor.is_contiguous():
                mine.append(as_bytes(tensor))
                slots.append(slot)
            else:
                mine.append(tensor)
                slots.append(slot.view(tensor.dtype).view(tensor.shape))
        return mine, slots


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)


def checked(name: str, tensor: torch.Tensor, device: torch.device, bucket_bytes: int, written: bool) -> torch.Tensor:
    """The tensor without its gradient. Raises ValueError for one that cannot travel."""
    if not isinstance(tensor, torch.Tensor) or hasattr(type(tensor), "__tensor_flatten__"):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}: pass plain tensors, as to_local() gives them")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name!r} is no plain dense tensor ({tensor.layout}): make it one first")
    if tensor.device != device:
        raise ValueError(f"{name!r} is on {tensor.device}, the group's tensors are on {device}: move it there")
    if tensor.nbytes >= bucket_bytes and not tensor.is_contiguous():
        raise ValueError(
            f"{name!r} has {tensor.nbytes} bytes and is not contiguous: only tensors smaller than a bucket of "
            f"{bucket_bytes} bytes may be so; pass it in slices, or a contiguous copy"
        )
    if written and _overlaps(tensor):
        raise ValueError(f"{name!r} of shape {tuple(tensor.shape)} is expanded, and cannot be written: clone it first")
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    return math.prod(tensor.shape) > 1 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
