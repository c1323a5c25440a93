"""Tensors between two processes by a group, against bare torch.distributed; and a GPU tensor handed over in place.

On two GPUs the group and the baseline use NCCL, on the CPU gloo. Both sides of a comparison end when the receiving
process says that it has everything. The second process runs this file.

    pytest benchmarks/bench_device.py --benchmark-only                        # on two GPUs, or a part of it on a CPU
"""

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from drivetrain_transport import Endpoint, Peer, Protocol
from drivetrain_transport.device import Rendezvous, Round, TensorExports, TensorGroup, TensorHandle, import_tensor

NAMES = ("source", "sink")
WAIT_S = 120.0
BUCKETS = {"cpu": (1,), "cuda": (64, 16, 256)}
"""Sizes of buckets to compare, in MiB; the first one is the group's own choice."""
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_each_device = pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.multigpu, two_gpus])], ids=["gloo", "nccl"]
)

Work = Callable[[], Any]


def model(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the shapes of Qwen2-1.5B, in bfloat16: 338 of them, 2.9 GiB; on a CPU with a sixteenth of its rows."""
    parts = 1 if device.type != "cpu" else 16
    layer = {
        "q": (1536, 1536), "q_bias": (1536,), "k": (256, 1536), "k_bias": (256,), "v": (256, 1536), "v_bias": (256,),
        "o": (1536, 1536), "gate": (8960, 1536), "up": (8960, 1536), "down": (1536, 8960),
        "norm": (1536,), "post_norm": (1536,),
    }  # fmt: skip
    shapes = {f"{number}.{name}": shape for number in range(28) for name, shape in layer.items()}
    shapes |= {"embedding": (151936, 1536), "norm": (1536,)}
    return {
        name: torch.ones((max(rows // parts, 1), *rest), dtype=torch.bfloat16, device=device)
        for name, (rows, *rest) in shapes.items()
    }


class Side:
    """What each of the two processes holds: the group, torch's own, and the tensors."""

    def __init__(self, name: str, device: torch.device, meeting: Rendezvous, port: int) -> None:
        self.name = name
        if device.type != "cpu":
            torch.cuda.set_device(device)
        rank = NAMES.index(name)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=store, rank=rank, world_size=2)
        self.groups = {
            mib: TensorGroup.form(
                NAMES, name, meeting, timeout=WAIT_S, device=device, name=f"{mib} MiB", bucket_bytes=mib << 20
            )
            for mib in BUCKETS[device.type]
        }
        self.device = device
        self.large = torch.ones(1 << (30 if device.type != "cpu" else 26), dtype=torch.uint8, device=device)
        self.list = model(device)
        self.flat = torch.ones(sum(t.nbytes for t in self.list.values()), dtype=torch.uint8, device=device)

    def run(self, command: str) -> None:
        method, *arguments = command.split()
        getattr(self, method)(*arguments)

    def send_ours(self) -> None:
        group = next(iter(self.groups.values()))
        if self.name == "source":
            group.send({"large": self.large}, "sink", timeout=WAIT_S)
        else:
            group.receive({"large": self.large}, "source", timeout=WAIT_S)

    def send_bare(self) -> None:
        if self.name == "source":
            dist.send(self.large, 1)
        else:
            dist.recv(self.large, 0)
        self.wait()

    def broadcast_ours(self, mib: str) -> None:
        self.groups[int(mib)].broadcast(self.list, "source", timeout=WAIT_S)

    def broadcast_bare(self) -> None:
        dist.broadcast(self.flat, 0)
        self.wait()

    def rounds_ours(self, mib: str) -> None:
        """The flat tensor in rounds, two in flight."""
        group, peer = next(iter(self.groups.values())), NAMES[self.name == "source"]
        flying: deque[Round] = deque()
        for chunk in self.flat.split(int(mib) << 20):
            message = [(peer, chunk)]
            sends, receives = (message, []) if self.name == "source" else ([], message)
            flying.append(group.start(sends, receives, timeout=WAIT_S))
            if len(flying) == 2:
                flying.popleft().wait()
        for round_ in flying:
            round_.wait()

    def rounds_bare(self, mib: str) -> None:
        move, peer = (dist.isend, 1) if self.name == "source" else (dist.irecv, 0)
        flying: deque[dist.Work] = deque()
        for chunk in self.flat.split(int(mib) << 20):
            flying += dist.batch_isend_irecv([dist.P2POp(move, chunk, peer)])
            if len(flying) == 2:
                flying.popleft().wait()
        for work in flying:
            work.wait()
        self.wait()

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()
        dist.destroy_process_group()


