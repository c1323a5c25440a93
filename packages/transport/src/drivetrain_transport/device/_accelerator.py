"""The one place that knows which accelerators there are, and what their libraries are called.

Nvidia's GPUs and AMD's look alike to torch: both are of type `cuda`, and AMD's RCCL has NCCL's functions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


def device_of(device: str | torch.device | None) -> torch.device:
    """The device with its index. None is the accelerator in use, or the CPU where there is none.

    Raises:
        ValueError: Tensors on it cannot be exchanged between processes.
    """
    if device is None:
        device = current() or torch.device("cpu")
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"tensors on {device} cannot be exchanged: use the CPU, or a GPU of Nvidia's or AMD's")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {device} here: this process sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.accelerator.current_device_index() if device.index is None else device.index)


def current() -> torch.device | None:
    """The accelerator in use, None where there is none."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def device_id(device: torch.device) -> str:
    """Names the device itself, whatever index it has in a process; empty for the CPU."""
    if device.type == "cpu":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    where = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
    return uuid or "pci-{:04x}:{:02x}:{:02x}".format(*where)


def device_with_id(name: str) -> torch.device | None:
    """The device of that name as this process knows it."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((device for device in devices if device_id(device) == name), None)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make it the current device meanwhile."""
    with torch.cuda.device(device):
        yield


def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """The storage's IPC handle: device index, handle, bytes, offset, counter's file, counter's place, event, sync."""
    parts: tuple[Any, ...] = cast(Any, storage)._share_cuda_()
    return parts


def open_shared(device: torch.device, parts: tuple[Any, ...]) -> torch.UntypedStorage:
    """The storage behind an IPC handle, whose parts are those of `share` without the device."""
    cast(Any, torch.cuda).init()
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index, *parts)
    return storage


def drop_count(counter: bytes, place: int) -> None:
    """Give back the count that an importer would have given back."""
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)


def collect_shared() -> None:
    """Free exported memory that no importer holds any more."""
    cast(Any, torch.cuda).ipc_collect()


def has_collectives() -> bool:
    """Whether the collective library is there. Loads it."""
    try:
        collectives()
    except OSError:
        return False
    return True


def stream_pointer(stream: torch.Stream) -> int:
    """The stream as the driver's libraries take it."""
    return int(cast(Any, stream).native_handle)


@functools.cache
def collectives() -> ctypes.CDLL:
    """NCCL or RCCL: the copy that torch has loaded, found by its name. Raises OSError where there is none."""
    return ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")
