"""Memory that two processes share: what the other one sees, whose it is when one lets go or dies, what is refused.

Each test runs on the CPU, and on a GPU where there is one. The importer is a process, which runs this file.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from drivetrain_transport import Endpoint, Peer, Protocol
from drivetrain_transport.device import TensorExports, TensorHandle, import_tensor
from programs import environment
from waiting import wait_until

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])


class Look(msgspec.Struct, tag=True):
    """Import it, and say what is there."""

    handle: TensorHandle


class Add(msgspec.Struct, tag=True):
    """Add to every element of what was imported."""

    amount: float


class Drop(msgspec.Struct, tag=True):
    """Drop what was imported."""


class Seen(msgspec.Struct, tag=True):
    values: torch.Tensor
    stride: tuple[int, ...]


class Failed(msgspec.Struct, tag=True):
    kind: str
    text: str


PROTOCOL = Protocol(requests=Look | Add | Drop, replies=Seen | Failed)


async def importer(_: Peer, request: Look | Add | Drop) -> Seen | Failed:
    held = importer.__dict__.setdefault("held", [])
    try:
        match request:
            case Look(handle=handle):
                held.append(import_tensor(handle))
            case Add(amount=amount):
                held[-1].add_(amount)
            case Drop():
                held.clear()
                return Seen(values=torch.zeros(0), stride=())
    except (ValueError, ConnectionError, RuntimeError) as error:
        return Failed(kind=type(error).__name__, text=str(error))
    return Seen(values=held[-1].float().cpu(), stride=tuple(held[-1].stride()))


@contextmanager
def other_process() -> Iterator[tuple[Peer, subprocess.Popen[bytes]]]:
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        with subprocess.Popen([sys.executable, __file__, endpoint.address], env=environment()) as child:
            try:
                yield endpoint.wait_for_peer(timeout=60), child
            finally:
                child.kill()
                child.wait(10)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_each_device
def test_the_other_process_sees_and_writes_the_same_memory(device: str) -> None:
    """A whole tensor, a strided view from the middle, one element, and none, of several dtypes."""
    whole = torch.arange(24, dtype=torch.float32, device=device).reshape(4, 6)
    tensors = [
        whole,
        whole[1:, ::2].t(),
        torch.full((), 2.5, dtype=torch.bfloat16, device=device),
        torch.arange(5, device=device),
        torch.zeros(0, 3, device=device),
    ]
    with other_process() as (peer, _), TensorExports() as exports:
        for tensor in tensors:
            handle = exports.export(tensor)
            seen = peer.call(Look(handle=handle), timeout=60)
            assert isinstance(seen, Seen), seen
            assert seen.values.tolist() == tensor.float().tolist()
            if device != "cpu":
                assert seen.stride == tensor.stride()
        handle = exports.export(whole)
        assert peer.call(Look(handle=handle), timeout=60).values.sum() == 276
        assert peer.call(Add(amount=1), timeout=60).values.sum() == 300
        assert import_sum(exports, handle) == 300
        assert len(exports) == 6


def import_sum(exports: TensorExports, handle: TensorHandle) -> float:
    """What the exporter's side of the memory holds."""
    return exports._kept[handle.key][1].sum().item()


@on_each_device
def test_the_importer_keeps_what_the_exporter_let_go(device: str) -> None:
    tensor = torch.full((1 << 20,), 3.0, device=device)
    with other_process() as (peer, _), TensorExports() as exports:
        handle = exports.export(tensor)
        peer.call(Look(handle=handle), timeout=60)
        del tensor
        exports.release(handle)
        exports.release(handle)
        assert len(exports) == 0
        fresh = [torch.full((1 << 20,), 9.0, device=device) for _ in range(4)]  # would take freed memory
        assert peer.call(Add(amount=0), timeout=60).values.unique().tolist() == [3.0]
        peer.call(Drop(), timeout=60)
        del fresh


