"""Tensors in memory that two processes share, handed over as a few hundred bytes."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from types import TracebackType
from typing import Self

import msgspec
import torch

from drivetrain_transport._machine import boot_id, namespace
from drivetrain_transport.device import _accelerator as accelerator


class TensorHandle(msgspec.Struct, kw_only=True):
    """Where a tensor lies: plain numbers and bytes, which travel over any `Endpoint`. For one import.

    It gives no access by itself: the operating system lets processes of the same user on the same machine in.
    """

    key: int
    """The exporter's name for it."""

    machine: str
    device: str
    """The device's own id, not an index; empty for the CPU."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the beginning of the storage."""
    size: int
    """Bytes of the storage."""

    memory: tuple[int, int, int] = (0, 0, 0)
    """On the CPU: the exporter's process and descriptor, and the inode behind it."""
    block: bytes = b""
    """On a GPU: the driver's handle of the allocation, as torch wraps it."""
    block_offset: int = 0
    counter: bytes = b""
    counter_place: int = 0
    event: bytes = b""
    event_sync: bool = False

    opened: bool = False
    """Set in the importing process by the import."""


class TensorExports:
    """The tensors that a process lets others use in place. A context manager; for any thread.

    An exported tensor is kept alive, by this object, until its `release`. What the importer holds stays valid even
    then: the memory itself is given back when both have let go. Neither side writes while the other one reads:
    whoever hands a tensor over says by message when it may be used, and when it may be written again.

    When the importer dies, the memory of a GPU stays counted as in use until `release(handle, importer_lost=True)`;
    memory of the CPU needs no such word. When the exporter dies, a CPU importer's memory stays valid, and a GPU's is
    gone: it must be dropped, and using it fails. Nothing is left in /dev/shm or on a GPU when both have ended.

    A GPU tensor is shared where it lies, without a copy; so is every other tensor in the same allocation of torch's,
    for readers as for writers. A CPU tensor is copied once, when it is exported, into memory that can be shared.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[TensorHandle, torch.Tensor, int]] = {}
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    def export(self, tensor: torch.Tensor) -> TensorHandle:
        """A handle for one import by one process; export again for another. The tensor is kept until `release`.

        Work on the tensor that is queued on the current stream at this moment is done before the importer uses it.

        Raises:
            ValueError: The tensor is not dense, or on a device whose memory is not shared.
            RuntimeError: The exports are closed.
        """
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__") or tensor.is_meta:
            raise ValueError(f"a {type(tensor).__name__} ({tensor.layout}, {tensor.device}) has no memory to be shared")
        device = accelerator.device_of(tensor.device)
        with self._lock:
            if self._closed:
                raise RuntimeError("the exports are closed: nothing can be exported any more")
            key = next(self._keys)
            if device.type == "cpu":
                self._kept[key] = _share_copy(key, tensor)
            else:
                self._kept[key] = _share_block(key, tensor)
            return self._kept[key][0]

    def release(self, handle: TensorHandle, *, importer_lost: bool = False) -> None:
        """Let go of an exported tensor; of its memory as well, once the importer has. Idempotent.

        Args:
            handle: What `export` returned.
            importer_lost: Nobody imported it, or the importer is dead: the memory can be used again at once. It must be
                true: a living importer would read what is written there next.
        """
        with self._lock:
            kept = self._kept.pop(handle.key, None)
        if kept is None:
            return
        mine, tensor, descriptor = kept
        if descriptor >= 0:
            os.close(descriptor)
        elif importer_lost and mine.counter:
            accelerator.drop_count(mine.counter, mine.counter_place)
        on_gpu = tensor.device.type != "cpu"
        del kept, tensor
        if on_gpu:
            accelerator.collect_shared()

    def __len__(self) -> int:
        """How many tensors are kept."""
        return len(self._kept)

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._lock:
            self._closed = True
            handles = [handle for handle, _, _ in self._kept.values()]
        for handle in handles:
            self.release(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def import_tensor(handle: TensorHandle) -> torch.Tensor:
    """The exporter's tensor, in its own memory, without a copy; dropping it lets go of the memory.

    On a GPU, work queued on the current stream afterwards comes after what the exporter had queued when it exported.

    Raises:
        ValueError: The handle is of another machine or of a device that this process does not see, or is damaged.
        ConnectionError: The memory is gone: the exporter died, or released it before it was imported.
        RuntimeError: The handle was imported before, or it is this process's own.
    """
    here = machine()
    if handle.machine != here:
        raise ValueError(f"the tensor lies on {handle.machine}, this is {here}: memory is shared on one machine only")
    if handle.opened:
        raise RuntimeError(f"handle {handle.key} was imported before: a handle is for one import, export again")
    dtype = vars(torch).get(handle.dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {handle.dtype!r}")
    _check_extent(handle, dtype)
    storage = _open_block(handle) if handle.device else _open_copy(handle)
    tensor = torch.empty((), dtype=dtype, device=storage.device)
    return tensor.set_(storage, handle.offset, handle.shape, handle.stride)


def machine() -> str:
    """Names what shares memory with this process: the running kernel, and the process namespace."""
    return f"{os.uname().nodename} {boot_id()} {namespace('pid')}"


def _check_extent(handle: TensorHandle, dtype: torch.dtype) -> None:
    shape, stride = handle.shape, handle.stride
    last = handle.offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
    fits = (last + 1) * dtype.itemsize <= handle.size or 0 in shape
    if not fits or len(shape) != len(stride) or min(*shape, *stride, handle.offset, 0) < 0:
        raise ValueError(
            f"handle {handle.key} is damaged: shape {handle.shape}, strides {handle.stride} from element "
            f"{handle.offset} do not lie within {handle.size} bytes"
        )


def _describe(key: int, tensor: torch.Tensor, size: int) -> TensorHandle:
    return TensorHandle(
        key=key,
        machine=machine(),
        device=accelerator.device_id(tensor.device),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        size=size,
    )


def _share_copy(key: int, tensor: torch.Tensor) -> tuple[TensorHandle, torch.Tensor, int]:
    """The copy lives in an anonymous file, which has no name to be left behind."""
    descriptor = os.memfd_create(f"drivetrain-{key}", os.MFD_CLOEXEC)
    try:
        size = max(tensor.nbytes, 1)
        os.ftruncate(descriptor, size)
        shared = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)[: tensor.nbytes]
        if tensor.nbytes:
            shared = shared.view(tensor.dtype).view(tensor.shape)
            shared.copy_(tensor)
        else:
            shared = torch.empty(tensor.shape, dtype=tensor.dtype)
    except BaseException:
        os.close(descriptor)
        raise
    handle = _describe(key, shared, size)
    handle.memory = (os.getpid(), descriptor, os.fstat(descriptor).st_ino)
    return handle, shared, descriptor


def _open_copy(handle: TensorHandle) -> torch.UntypedStorage:
    process, descriptor, inode = handle.memory
    gone = f"the tensor's memory is gone: process {process} ended, or released handle {handle.key}"
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, OSError) as error:
        raise ConnectionError(f"{gone} ({error.strerror})") from error
    try:
        if os.fstat(opened).st_ino != inode or os.fstat(opened).st_size != handle.size:
            raise ConnectionError(gone)
        mapped = mmap.mmap(opened, handle.size)
    finally:
        os.close(opened)
    handle.opened = True
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def _share_block(key: int, tensor: torch.Tensor) -> tuple[TensorHandle, torch.Tensor, int]:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return _describe(key, tensor, 0), tensor, -1  # there is no allocation, and nothing to share
    with accelerator.on(tensor.device):
        _, block, size, block_offset, counter, place, event, sync = accelerator.share(storage)
    handle = _describe(key, tensor, size)
    handle.block, handle.block_offset = block, block_offset
    handle.counter, handle.counter_place = counter, place
    handle.event, handle.event_sync = event, bool(sync)
    return handle, tensor, -1


def _open_block(handle: TensorHandle) -> torch.UntypedStorage:
    device = accelerator.device_with_id(handle.device)
    if device is None:
        raise ValueError(f"the tensor lies on device {handle.device}, which this process does not see: make it visible")
    if handle.size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    parts = (
        handle.block, handle.size, handle.block_offset, handle.counter, handle.counter_place, handle.event,
        handle.event_sync,
    )  # fmt: skip
    handle.opened = True
    try:
        return accelerator.open_shared(device, parts)
    except RuntimeError as error:
        text = f"the tensor's memory cannot be opened: {error}"
        if handle.block[1:2] == b"e":
            text += (
                "; it was allocated with expandable_segments, whose memory is handed over by pidfd_getfd: let the "
                "importer trace the exporter, or allocate with expandable_segments:False"
            )
        raise ConnectionError(text) from error
