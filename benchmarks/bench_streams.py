"""Small messages through a work stream, each acknowledged, beside bare ZeroMQ PUSH and PULL, which keep no account."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq
from drivetrain_transport import WorkSender

COUNT = 20_000
SIZE = 100
ROUNDS = 5

BARE = """
import sys
import msgspec, zmq
class Sample(msgspec.Struct):
    number: int
    data: bytes
decoder = msgspec.msgpack.Decoder(Sample)
with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as done:
    pull.bind(f"ipc://{sys.argv[1]}/bare")
    done.connect(f"ipc://{sys.argv[1]}/done")
    while True:
        for index in range(int(sys.argv[2])):
            decoder.decode(pull.recv())
        done.send(b"all")
"""

STREAM = """
import sys
import msgspec
from drivetrain_transport import WorkReceiver
class Sample(msgspec.Struct):
    number: int
    data: bytes
with WorkReceiver.bind(f"ipc://{sys.argv[1]}/stream", type=Sample) as receiver:
    while True:
        receiver.receive(timeout=600).ack()
"""


class Sample(msgspec.Struct):
    number: int
    data: bytes


def test_small_messages_beside_push_and_pull(benchmark, tmp_path: Path) -> None:
    samples = [Sample(number, bytes(SIZE)) for number in range(COUNT)]
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(COUNT)]) for script in (BARE, STREAM)
    ]
    context = zmq.Context()
    push, done = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.linger = 0
    push.connect(f"ipc://{tmp_path}/bare")
    done.bind(f"ipc://{tmp_path}/done")
    encoder = msgspec.msgpack.Encoder()
    seconds: list[float] = []

    def bare() -> None:
        start = time.perf_counter()
        for sample in samples:
            push.send(encoder.encode(sample))
        assert done.poll(60_000)
        done.recv()
        seconds.append(time.perf_counter() - start)

    try:
        with WorkSender.connect(f"ipc://{tmp_path}/stream") as sender:

            def stream() -> None:
                for sample in samples:
                    sender.send(sample, timeout=60)
                sender.flush(timeout=60)

            benchmark.pedantic(stream, setup=bare, rounds=ROUNDS, warmup_rounds=1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        context.destroy(linger=0)
    median, baseline = benchmark.stats.stats.median, statistics.median(seconds[1:])
    benchmark.extra_info.update(
        ratio=baseline / median, baseline_median_s=baseline, messages_per_s=COUNT / median, bytes=SIZE
    )