@on_each_device
def test_memory_is_given_back_when_both_let_go(device: str) -> None:
    held, before = used(device), descriptors()
    with other_process() as (peer, _), TensorExports() as exports:
        opened = descriptors()
        for _ in range(5):
            handle = exports.export(torch.ones(1 << 22, device=device))
            peer.call(Look(handle=handle), timeout=60)
            peer.call(Drop(), timeout=60)
            exports.release(handle)
        gc.collect()
        wait_until(lambda: used(device) - held < 1 << 24, "the memory to be given back")
        assert descriptors() == opened or device != "cpu"
    assert descriptors() <= before + (0 if device == "cpu" else 16)


def used(device: str) -> int:
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


@on_each_device
def test_a_killed_importer_leaves_nothing_behind(device: str) -> None:
    held = used(device)
    with TensorExports() as exports:
        with other_process() as (peer, child):
            handle = exports.export(torch.ones(1 << 22, device=device))
            peer.call(Look(handle=handle), timeout=60)
            child.send_signal(signal.SIGKILL)
            wait_until(lambda: peer.state == "lost", "the peer to be lost")
        exports.release(handle, importer_lost=True)
        gc.collect()
        wait_until(lambda: used(device) - held < 1 << 24, "the memory to be given back")


@on_each_device
def test_a_released_handle_and_one_of_elsewhere_are_refused_by_name(device: str) -> None:
    with other_process() as (peer, _), TensorExports() as exports:
        handle = exports.export(torch.ones(3, device=device))
        elsewhere = msgspec.structs.replace(handle, machine="another boot pid:[1]")
        failed = peer.call(Look(handle=elsewhere), timeout=60)
        assert failed.kind == "ValueError"
        assert "the tensor lies on another boot pid:[1], this is " in failed.text
        invisible = msgspec.structs.replace(handle, device="GPU-none")
        failed = peer.call(Look(handle=invisible), timeout=60)
        assert failed.kind == "ValueError"
        assert "device GPU-none, which this process does not see" in failed.text
        for damage in ({"shape": (1 << 40,)}, {"offset": -4}, {"stride": (1, 1)}, {"dtype": "float7"}):
            failed = peer.call(Look(handle=msgspec.structs.replace(handle, **damage)), timeout=60)
            assert failed.kind == "ValueError", damage
        assert peer.call(Look(handle=handle), timeout=60).values.tolist() == [1, 1, 1]


def test_memory_that_is_gone_is_a_connection_error() -> None:
    """Released before it was imported; by an exporter that lives, and by one that has ended."""
    with other_process() as (peer, _), TensorExports() as exports:
        handle = exports.export(torch.ones(3))
        exports.release(handle)
        failed = peer.call(Look(handle=handle), timeout=60)
        assert failed.kind == "ConnectionError"
        assert f"process {os.getpid()} ended, or released handle 1" in failed.text
        ended = msgspec.structs.replace(handle, memory=(2**22 + 1, 3, 4))
        assert peer.call(Look(handle=ended), timeout=60).kind == "ConnectionError"
        reused = exports.export(torch.zeros(5))  # the same descriptor, other memory
        assert reused.memory[1] == handle.memory[1]
        assert peer.call(Look(handle=handle), timeout=60).kind == "ConnectionError"


def test_a_handle_is_for_one_import() -> None:
    with TensorExports() as exports:
        handle = exports.export(torch.ones(3))
        tensor = import_tensor(handle)
        with pytest.raises(RuntimeError, match=r"handle 1 was imported before: .* export again"):
            import_tensor(handle)
        tensor.add_(1)
        assert import_tensor(exports.export(tensor)).tolist() == [2, 2, 2]


def test_what_has_no_memory_of_its_own_is_refused() -> None:
    exports = TensorExports()
    with pytest.raises(ValueError, match="sparse"):
        exports.export(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="meta"):
        exports.export(torch.zeros(3, device="meta"))
    exports.close()
    with pytest.raises(RuntimeError, match="the exports are closed"):
        exports.export(torch.zeros(3))


if __name__ == "__main__":
    with Endpoint.connect(sys.argv[1], protocol=PROTOCOL, handler=importer, name="importer", timeout=60) as here:
        here.wait_closed()
