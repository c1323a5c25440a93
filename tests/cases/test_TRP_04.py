"""TRP-04: a slow joiner loses the first messages, of a stream or of a broadcast, and waits for ever.

zeromq/libzmq#2267, zeromq/libzmq#4656, zeromq/libzmq#1594, opensistemas-hub/osbrain#358
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from drivetrain_transport import Publisher, Subscriber, WorkReceiver, WorkSender

ORDERS = ["consumer first", "both at once", "producer 3 s before"]

STREAM = {
    "producer": """
import sys
from drivetrain_transport import WorkSender
make = getattr(WorkSender, sys.argv[1])
with make(sys.argv[2]) as sender:
    for number in range(20):
        sender.send(number, timeout=30)
    sender.flush(timeout=30)
""",
    "consumer": """
import sys
from drivetrain_transport import WorkReceiver
make = getattr(WorkReceiver, sys.argv[1])
with make(sys.argv[2], type=int) as receiver:
    for index in range(20):
        with receiver.receive(timeout=30) as delivery:
            print(delivery.value, flush=True)
""",
}

BROADCAST = {
    "producer": """
import sys
from drivetrain_transport import Publisher
make = getattr(Publisher, sys.argv[1])
with make(sys.argv[2]) as publisher:
    publisher.publish("weights v1 ready")
    publisher.wait_taken(1, timeout=30)
""",
    "consumer": """
import sys
from drivetrain_transport import Subscriber
make = getattr(Subscriber, sys.argv[1])
with make(sys.argv[2], type=str) as subscriber:
    print(subscriber.next(timeout=30).value, flush=True)
""",
}


@contextmanager
def started(folder: Path, order: str, binds: str) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    processes = {}
    names = ["consumer", "producer"] if order == "consumer first" else ["producer", "consumer"]
    try:
        for index, name in enumerate(names):
            if index and order != "both at once":
                time.sleep(3.0 if order == "producer 3 s before" else 1.0)
            for kind, scripts in (("stream", STREAM), ("broadcast", BROADCAST)):
                way = "bind" if name == binds else "connect"
                command = [sys.executable, "-W", "error", "-c", scripts[name], way, f"ipc://{folder}/{kind}"]
                processes[f"{kind} {name}"] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("binds", ["producer", "consumer"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_message_arrives_in_any_order_of_starts(tmp_path: Path, order: str, binds: str) -> None:
    with started(tmp_path, order, binds) as processes:
        numbers, _ = processes["stream consumer"].communicate(timeout=40)
        value, _ = processes["broadcast consumer"].communicate(timeout=40)
        assert numbers.split() == [str(number) for number in range(20)]
        assert value == "weights v1 ready\n"
        assert {name: process.wait(20) for name, process in processes.items()} == dict.fromkeys(processes, 0)


def test_a_consumer_that_is_restarted_in_mid_run_misses_nothing(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/r"
    got = []

    def consume(count: int) -> None:
        with WorkReceiver.bind(address, type=int, credit=4) as receiver:
            for _ in range(count):
                with receiver.receive(timeout=20) as delivery:
                    got.append(delivery.value)

    with WorkSender.connect(address) as sender:
        producing = threading.Thread(target=lambda: [sender.send(number, timeout=20) for number in range(20)])
        producing.start()
        for count in (3, 5, 12):  # each leaves with messages that it has got and not looked at
            consume(count)
        producing.join(20)
        assert sender.unacknowledged == 0
    assert got == list(range(20))


def test_a_subscriber_that_is_restarted_in_mid_run_gets_the_value_at_once() -> None:
    class Ready(msgspec.Struct):
        version: int

    with Publisher.bind() as publisher:
        publisher.publish(Ready(1))
        for _ in range(2):
            with Subscriber.connect(publisher.address, type=Ready) as subscriber:
                start = time.monotonic()
                assert subscriber.next(timeout=20).value == Ready(1)
                assert time.monotonic() - start < 5


def test_a_start_that_finds_nobody_fails_in_bounded_time(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody"
    start = time.monotonic()
    with WorkSender.connect(address) as sender, pytest.raises(TimeoutError, match="no receiver is there"):
        sender.send(1, timeout=0.5)
    with WorkReceiver.connect(address, type=int) as receiver, pytest.raises(TimeoutError, match="no sender is there"):
        receiver.receive(timeout=0.5)
    with (
        Subscriber.connect(address, type=int) as subscriber,
        pytest.raises(TimeoutError, match="no publisher is there"),
    ):
        subscriber.next(timeout=0.5)
    assert time.monotonic() - start < 10
