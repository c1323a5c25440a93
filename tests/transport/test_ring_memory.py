"""The memory of a ring: how long bytes stay in it, who finds it, and that nothing of it is left."""

import ctypes
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain_transport import PeerLost, Ring
from drivetrain_transport._rings.free import free_memory


@contextmanager
def pair(capacity: int = 1 << 16, **options: int) -> Iterator[tuple[Ring, Ring]]:
    with Ring.create("pair", capacity, **options) as one, Ring.attach(one.address) as other:
        yield one, other


def test_the_bytes_of_a_record_stay_while_a_tensor_of_it_is_alive() -> None:
    with pair(8192) as (sender, receiver):
        sender.send(torch.full((900,), 7), timeout=1)
        with receiver.receive(torch.Tensor, timeout=1) as lease:
            kept = lease.message[100:200]
        with pytest.raises(
            TimeoutError,
            match=rf"ring pair: no room for a record of 73\d\d bytes within 0.15 s: 73\d\d of 8192 bytes in 1 of at "
            rf"most 4096 records \(1 finished but still in use\); the oldest is finished but still in use by process "
            rf"{os.getpid()} \(slot 1\) for 0.\d s; attached: {os.getpid()}, {os.getpid()}",
        ):
            sender.send(torch.full((900,), 8), timeout=0.15)
        assert kept.tolist() == [7] * 100
        del kept
        sender.send(torch.full((900,), 8), timeout=0)
        with receiver.receive(torch.Tensor, timeout=0) as lease:
            assert lease.message.tolist() == [8] * 900
            assert lease.delivery == 1


def test_also_an_array_a_view_and_what_garbage_keeps() -> None:
    with pair(8192) as (sender, receiver):

        def full() -> bool:
            try:
                sender.send(np.zeros(900), timeout=0)
            except TimeoutError:
                return True
            receiver.receive(np.ndarray, timeout=0).release()
            return False

        for keep in (
            lambda lease: lease.message[::2],
            lambda lease: lease.frames[1][10:20],
            lambda lease: {"cycle": [lease.message]},
        ):
            sender.send(np.zeros(900), timeout=1)
            with receiver.receive(np.ndarray, timeout=1) as lease:
                kept = keep(lease)
            if isinstance(kept, dict):
                kept["cycle"].append(kept)
            assert full()
            del kept
            if full():
                import gc

                gc.collect()
            assert not full()


