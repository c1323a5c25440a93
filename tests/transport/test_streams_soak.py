"""Four senders, two receivers, and SIGKILL for either side all the time: each message is handled exactly once."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from drivetrain_transport import Journal

SAMPLE = """
import contextlib, sys, time
import msgspec
from drivetrain_transport import AlreadyHandled, Journal, WorkReceiver, WorkSender

class Sample(msgspec.Struct):
    number: int
    data: bytes
"""

SENDER = (
    SAMPLE
    + """
folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with WorkSender.connect([f"ipc://{folder}/receiver-0", f"ipc://{folder}/receiver-1"], stream=name) as sender:
    for number in sender.resume(timeout=60).todo(count):
        sender.send(Sample(number, bytes([number % 251]) * 2000), number=number, timeout=60)
    sender.flush(timeout=60)
"""
)

RECEIVER = (
    SAMPLE
    + """
folder, name, work = sys.argv[1], sys.argv[2], float(sys.argv[3])
with Journal(f"{folder}/journal") as journal:
    with journal.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS effects (stream TEXT, number INTEGER, good INTEGER)")
    with WorkReceiver.bind(f"ipc://{folder}/{name}", type=Sample, journal=journal, name=name, credit=200) as receiver:
        while True:
            delivery = receiver.receive(timeout=120)
            value = delivery.value
            time.sleep(work)
            good = value.number == delivery.number and value.data == bytes([value.number % 251]) * 2000
            with contextlib.suppress(AlreadyHandled), journal.handling(delivery) as connection:
                row = (delivery.stream, delivery.number, good)
                connection.execute("INSERT INTO effects VALUES (?, ?, ?)", row)
"""
)


@dataclass
class Soak:
    """The processes of a run, and what was done to them."""

    folder: Path
    kills: dict[str, int] = field(default_factory=lambda: {"sender": 0, "receiver": 0})
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        self.running[name] = subprocess.Popen(self.commands[name])

    def watch(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                self.seen.setdefault(process.pid, []).append((time.monotonic(), memory(process.pid)))

    def kill(self, name: str) -> None:
        process = self.running[name]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills[name.split("-")[0]] += 1
        self.start(name)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def memory(pid: int) -> int:
    """Bytes of a process in memory."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


def run(folder: Path, *, count: int, pause: Callable[[], float], work: float, seed: int, limit: float) -> Soak:
    chance = random.Random(seed)
    soak = Soak(folder)
    python = [sys.executable, "-W", "error", "-c"]
    for index in range(2):
        soak.commands[f"receiver-{index}"] = [*python, RECEIVER, str(folder), f"receiver-{index}", str(work)]
    for index in range(4):
        soak.commands[f"sender-{index}"] = [*python, SENDER, str(folder), f"sender-{index}", str(count // 4)]
    try:
        for name in soak.commands:
            soak.start(name)
        end = time.monotonic() + limit
        following = time.monotonic() + pause()
        while any(soak.running[f"sender-{index}"].poll() is None for index in range(4)):
            assert time.monotonic() < end, f"not through after {limit} s: {soak.kills}, {len(handled(folder))} handled"
            soak.watch()
            for name, process in soak.running.items():
                assert process.poll() in (None, 0), f"{name} failed by itself: {process.poll()}"
            if time.monotonic() > following:
                side = chance.choice(["sender", "receiver"])
                living = [name for name, one in soak.running.items() if one.poll() is None and name.startswith(side)]
                soak.kill(chance.choice(living))
                following = time.monotonic() + pause()
            time.sleep(0.05)
    finally:
        soak.close()
    return soak


def handled(folder: Path) -> list[tuple[str, int, int]]:
    connection = sqlite3.connect(folder / "journal")
    try:
        return connection.execute("SELECT stream, number, good FROM effects ORDER BY stream, number").fetchall()
    finally:
        connection.close()


def check(soak: Soak, count: int) -> None:
    assert handled(soak.folder) == [(f"sender-{index}", n, 1) for index in range(4) for n in range(count // 4)]
    with Journal(soak.folder / "journal") as journal:
        assert [journal.handled(f"sender-{index}").missing(count // 4) for index in range(4)] == [()] * 4
    for samples in soak.seen.values():
        # By its third second a process has its imports, its connections and its credit's worth of messages.
        settled = [size for moment, size in samples if moment > samples[0][0] + 3 and size]
        if settled:
            assert max(settled) < settled[0] + (12 << 20), f"{settled[0]} bytes became {max(settled)}"


def test_each_message_is_handled_exactly_once_whoever_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    soak = run(tmp_path, count=10_000, pause=lambda: chance.uniform(0.3, 0.9), work=0.0, seed=3, limit=120)
    check(soak, 10_000)
    assert sum(soak.kills.values()) >= 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_messages_are_handled_exactly_once_with_a_kill_every_second(tmp_path: Path) -> None:
    soak = run(tmp_path, count=100_000, pause=lambda: 1.0, work=0.001, seed=11, limit=800)
    check(soak, 100_000)
    assert min(soak.kills.values()) >= 15
