"""How tensor groups end: who is named, how soon, and what is left."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
import torch
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from drivetrain_transport.device._moving import read
from tensor_groups import PAIR, member_process, members, on_each_device, said
from waiting import wait_until


def resources() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_who_does_not_come_to_an_operation_is_named_and_where_it_is() -> None:
    """c waits for b elsewhere; a waits for c, is told so at its deadline, and the two others' waits end with it."""
    names = ("a", "b", "c")
    with members(names) as (a, b, c):
        x = torch.zeros(4)
        astray = c(lambda group: group.receive({"x": x}, "b", timeout=60))
        waits = b(lambda group: group.broadcast({"x": torch.zeros(4)}, "c", timeout=60))
        start = time.monotonic()
        with pytest.raises(GroupBroken, match=r"timeout 1 s.*c did not arrive, it is in receive from b") as caught:
            a(lambda group: group.broadcast({"x": torch.zeros(4)}, "c", timeout=1)).result(30)
        assert time.monotonic() - start < 5
        assert caught.value.missing == ("c",)
        for future in (astray, waits):
            with pytest.raises(GroupBroken, match="c did not arrive"):
                future.result(10)


@on_each_device
def test_a_member_killed_in_an_operation_is_named_at_once_and_nothing_of_the_group_is_left(
    devices: tuple[str, str],
) -> None:
    with Rendezvous.host() as host:
        for turn in range(3):
            with member_process(host.address, devices[1], PAIR, "idle") as child:
                said(child, "joining")
                with TensorGroup.form(PAIR, "a", host, timeout=60, device=devices[0]) as group:
                    said(child, "formed")
                    threading.Timer(0.2, child.kill).start()
                    start = time.monotonic()
                    with pytest.raises(GroupBroken, match=r"receive from b.*b is gone") as caught:
                        group.receive({"x": torch.zeros(1 << 20, device=devices[0])}, "b", timeout=60)
                    assert caught.value.missing == ("b",)
                    assert time.monotonic() - start < 10
            if turn == 0:
                before = resources()  # the first use of a device starts threads that stay
            wait_until(lambda before=before: resources() <= before, f"no more than {before} threads, descriptors")


@on_each_device
def test_a_stopped_process_is_named_at_the_deadline(devices: tuple[str, str]) -> None:
    with Rendezvous.host() as host, member_process(host.address, devices[1], PAIR, "idle") as child:
        said(child, "joining")
        with TensorGroup.form(PAIR, "a", host, timeout=60, device=devices[0]) as group:
            said(child, "formed")
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(GroupBroken, match=r"b says nothing for 1.5 s: it is stopped") as caught:
                group.receive({"x": torch.zeros(4, device=devices[0])}, "b", timeout=0.5)
            assert caught.value.missing == ("b",)


def test_who_closes_after_sending_waits_for_those_who_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent and not yet read is lost with the sender's connections: close keeps them open for so long."""
    reading = threading.Event()
    tensors = {f"{number}": torch.ones(1 << 18) for number in range(8)}
    copies = {name: torch.zeros(1 << 18) for name in tensors}

    monkeypatch.setattr("drivetrain_transport.device._group.read", lambda *args: reading.wait(10) and read(*args))
    with members(bucket_bytes=1 << 26) as (a, b):
        taking = b(lambda group: group.receive(copies, "a", timeout=20))
        sending = a(lambda group: group.send(tensors, "b", timeout=20) or group.close())
        threading.Timer(0.3, reading.set).start()
        sending.result(30)
        taking.result(30)
    assert all(copy.min() == 1 for copy in copies.values())


