"""Tensors to another process: `Endpoint` beside bare ZeroMQ, `Ring` beside a copy in memory, both beside queues that
pickle; small messages and back.

Each side of a comparison has a process of its own that takes the tensors in and answers each with a small message. Both
are kept waiting, and driven in turns.
"""

import asyncio
import ctypes
import multiprocessing
import pickle  # noqa: TID251  # to be measured
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from drivetrain_transport import Endpoint, Peer, Protocol, Ring, encode

TENSOR_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 10
BURST = 4


class Update(msgspec.Struct, tag=True):
    version: int
    tensor: torch.Tensor


class Echo(msgspec.Struct, tag=True):
    data: bytes


class Done(msgspec.Struct, tag=True):
    data: bytes = b""


PROTOCOL = Protocol(requests=Update | Echo, replies=Done)


async def answer(_: Peer, request: Update | Echo) -> Done:
    return Done(data=request.data) if isinstance(request, Echo) else Done()


def serve_endpoint(address: str) -> None:
    """The other process of ours."""
    with Endpoint.connect(address, protocol=PROTOCOL, handler=answer) as endpoint:
        endpoint.wait_closed()


def serve_bare(address: str) -> None:
    """The other process of bare ZeroMQ: each message is answered with its last frame when that is small."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(address)
        socket.send(b"hello")
        while len(frames := socket.recv_multipart(copy=False)) > 1:
            socket.send_multipart([frames[0], frames[-1] if len(frames[-1]) <= MESSAGE_BYTES else b""], copy=False)


def serve_ring(addresses: str) -> None:
    """The other process of the ring: takes each record and gives its room back."""
    requests, replies = (Ring.attach(address) for address in addresses.split())
    with requests, replies:
        while True:
            with requests.receive(Update, timeout=600) as lease:
                version = lease.message.version
            if version < 0:
                return
            replies.send(Done(), timeout=60)


def serve_queue(requests: "multiprocessing.Queue[object]", replies: "multiprocessing.Queue[int]") -> None:
    """The other process of the queue."""
    while (item := requests.get()) is not None:
        replies.put(len(pickle.loads(item) if isinstance(item, bytes) else item))  # noqa: S301


@contextmanager
def other_process(role: str, address: str) -> Iterator[None]:
    running = subprocess.Popen([sys.executable, __file__, role, address])
    with running:
        try:
            yield
        finally:
            try:
                running.wait(timeout=10)
            except subprocess.TimeoutExpired:
                running.kill()


@contextmanager
def our_side(address: str) -> Iterator[Peer]:
    with Endpoint.bind(address, protocol=PROTOCOL) as endpoint, other_process("endpoint", endpoint.address):
        try:
            yield endpoint.wait_for_peer(timeout=60)
        finally:
            endpoint.close()


Exchange = Callable[[list[list[object]]], None]


@contextmanager
def bare_side(address: str) -> Iterator[Exchange]:
    """Sends messages without waiting, then waits for as many answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind(address)
        with other_process("bare", socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")):
            assert socket.poll(60_000)
            peer = socket.recv_multipart()[0]

            def exchange(messages: list[list[object]]) -> None:
                for frames in messages:
                    socket.send_multipart([peer, b"envelope", *frames], copy=False)
                for _ in messages:
                    socket.recv_multipart(copy=False)

            try:
                yield exchange
            finally:
                socket.send_multipart([peer, b"end"])


def addresses(folder: Path, scheme: str) -> tuple[str, str]:
    if scheme == "tcp":
        return "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
    return f"ipc://{folder}/ours", f"ipc://{folder}/bare"


@pytest.mark.parametrize("in_flight", [1, BURST])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_tensors_of_64_mib(against, benchmark, tmp_path, scheme, in_flight):
    tensors = [torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for _ in range(in_flight)]
    mine, bare = addresses(tmp_path, scheme)
    with our_side(mine) as peer, bare_side(bare) as exchange:

        async def burst() -> None:
            await asyncio.gather(*(peer.call_async(Update(version=1, tensor=tensor), timeout=60) for tensor in tensors))

        def ours() -> None:
            if in_flight == 1:
                peer.call(Update(version=1, tensor=tensors[0]), timeout=60)
            else:
                asyncio.run(burst())

        def baseline() -> None:
            exchange([encode(Update(version=1, tensor=tensor)) for tensor in tensors])

        against(ours, baseline, owed=0.85, rounds=15)
        benchmark.extra_info["gib_per_s"] = in_flight * TENSOR_BYTES / 2**30 / benchmark.stats.stats.median


@contextmanager
def ring_side() -> Iterator[Callable[[torch.Tensor], None]]:
    """Sends a tensor through shared memory and waits for its receiver's answer."""
    with Ring.create("requests", 4 * TENSOR_BYTES + (1 << 20)) as requests, Ring.create("replies", 1 << 16) as replies:

        def send(tensor: torch.Tensor, version: int = 1) -> None:
            requests.send(Update(version=version, tensor=tensor), timeout=60)
            if version >= 0:
                replies.receive(Done, timeout=60).release()

        with other_process("ring", f"{requests.address} {replies.address}"):
            try:
                send(torch.zeros(1))
                yield send
            finally:
                send(torch.zeros(1), version=-1)


def test_shared_memory_against_memcpy(against, benchmark):
    tensor, copy = (torch.ones(TENSOR_BYTES, dtype=torch.uint8) for _ in range(2))
    with ring_side() as send:
        against(
            lambda: send(tensor),
            lambda: ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), TENSOR_BYTES),
            owed=0.7,
            rounds=25,
        )
    benchmark.extra_info["gib_per_s"] = TENSOR_BYTES / 2**30 / benchmark.stats.stats.median


