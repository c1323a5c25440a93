"""Tensors of 64 MiB to another process through a ring: against a bare copy, and against a queue that pickles.

The other processes are fresh ones that run this file; they look at the ends of each tensor and answer.
"""

import ctypes
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from drivetrain_transport import Ring

SIZE = 64 << 20
MESSAGES = 4  # a round
SMALL = 1 << 10
SMALL_MESSAGES = 2_000
SECONDS = 60


class Message(msgspec.Struct):
    tensor: torch.Tensor
    last: bool


@contextmanager
def other_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=10)  # a queue that is killed leaves its semaphores in /dev/shm
        finally:
            process.kill()


@contextmanager
def to_other_process(capacity: int) -> Iterator[Callable[[torch.Tensor, int], None]]:
    """Sends a tensor so many times, and returns when the other process has looked at each of them."""
    with Ring.create("there", capacity) as there, Ring.create("back", 1 << 16) as back:
        with other_process("consume", there.address, back.address):
            with back.receive(str, timeout=SECONDS) as lease:
                assert lease.message == "here"

            def send(tensor: torch.Tensor, count: int) -> None:
                for number in range(count):
                    there.send(Message(tensor=tensor, last=number == count - 1), timeout=SECONDS)
                with back.receive(int, timeout=SECONDS) as answer:
                    assert answer.message == count * int(tensor[0])

            yield send
            there.send(Message(tensor=torch.empty(0), last=True), timeout=SECONDS)


def test_against_a_copy(against: Callable[..., None], benchmark: Any) -> None:
    source = torch.ones(SIZE, dtype=torch.uint8)
    target = torch.zeros(SIZE, dtype=torch.uint8)

    def copy() -> None:
        for _ in range(MESSAGES):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), SIZE)

    with to_other_process(2 * SIZE + (1 << 16)) as send:
        against(lambda: send(source, MESSAGES), copy, owed=0.7, rounds=9)
    benchmark.extra_info["bytes_per_s"] = MESSAGES * SIZE / benchmark.stats.stats.median


def test_against_a_multiprocessing_queue(against: Callable[..., None]) -> None:
    source = torch.ones(SIZE, dtype=torch.uint8)
    with to_other_process(2 * SIZE + (1 << 16)) as send, other_process("queue") as queue:
        assert queue.stdin is not None
        assert queue.stdout is not None

        def through_queue() -> None:
            queue.stdin.write("\n")
            queue.stdin.flush()
            assert queue.stdout.readline() == f"{MESSAGES}\n"

        against(lambda: send(source, MESSAGES), through_queue, owed=5.0, rounds=5)


@pytest.mark.parametrize("size", [SMALL])
def test_small_records(benchmark: Any, size: int) -> None:
    source = torch.ones(size, dtype=torch.uint8)
    with to_other_process(1 << 20) as send:
        benchmark.pedantic(lambda: send(source, SMALL_MESSAGES), rounds=7, warmup_rounds=1)
    benchmark.extra_info["records_per_s"] = SMALL_MESSAGES / benchmark.stats.stats.median


def test_round_trip(benchmark: Any) -> None:
    source = torch.ones(SMALL, dtype=torch.uint8)
    with to_other_process(1 << 20) as send:
        seconds = []
        for _ in range(1_000):
            start = time.perf_counter()
            send(source, 1)
            seconds.append(time.perf_counter() - start)
        benchmark.pedantic(lambda: send(source, 1), rounds=100)
    seconds.sort()
    benchmark.extra_info.update(p50_us=seconds[500] * 1e6, p99_us=seconds[990] * 1e6)


def consume(there_address: str, back_address: str) -> None:
    with Ring.attach(there_address) as there, Ring.attach(back_address) as back:
        back.send("here", timeout=SECONDS)
        total = 0
        while True:
            with there.receive(Message, timeout=SECONDS) as lease:
                tensor, last = lease.message.tensor, lease.message.last
                if not len(tensor):
                    return
                assert tensor[0] == tensor[-1]
                total += int(tensor[0])
                del tensor
            if last:
                back.send(total, timeout=SECONDS)
                total = 0


def count_from(queue: Any, answers: Any) -> None:
    while True:
        answers.put(int(queue.get()[-1]))


def serve_queue() -> None:
    """For each line that comes in, send a round through a queue to a process, and print its sum of answers."""
    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    context.Process(target=count_from, args=(queue, answers), daemon=True).start()
    source = np.ones(SIZE, dtype=np.uint8)
    for _ in sys.stdin:
        for _ in range(MESSAGES):
            queue.put(source)
        print(sum(answers.get(timeout=SECONDS) for _ in range(MESSAGES)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "queue":
        serve_queue()
    else:
        consume(*sys.argv[2:])