def test_the_death_of_the_rendezvous_breaks_its_groups_by_name() -> None:
    with member_process("host", "cpu", PAIR, "idle") as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with Rendezvous.join(address, timeout=20) as meeting:
            with TensorGroup.form(PAIR, "a", meeting, timeout=20) as group:
                child.send_signal(signal.SIGKILL)
                wait_until(lambda: group.broken == "the host of the rendezvous is lost", "the news")
                with pytest.raises(GroupBroken, match="the host of the rendezvous is lost"):
                    group.broadcast({"x": torch.zeros(1)}, "b", timeout=10)
            with pytest.raises(GroupBroken, match="the host of the rendezvous is lost"):
                TensorGroup.form(PAIR, "a", meeting, timeout=10)


def test_an_interrupted_operation_breaks_the_group_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with members() as (a, b):
        waiting = b(lambda group: group.receive({"x": torch.zeros(1)}, "a", timeout=60))
        monkeypatch.setattr("drivetrain_transport.device._group.write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            a(lambda group: group.send({"x": torch.zeros(1)}, "b", timeout=20)).result(30)
        with pytest.raises(GroupBroken, match="interrupted by KeyboardInterrupt"):
            waiting.result(10)


def test_ctrl_c_ends_every_wait_at_once_and_the_others_are_told() -> None:
    """A member that waits for one who does not come, in its main thread, where gloo lets no signal through."""
    operations = ("broadcast", "send", "receive", "exchange")
    seconds = []
    with (
        Rendezvous.host() as host,
        member_process(
            host.address, "cpu", PAIR, ", ".join(f"wait in {operation}" for operation in operations)
        ) as child,
    ):
        said(child, "joining")
        for _ in operations:
            with TensorGroup.form(PAIR, "a", host, timeout=60) as group:
                said(child, "formed")
                said(child, "waiting")
                start = time.monotonic()
                child.send_signal(signal.SIGINT)
                said(child, "interrupted")
                seconds.append(time.monotonic() - start)
                assert "interrupted by KeyboardInterrupt" in group.broken
        assert child.wait(10) == 0
    assert median(seconds) < 0.5
    assert max(seconds) < 5


def test_a_death_is_known_within_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what the survivor waits for has to do with it or not, and without the endpoint, which looks too late."""
    monkeypatch.setattr("drivetrain_transport._endpoints.binding._PROBE_S", 30.0)
    names = ("a", "b", "c")
    seconds = []
    with Rendezvous.host(liveness=120) as host, Rendezvous.join(host.address) as third, ThreadPoolExecutor(1) as pool:
        for source in ("b", "c", None):
            with member_process(host.address, "cpu", names, "idle") as child:
                lives = pool.submit(TensorGroup.form, names, "c", third, timeout=60)
                with TensorGroup.form(names, "a", host, timeout=60) as group, lives.result(10):
                    said(child, "joining")
                    said(child, "formed")
                    died: list[float] = []
                    threading.Timer(0.3, lambda: (child.kill(), died.append(time.monotonic()))).start()  # noqa: B023
                    if source is None:
                        wait_until(lambda: "b is gone" in group.broken, "the news")
                    else:
                        with pytest.raises(GroupBroken, match="b is gone"):
                            group.receive({"x": torch.zeros(4)}, source, timeout=10)
                    seconds.append(time.monotonic() - died[0])
    assert median(seconds) < 0.5
    assert max(seconds) < 1.5


def test_one_who_says_nothing_does_not_hide_the_death_of_another() -> None:
    names = ("a", "b", "c")
    with (
        Rendezvous.host() as host,
        member_process(host.address, "cpu", names, "idle", me="b") as dies,
        member_process(host.address, "cpu", names, "idle", me="c") as stopped,
        TensorGroup.form(names, "a", host, timeout=60) as group,
    ):
        for child in (dies, stopped):
            said(child, "joining")
            said(child, "formed")
        stopped.send_signal(signal.SIGSTOP)
        threading.Timer(0.3, dies.kill).start()
        start = time.monotonic()
        with pytest.raises(GroupBroken, match="b is gone") as caught:
            group.broadcast({"x": torch.zeros(4)}, "b", timeout=60)
        assert caught.value.missing == ("b",)
        assert time.monotonic() - start < 1.5  # which is what the one who says nothing is given
