"""Processes with a ring are killed at random, stopped and forked: nothing is torn, lost or left over."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from drivetrain_transport import Ring
from waiting import wait_until


@contextmanager
def started(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process of its own, and what it prints. It is gone afterwards."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


PRODUCER = """
import os, sys, zlib
from drivetrain_transport import Ring
address, log, name = sys.argv[1:]
log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
ring = Ring.attach(address)
for number in range(1 << 30):
    key = f'{name}:{number}'.encode()
    body = key * (1 + (number * 7919) % 5000)
    ring.send_frames([key, zlib.crc32(body).to_bytes(4, 'little'), body], timeout=20)
    os.write(log, key + b'\\n')
"""

CONSUMER = """
import os, sys, zlib
from drivetrain_transport import Ring
address, log = sys.argv[1:]
log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
ring = Ring.attach(address)
while True:
    with ring.receive_frames(timeout=20) as lease:
        key, check, body = lease.frames
        whole = zlib.crc32(body) == int.from_bytes(check, 'little') and len(body) % len(key) == 0
        kind = 'torn' if not whole else 'again' if lease.redelivered else 'first'
        os.write(log, f'{kind} {bytes(key).decode()}\\n'.encode())
"""


def soak(folder: Path, seconds: float, pause: float) -> None:
    """Two producers and two consumers, of which one is killed every `pause` seconds on average and started anew."""
    chance = random.Random(0)
    sent, handled = folder / "sent", folder / "handled"
    with Ring.create("soak", 200_000, max_records=64) as ring:
        generations = 0

        def launch(kind: str) -> tuple[subprocess.Popen[str], ExitStack]:
            nonlocal generations
            generations += 1
            stack = ExitStack()
            arguments = (sent, f"p{generations}") if kind == "producer" else (handled,)
            code = PRODUCER if kind == "producer" else CONSUMER
            return stack.enter_context(started(code, ring.address, *arguments))[0], stack

        kinds = ["producer", "producer", "consumer", "consumer"]
        running = [launch(kind) for kind in kinds]
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                victim = chance.randrange(4)
                process, stack = running[victim]
                deadline = time.monotonic() + 10
                while process.pid not in ring.processes:
                    assert process.poll() is None
                    assert time.monotonic() < deadline, "a process did not attach within 10 s"
                    time.sleep(0.001)
                time.sleep(chance.uniform(0, 2 * pause))  # the moment of death is what is at random
                stack.close()
                running[victim] = launch(kinds[victim])
        finally:
            for _, stack in running:
                stack.close()
        assert ring.processes == [os.getpid()]
        kept = {}
        deadline = time.monotonic() + 10
        while ring.stats.queued:
            assert time.monotonic() < deadline, "the ring was not empty within 10 s"
            with ring.receive_frames(timeout=0) as lease:
                kept[bytes(lease.frames[0]).decode()] = lease.redelivered
        ring.send_frames([bytes(ring.capacity_bytes - 64)], timeout=0)

    lines = [line.split() for line in handled.read_text().splitlines()]
    first = [key for kind, key in lines if kind == "first"] + [key for key, again in kept.items() if not again]
    again = {key for kind, key in lines if kind == "again"} | {key for key, again in kept.items() if again}
    confirmed = sent.read_text().split()
    assert [key for kind, key in lines if kind == "torn"] == []
    assert len(first) == len(set(first))
    assert len(confirmed) > 200
    assert set(confirmed) <= set(first) | again
    unconfirmed = (set(first) | again) - set(confirmed)
    assert len(unconfirmed) <= generations  # sent, and killed before it was written down
    assert generations > 10


def test_random_deaths_tear_and_lose_nothing(tmp_path: Path) -> None:
    soak(tmp_path, seconds=6, pause=0.03)


@pytest.mark.slow
def test_random_deaths_for_a_minute(tmp_path: Path) -> None:
    soak(tmp_path, seconds=60, pause=0.1)


def test_the_record_of_a_killed_consumer_goes_to_the_next_one_who_already_waits() -> None:
    with Ring.create("next", 8192) as ring:
        code = """
        import sys
        from drivetrain_transport import Ring
        ring = Ring.attach(sys.argv[1])
        lease = ring.receive_frames(timeout=10)
        print(bytes(lease.frames[0]).decode(), lease.delivery, flush=True)
        sys.stdin.read()
        """
        ring.send_frames([b"work"], timeout=1)
        with started(code, ring.address) as (process, out):
            assert out.readline() == "work 1\n"
            with pytest.raises(
                TimeoutError, match=rf"1 leased\); the oldest is leased by process {process.pid} \(slot 1\) for 0"
            ):
                ring.receive_frames(timeout=0.3)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):  # silent, but alive
                ring.receive_frames(timeout=0.3)
            process.kill()
            process.wait()
        with ring.receive_frames(timeout=5) as lease:
            assert bytes(lease.frames[0]) == b"work"
            assert (lease.redelivered, lease.delivery) == (True, 2)
        assert ring.stats.redelivered == 1


def test_the_others_go_on_when_the_creator_is_killed_and_nothing_is_left_when_all_are() -> None:
    code = """
    import sys
    from drivetrain_transport import Ring
    ring = Ring.create('orphan', 1 << 20)
    ring.send_frames([b'last words'], timeout=1)
    print(ring.address, flush=True)
    sys.stdin.read()
    """
    with started(code) as (creator, out):
        address = out.readline().strip()
        before = set(os.listdir("/dev/shm"))
        with Ring.attach(address) as heir:
            creator.kill()
            creator.wait()
            with heir.receive_frames(timeout=5) as lease:
                assert bytes(lease.frames[0]) == b"last words"
            with Ring.attach(heir.address) as third:
                third.send_frames([b"on we go"], timeout=1)
                heir.receive_frames(timeout=1).release()
                assert heir.processes == [os.getpid()] * 2
        del heir, third, lease
    assert "orphan" not in Path("/proc/self/maps").read_text()
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if "orphan" in link]
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "orphan" in name}


def test_a_forked_child_neither_has_the_ring_nor_keeps_its_dead_parent_alive() -> None:
    with Ring.create("fork", 8192) as ring:
        code = """
        import os, sys
        from drivetrain_transport import Ring
        ring = Ring.attach(sys.argv[1])
        lease = ring.receive_frames(timeout=10)
        if os.fork():
            sys.stdin.read()
        for use in (lambda: ring.send_frames([b''], timeout=1), lambda: ring.receive_frames(timeout=1)):
            try:
                use()
            except RuntimeError as error:
                print('belongs to the parent process: attach to shm://' in str(error))
        del lease
        ring.close()
        print(os.getpid(), flush=True)
        sys.stdin.read()
        """
        ring.send_frames([b"work"], timeout=1)
        with started(code, ring.address) as (parent, out):
            assert [out.readline() for _ in range(2)] == ["True\n"] * 2
            child = int(out.readline())
            with pytest.raises(TimeoutError):  # the parent still has it
                ring.receive_frames(timeout=0.3)
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            with ring.receive_frames(timeout=5) as lease:
                assert lease.redelivered
            os.kill(child, signal.SIGKILL)


def test_a_stopped_process_that_has_the_header_is_named_and_nothing_is_broken_when_it_goes_on() -> None:
    with Ring.create("stopped", 8192) as ring:
        code = """
        import os, signal, sys, time
        from drivetrain_transport import Ring
        ring = Ring.attach(sys.argv[1])
        ring._hand._locked(lambda: (print('in', flush=True), os.kill(os.getpid(), signal.SIGSTOP)))
        ring.close()
        """
        with started(code, ring.address) as (process, out):
            assert out.readline() == "in\n"
            begun = time.monotonic()
            with pytest.raises(TimeoutError, match=rf"process {process.pid} holds the header and does not move"):
                ring.send_frames([b"x"], timeout=0.1)
            assert time.monotonic() - begun < 5
            process.send_signal(signal.SIGCONT)
            ring.send_frames([b"x"], timeout=5)
            assert process.wait(timeout=10) == 0
        assert ring.processes == [os.getpid()]


def test_a_stopped_process_that_is_first_in_turn_for_room_is_named() -> None:
    with Ring.create("turns", 8192) as ring:
        code = """
        import sys
        from drivetrain_transport import Ring
        ring = Ring.attach(sys.argv[1])
        print("attached", flush=True)
        ring.send_frames([bytes(6000)], timeout=60)
        """
        ring.send_frames([bytes(4000)], timeout=1)
        with started(code, ring.address) as (process, out):
            assert out.readline() == "attached\n"
            state = ring._hand._state
            wait_until(lambda: any(state._words[state._claims : state._table]), "the claim")
            process.send_signal(signal.SIGSTOP)
            ring.receive_frames(timeout=1).release()  # the ring is empty, and the other one's turn
            with pytest.raises(
                TimeoutError,
                match=rf"no room for a record of 164 bytes within 0.2 s: 0 of 8192 bytes in 0 .*"
                rf"; first in turn is process {process.pid} \(slot 1\), does it run\?; attached: ",
            ):
                ring.send_frames([bytes(100)], timeout=0.2)
            with pytest.raises(
                TimeoutError, match=r"no record within 0 s: 0 of 8192 bytes in 0 of at most 4096 records; a"
            ):
                ring.receive_frames(timeout=0)  # whose turn it is to send is nothing to who receives
            process.send_signal(signal.SIGCONT)
            ring.send_frames([bytes(100)], timeout=20)
            assert process.wait(timeout=20) == 0
            leases = [ring.receive_frames(timeout=1) for _ in range(2)]
            assert [lease.nbytes for lease in leases] == [6064, 164]


def test_a_stopped_process_that_writes_is_named_with_its_slot() -> None:
    with Ring.create("writing", 8192) as ring:
        code = """
        import os, signal, sys
        from drivetrain_transport import Ring
        from drivetrain_transport._rings.hand import RingHand
        ring = Ring.attach(sys.argv[1])
        RingHand.write = lambda *_: (print("writing", flush=True), os.kill(os.getpid(), signal.SIGSTOP))
        ring.send_frames([bytes(6000)], timeout=60)
        """
        with started(code, ring.address) as (process, out):
            assert out.readline() == "writing\n"
            with pytest.raises(
                TimeoutError, match=rf"the oldest is being written by process {process.pid} \(slot 1\) for"
            ):
                ring.send_frames([bytes(6000)], timeout=0.2)