@contextmanager
def second_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str], tuple[Side, Callable[[str], Work]]]]:
    """Per kind of device, this process's side, and what runs one of its methods on both sides."""
    with Rendezvous.host() as meeting, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        made: dict[str, tuple[Side, Callable[[str], Work]]] = {}
        children = []

        def pair(kind: str) -> tuple[Side, Callable[[str], Work]]:
            if kind not in made:
                for side, _ in made.values():
                    side.close()  # torch's own group is one for the process
                made.clear()
                context = second_process("sink", kind, meeting.address, str(port))
                child = context.__enter__()
                children.append(context)
                side = Side("source", torch.device("cuda:0" if kind != "cpu" else kind), meeting, port)

                def both(method: str) -> Work:
                    def work() -> None:
                        assert child.stdin is not None
                        assert child.stdout is not None
                        child.stdin.write(f"{method}\n")
                        child.stdin.flush()
                        side.run(method)
                        assert child.stdout.readline() == "done\n"

                    return work

                made[kind] = side, both
            return made[kind]

        yield pair
        for side, _ in made.values():
            side.close()
        for context in children:
            context.__exit__(None, None, None)


@on_each_device
def test_one_large_tensor(pairs: Any, against: Any, benchmark: Any, kind: str) -> None:
    """1 GiB (on a CPU 64 MiB) from one process to the other."""
    side, both = pairs(kind)
    against(both("send_ours"), both("send_bare"), owed=0.85, rounds=20)
    benchmark.extra_info["gib_per_s"] = side.large.nbytes / (1 << 30) / benchmark.stats.stats.median


@pytest.mark.parametrize(
    ("kind", "mib"),
    [("cpu", mib) for mib in BUCKETS["cpu"]]
    + [pytest.param("cuda", mib, marks=[pytest.mark.multigpu, two_gpus]) for mib in BUCKETS["cuda"]],
)
def test_a_models_tensors(pairs: Any, against: Any, benchmark: Any, kind: str, mib: int) -> None:
    """A model's parameters, one by one, against one flat tensor of their size."""
    side, both = pairs(kind)
    against(both(f"broadcast_ours {mib}"), both("broadcast_bare"), owed=0.7, rounds=20)
    benchmark.extra_info["gib_per_s"] = side.flat.nbytes / (1 << 30) / benchmark.stats.stats.median


@pytest.mark.parametrize("mib", [4, 16, 64])
@on_each_device
def test_rounds_two_in_flight(pairs: Any, against: Any, benchmark: Any, kind: str, mib: int) -> None:
    """A model's bytes in messages of this size, one in a round, against isend and irecv of the same messages."""
    side, both = pairs(kind)
    against(both(f"rounds_ours {mib}"), both(f"rounds_bare {mib}"), owed=0.85, rounds=20)
    benchmark.extra_info["gib_per_s"] = side.flat.nbytes / (1 << 30) / benchmark.stats.stats.median


class Look(msgspec.Struct, tag=True):
    handle: TensorHandle


class Seen(msgspec.Struct, tag=True):
    first: int


PROTOCOL = Protocol(requests=Look, replies=Seen)


async def look(_: Peer, request: Look) -> Seen:
    tensor = import_tensor(request.handle)
    return Seen(first=int(tensor[0]))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, a_gpu])])
def test_handing_over_in_place(within: Any, benchmark: Any, kind: str) -> None:
    """1 GiB on a GPU to another process on the same one: export, message, import, a look at it, answer, release."""
    tensor = torch.ones(1 << (30 if kind != "cpu" else 10), dtype=torch.uint8, device=kind)
    with Endpoint.bind(protocol=PROTOCOL) as endpoint, second_process("importer", endpoint.address):
        peer = endpoint.wait_for_peer(timeout=WAIT_S)
        with TensorExports() as exports:

            def hand_over() -> None:
                handle = exports.export(tensor)
                assert peer.call(Look(handle=handle), timeout=WAIT_S).first == 1
                exports.release(handle)

            within(hand_over, limit=0.002, rounds=50)
    benchmark.extra_info["bytes"] = tensor.nbytes


def sink(kind: str, address: str, port: str) -> None:
    with Rendezvous.join(address, timeout=WAIT_S) as meeting:
        side = Side("sink", torch.device("cuda:1" if kind != "cpu" else kind), meeting, int(port))
        for line in sys.stdin:
            side.run(line.strip())
            print("done", flush=True)


def importer(address: str) -> None:
    with Endpoint.connect(address, protocol=PROTOCOL, handler=look, timeout=WAIT_S) as endpoint:
        endpoint.wait_closed()


if __name__ == "__main__":
    {"sink": sink, "importer": importer}[sys.argv[1]](*sys.argv[2:])
