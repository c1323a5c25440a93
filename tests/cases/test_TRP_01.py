"""TRP-01: ZeroMQ drops messages silently at its high-water mark, when the consumer is slow or is killed and comes back.

zeromq/libzmq#2037, zeromq/libzmq#3689, zeromq/libzmq PR 1156, zeromq/pyzmq#1241
"""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from drivetrain_transport import WorkSender

CONSUMER = """
import contextlib, sys, time
import msgspec
from drivetrain_transport import AlreadyHandled, Journal, WorkReceiver

class Sample(msgspec.Struct):
    number: int
    data: bytes

folder, credit = sys.argv[1:]
with Journal(f"{folder}/journal") as journal:
    with journal.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS seen (number INTEGER)")
    settings = {"credit": int(credit)} if credit != "default" else {}
    with WorkReceiver.bind(f"ipc://{folder}/consumer", type=Sample, journal=journal, **settings) as receiver:
        while True:
            delivery = receiver.receive(timeout=100)
            assert delivery.value.number == delivery.number
            if delivery.number % 500 == 0:
                time.sleep(0.1)  # slow now and then: whatever queues there are run full
            with contextlib.suppress(AlreadyHandled), journal.handling(delivery) as connection:
                connection.execute("INSERT INTO seen VALUES (?)", (delivery.number,))
"""


class Sample(msgspec.Struct):
    number: int
    data: bytes


def seen(folder: Path) -> list[int]:
    try:
        with sqlite3.connect(folder / "journal") as connection:
            return [number for (number,) in connection.execute("SELECT number FROM seen ORDER BY rowid")]
    except sqlite3.OperationalError:
        return []  # the consumer has not begun
    finally:
        if "connection" in locals():
            connection.close()


@pytest.mark.parametrize(
    ("credit", "count"),
    [(1, 1_000), pytest.param(1, 10_000, marks=pytest.mark.slow), (10, 10_000), ("default", 10_000)],
)
def test_a_slow_consumer_that_is_killed_and_restarted_misses_nothing(
    tmp_path: Path, credit: int | str, count: int
) -> None:
    command = [sys.executable, "-W", "error", "-c", CONSUMER, str(tmp_path), str(credit)]
    consumer = subprocess.Popen(command)
    killed = threading.Event()

    def kill_in_the_middle() -> None:
        nonlocal consumer
        end = time.monotonic() + 60
        while len(seen(tmp_path)) < count // 2 and time.monotonic() < end:
            time.sleep(0.02)
        consumer.send_signal(signal.SIGKILL)
        consumer.wait()
        consumer = subprocess.Popen(command)
        killed.set()

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    try:
        with WorkSender.connect(f"ipc://{tmp_path}/consumer", stream="samples") as sender:
            for number in range(count):
                sender.send(Sample(number, bytes(1000)), timeout=60)
            sender.flush(timeout=60)
            stats = sender.stats
        killer.join()
    finally:
        killer.join()
        consumer.kill()
        consumer.wait()
    numbers = seen(tmp_path)
    assert killed.is_set()
    assert len(numbers) == count
    assert sorted(numbers) == list(range(count))
    if credit == 1:
        assert numbers == list(range(count))
    # Memory is bounded: no more was ever on its way than the credit, and it was the sender that waited.
    assert stats.queued_high_water <= (1024 if credit == "default" else int(credit))
    assert stats.waits > 0
    assert stats.refused == 0