@contextmanager
def queue_side() -> Iterator[Callable[[object], None]]:
    """Sends an object through a queue and waits for its receiver's answer."""
    spawn = multiprocessing.get_context("spawn")
    requests, replies = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=serve_queue, args=(requests, replies), daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # the new process imports this file by its name
        patch.syspath_prepend(Path(__file__).parents[1])
        process.start()

    def send(item: object) -> None:
        requests.put(item)
        replies.get(timeout=60)

    try:
        yield send
    finally:
        requests.put(None)
        process.join(10)
        process.kill()
        for queue in (requests, replies):
            queue.cancel_join_thread()
            queue.close()


def test_endpoint_against_a_pickled_tensor_in_a_queue(against, tmp_path):
    tensor = torch.zeros(TENSOR_BYTES, dtype=torch.uint8)
    with our_side(f"ipc://{tmp_path}/ours") as peer, queue_side() as send:
        against(
            lambda: peer.call(Update(version=1, tensor=tensor), timeout=60),
            lambda: send(pickle.dumps(tensor)),
            owed=5.0,
            rounds=9,
        )


def test_shared_memory_against_an_array_in_a_queue(against):
    """The queue pickles numpy's arrays with a copy less than torch's tensors."""
    tensor = torch.zeros(TENSOR_BYTES, dtype=torch.uint8)
    with ring_side() as ours, queue_side() as send:
        against(lambda: ours(tensor), lambda: send(tensor.numpy()), owed=5.0, rounds=9)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_round_trip_of_1_kib(benchmark, tmp_path, scheme):
    request = Echo(data=bytes(MESSAGE_BYTES))
    mine, bare = addresses(tmp_path, scheme)
    samples: dict[str, list[float]] = {"ours": [], "bare": []}
    with our_side(mine) as peer, bare_side(bare) as exchange:
        sides = {"ours": lambda: peer.call(request, timeout=60), "bare": lambda: exchange([[request.data]])}

        def turns() -> None:
            for side, trip in sides.items():
                for _ in range(200):
                    start = time.perf_counter()
                    trip()
                    samples[side].append(time.perf_counter() - start)

        benchmark.pedantic(turns, rounds=20, warmup_rounds=1)
    for side, seconds in samples.items():
        cuts = statistics.quantiles(seconds[200:], n=100)
        benchmark.extra_info.update({f"{side}_p50_us": cuts[49] * 1e6, f"{side}_p99_us": cuts[98] * 1e6})


if __name__ == "__main__":
    {"endpoint": serve_endpoint, "bare": serve_bare, "ring": serve_ring}[sys.argv[1]](sys.argv[2])
