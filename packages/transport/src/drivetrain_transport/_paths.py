"""Which way tensors take between two processes."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain_transport._machine import boot_id, namespace

if TYPE_CHECKING:
    import torch

FEATURES = ("torch", "gloo", "nccl", "shared_memory", "zmq")


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process is and what it can use: what `choose_path` needs to know. It travels over any `Endpoint`."""

    boot: str
    """The running kernel: processes with the same one are on the same machine."""
    processes: str = ""
    """The process namespace, as containers have one each."""
    network: str = ""
    """The network namespace: within one, loopback leads from each process to each other one."""
    hostname: str
    pid: int
    device_kind: str = "cpu"
    """"cpu", or what torch calls the accelerator's type; with the platform, as in "cuda/hip", where it is not Nvidia's.
    """
    device_index: int = 0
    """As this process counts; another one may count differently."""
    device_id: str = ""
    """The device's own name (UUID); empty for the CPU."""
    can: frozenset[str] = frozenset()
    """Of FEATURES, those that are there."""

    @classmethod
    def here(cls, device: str | torch.device | None = None) -> Site:
        """This process, with its tensors on `device`.

        Without a device the CPU is meant, and torch is looked for but not imported. With one, torch is imported, and a
        GPU is asked for its id.

        Raises:
            ImportError: A device was named, and torch is not there.
            ValueError: Tensors on the device cannot be exchanged.
        """
        can = {"zmq"}
        if Path("/dev/shm").is_dir():
            can.add("shared_memory")
        kind, index, identity = "cpu", 0, ""
        if device is not None:
            kind, index, identity = _describe(device)
        if importlib.util.find_spec("torch") is not None:
            can.add("torch")
            can |= _collectives(sys.modules.get("torch"))
        return cls(
            boot=boot_id(),
            processes=namespace("pid"),
            network=namespace("net"),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            device_kind=kind,
            device_index=index,
            device_id=identity,
            can=frozenset(can),
        )


class PathChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The way that was chosen, and why."""

    path: str
    """One of PATHS."""
    reason: str
    rejected: dict[str, str]
    """Why each faster way was not."""


PATHS = ("ipc", "nccl", "shared_memory", "gloo", "zmq")
"""From the fastest to the slowest: tensors stay where they are on one GPU; from GPU to GPU; through memory that both
map; over TCP into the tensors; over an `Endpoint`."""


def choose_path(a: Site, b: Site, *, force: str | None = None) -> PathChoice:
    """The fastest way for tensors between two processes, which may be asked in either order.

    Args:
        a: One side, with the device that its tensors are on.
        b: The other side.
        force: Take this way, whether or not a faster one works.

    Raises:
        ValueError: The forced way is unknown or does not work, or none does; says why.
    """
    if force is not None and force not in PATHS:
        raise ValueError(f"{force!r} is no path: choose one of {', '.join(PATHS)}")
    rejected: dict[str, str] = {}
    for path in PATHS if force is None else (force,):
        reason = _REASONS[path]
        if against := _AGAINST[path](a, b):
            rejected[path] = against
        elif force is not None:
            return PathChoice(path=path, reason=f"forced; {reason}", rejected={})
        else:
            return PathChoice(path=path, reason=reason, rejected=rejected)
    if force is not None:
        raise ValueError(f"path {force!r} was forced and cannot work: {rejected[force]}")
    listed = "; ".join(f"{path}: {why}" for path, why in rejected.items())
    raise ValueError(f"no path between {_name(a)} and {_name(b)}: {listed}")


_REASONS = {
    "ipc": "both tensors are on one GPU, and a handle is all that travels",
    "nccl": "both tensors are on GPUs, each on one of its own",
    "shared_memory": "both tensors are on the CPU of one machine",
    "gloo": "both tensors are on the CPU, and both processes have torch",
    "zmq": "nothing faster works; GPU tensors pass through the CPU",
}


def _against_ipc(a: Site, b: Site) -> str:
    if "cpu" in (a.device_kind, b.device_kind):
        return _on_cpu(a, b)
    if a.boot != b.boot:
        return f"{a.hostname} and {b.hostname} are two machines"
    if a.device_id != b.device_id or not a.device_id:
        return f"the tensors are on two GPUs ({a.device_id} and {b.device_id})"
    if a.processes != b.processes:
        return "the processes are in two containers, which do not share handles"
    if a.pid == b.pid:
        return "both are one process: use the tensor itself"
    return _lacking(a, b, "torch")


def _against_nccl(a: Site, b: Site) -> str:
    if "cpu" in (a.device_kind, b.device_kind):
        return _on_cpu(a, b)
    if a.device_kind != b.device_kind:
        return f"{a.device_kind} and {b.device_kind} have different libraries"
    if a.boot == b.boot and a.device_id == b.device_id:
        return f"both are on GPU {a.device_id}, and each member needs a GPU of its own"
    return _lacking(a, b, "torch", "nccl")


def _against_shared_memory(a: Site, b: Site) -> str:
    for site in (a, b):
        if site.device_kind != "cpu":
            return f"{_name(site)} has its tensors on a GPU"
    if a.boot != b.boot:
        return f"{a.hostname} and {b.hostname} are two machines"
    if a.processes != b.processes:
        return "the processes are in two containers, which do not share memory"
    return _lacking(a, b, "shared_memory")


def _against_gloo(a: Site, b: Site) -> str:
    for site in (a, b):
        if site.device_kind != "cpu":
            return f"{_name(site)} has its tensors on a GPU, and gloo moves those of the CPU"
    return _lacking(a, b, "torch", "gloo")


def _against_zmq(a: Site, b: Site) -> str:
    return _lacking(a, b, "zmq")


_AGAINST: dict[str, Callable[[Site, Site], str]] = {
    "ipc": _against_ipc,
    "nccl": _against_nccl,
    "shared_memory": _against_shared_memory,
    "gloo": _against_gloo,
    "zmq": _against_zmq,
}


def _lacking(a: Site, b: Site, *features: str) -> str:
    for site in (a, b):
        for feature in features:
            if feature not in site.can:
                return f"{_name(site)} has no {feature}"
    return ""


def _on_cpu(a: Site, b: Site) -> str:
    return f"{_name(a if a.device_kind == 'cpu' else b)} has its tensors on the CPU"


def _name(site: Site) -> str:
    return f"{site.hostname}:{site.pid}"


def _describe(device: str | torch.device) -> tuple[str, int, str]:
    import torch

    from drivetrain_transport.device import _accelerator as accelerator

    place = accelerator.device_of(device)
    kind = f"{place.type}/hip" if torch.version.hip and place.type != "cpu" else place.type
    return kind, place.index or 0, accelerator.device_id(place)


def _collectives(torch: Any) -> set[str]:
    """What a torch that is loaded has; one that is not is taken to have gloo, as every build for Linux does."""
    if torch is None:
        return {"gloo"}
    if not torch.distributed.is_available():
        return set()
    found = {"gloo"} if torch.distributed.is_gloo_available() else set()
    return found | ({"nccl"} if torch.distributed.is_nccl_available() else set())