def test_close_gives_the_memory_back() -> None:
    def mapped() -> str:
        with open("/proc/self/maps") as maps:
            return maps.read()

    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    ring = Ring.create("memory", 1 << 20)
    ring.send(torch.ones(10), timeout=1)
    lease = ring.receive(torch.Tensor, timeout=1)
    kept = lease.message
    assert "drivetrain-ring.memory" in mapped()
    ring.close()
    assert kept.tolist() == [1.0] * 10
    del kept, lease
    assert "drivetrain-ring.memory" not in mapped()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_a_ring_that_is_forgotten_warns_and_closes() -> None:
    ring = Ring.create("forgotten", 4096)
    with pytest.warns(ResourceWarning, match="ring forgotten was not closed"):
        del ring


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Ring.create("a/b", 4096), "'a/b' is no name for a ring"),
        (lambda: Ring.create("", 4096), "'' is no name"),
        (lambda: Ring.create("x", 0), "capacity_bytes is 0"),
        (lambda: Ring.create("x", 4096, max_records=-1), "max_records is -1"),
        (lambda: Ring.create("x", 4096, max_processes=0), "max_processes is 0"),
        (lambda: Ring.attach("samples"), "'samples' is no address of a ring"),
        (lambda: Ring.attach("shm://1/2/x"), "no address of a ring"),
        (lambda: Ring.attach("shm://../../etc/passwd"), "no address of a ring"),
    ],
)
def test_bad_arguments_are_refused_by_name(make: Callable[[], Ring], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_an_address_of_something_else_is_nobody() -> None:
    with Ring.create("here", 4096) as ring, open(os.devnull) as other:
        *_, tail = ring.address.rpartition("/")
        for wrong in (
            f"shm://{os.getpid()}/{other.fileno()}/{tail}",
            f"shm://{os.getpid()}/999999/{tail}",
            ring.address.replace(str(os.getpid()), "4194305"),
            ring.address[:-1] + ("0" if ring.address[-1] != "0" else "1"),
        ):
            with pytest.raises(PeerLost, match=r"cannot attach to shm://"):
                Ring.attach(wrong)


def test_a_full_table_of_processes_is_said_and_a_free_place_is_used_again() -> None:
    with Ring.create("small", 4096, max_processes=2) as ring:
        for _ in range(3):
            with Ring.attach(ring.address):
                with pytest.raises(RuntimeError, match="ring small has room for 2 processes"):
                    Ring.attach(ring.address)


def test_memory_that_is_not_to_be_had() -> None:
    code = """
    import os, resource
    from drivetrain_transport import Ring
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = len(os.listdir('/proc/self/fd'))
    try:
        Ring.create('huge', 1 << 21)
    except OSError as error:
        print(len(os.listdir('/proc/self/fd')) - before, error.strerror)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 ring huge: no 2")


def test_more_memory_than_there_is_is_refused_before_any_is_taken() -> None:
    """Linux would hand it out page by page, and kill this process or another one when it has no more."""
    code = """
    import resource
    from drivetrain_transport import Ring
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # should the look ahead fail, this ends it
    import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        Ring.create('huge', 1 << 46)
    except OSError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    said = re.fullmatch(
        r"\[Errno 12\] ring huge: no 7\d{13} bytes of memory, (\d+) are free: make it smaller\n", done.stdout
    )
    assert said is not None, done.stdout + done.stderr
    assert 1 << 20 < int(said[1]) < 1 << 46


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 5 << 20),
        ("0::/mine", {"mine/memory.max": "max\n", "mine/memory.current": "1048576\n"}, 5 << 20),
        (
            "0::/mine",
            {
                "mine/memory.max": f"{4 << 20}\n",
                "mine/memory.current": f"{3 << 20}\n",
                "mine/memory.stat": f"anon 7\ninactive_file {1 << 20}\nactive_file 4096\n",
            },
            (2 << 20) + 4096,
        ),
        (
            "0::/above/mine",
            {"above/memory.max": "7000\n", "above/memory.current": "9000\n", "above/memory.stat": ""},
            0,
        ),
        (
            "4:memory:/seen/from/outside",
            {
                "memory/memory.limit_in_bytes": f"{2 << 20}\n",
                "memory/memory.usage_in_bytes": f"{1 << 20}\n",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 4096\n",
            },
            (1 << 20) + 4096,
        ),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_the_control_groups(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    told = {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 4096 kB\nSwapFree: 1024 kB\n", "proc/self/cgroup": group}
    for path, text in {**told, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert free_memory(tmp_path) == expected
    assert free_memory(tmp_path / "nothing is told here") == 1 << 62


def test_frames_of_any_kind_of_memory() -> None:
    with pair(1 << 20) as (sender, receiver):
        big = bytes(range(256)) * 1000
        numbers = (ctypes.c_uint16 * 3)(1, 2, 3)
        sender.send_frames(
            [b"", big, bytearray(big), np.arange(4.0), numbers, np.zeros((0, 5)), memoryview(big)[::1]], timeout=1
        )
        with receiver.receive_frames(timeout=1) as lease:
            expected = [b"", big, big, np.arange(4.0).tobytes(), bytes(numbers), b"", big]
            assert [bytes(frame) for frame in lease.frames] == expected
            assert [bytes(frame) for frame in lease.copy()] == expected
        read_only = np.zeros(100_000, dtype=np.uint8)
        read_only.flags.writeable = False
        sender.send(read_only, timeout=1)
        with receiver.receive(np.ndarray, timeout=1) as lease:
            assert lease.message.shape == (100_000,)
