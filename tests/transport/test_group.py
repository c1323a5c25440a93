"""Tensor groups: what arrives, who is named when it does not, and what is left afterwards.

Members are threads of this process, each with its own way to the rendezvous; those that die are processes, which run
this file. The tests that name a device run on two GPUs too.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_transport import PeerRefused, load_keys, make_keys
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from programs import environment
from waiting import wait_until

BUCKET = 1024
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PAIR = ("a", "b")
on_each_device = pytest.mark.parametrize(
    "devices",
    [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=[pytest.mark.multigpu, two_gpus])],
    ids=["cpu", "gpu"],
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@contextmanager
def members(names: tuple[str, ...] = PAIR, **options: Any) -> Iterator[list[Callable[..., Future[Any]]]]:
    """For each member a function that runs `work(group, ...)` on its thread; the first member hosts the rendezvous."""
    devices = options.pop("devices", ["cpu"] * len(names))
    options = {"timeout": 20, "bucket_bytes": BUCKET, **options}
    with Rendezvous.host() as host:
        meetings = [host, *(Rendezvous.join(host.address, timeout=10) for _ in names[1:])]
        pools = [ThreadPoolExecutor(1) for _ in names]
        try:
            forming = [
                pool.submit(TensorGroup.form, names, name, meeting, device=device, **options)
                for pool, name, meeting, device in zip(pools, names, meetings, devices, strict=True)
            ]
            groups = [future.result(30) for future in forming]
            yield [
                lambda work, *args, pool=pool, group=group: pool.submit(work, group, *args)
                for pool, group in zip(pools, groups, strict=True)
            ]
            for closing in [pool.submit(group.close) for pool, group in zip(pools, groups, strict=True)]:
                closing.result(30)
        finally:
            for pool in pools:
                pool.shutdown(wait=True)
            for meeting in reversed(meetings):
                meeting.close()


@contextmanager
def process(address: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another member, as a process: see the end of this file."""
    command = [sys.executable, __file__, address, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        try:
            yield child
        finally:
            child.kill()
            child.wait(10)


def said(child: subprocess.Popen[str], what: str) -> None:
    assert child.stdout is not None
    assert child.stdout.readline().strip() == what


def resources() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def every_kind(device: str = "cpu", *, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors of every dtype, small and large, empty, 0-dim and strided; zeros, or random bits."""
    tensors = {}
    generator = torch.Generator().manual_seed(seed or 0)
    for dtype in DTYPES:
        for shape in ((), (0, 5), (3, 5), (7, 100)):
            raw = torch.zeros(shape, dtype=dtype)
            if seed is not None and raw.numel():
                bits = torch.randint(0, 2 if dtype is torch.bool else 256, (raw.nbytes,), generator=generator)
                raw = bits.to(torch.uint8).view(dtype).reshape(shape)
            tensors[f"{dtype} {shape}"] = raw.to(device)
    for name, strided in (("transposed", (12, 5)), ("every second row", (8, 6))):
        raw = torch.randn(strided, generator=generator) if seed is not None else torch.zeros(strided)
        tensors[name] = (raw.t() if name == "transposed" else raw[::2]).to(device)
    return tensors


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()


@on_each_device
def test_a_broadcast_gives_every_member_the_sources_bits(devices: tuple[str, str]) -> None:
    """Twice, so that the second one takes the buckets of the first."""
    with members(devices=devices) as (a, b):
        for seed in (1, 2):
            source, copy = every_kind(devices[0], seed=seed), every_kind(devices[1])
            done = [a(lambda g, t: g.broadcast(t, "a", timeout=20), source)]
            done += [b(lambda g, t: g.broadcast(t, "a", timeout=20), copy)]
            for future in done:
                future.result(30)
            assert {name: bits(copy[name]) for name in copy} == {name: bits(source[name]) for name in source}
            assert not copy["transposed"].is_contiguous() or devices[1] != "cpu"


def test_five_members_pass_a_broadcast_on_whoever_it_comes_from() -> None:
    names = ("a", "b", "c", "d", "e")
    copies = {name: every_kind() | {"large": torch.zeros(1 << 19)} for name in names}
    with members(names) as run:
        for number, source in enumerate(("a", "d", "c"), start=1):
            copies[source] = every_kind(seed=number) | {"large": torch.full((1 << 19,), float(number))}
            for future in [
                do(lambda group, source=source: group.broadcast(copies[group.me], source, timeout=20)) for do in run
            ]:
                future.result(30)
            wanted = {name: bits(tensor) for name, tensor in every_kind(seed=number).items()}
            for copy in copies.values():
                assert {name: bits(tensor) for name, tensor in copy.items() if name != "large"} == wanted
                assert (copy["large"] == number).all()


@on_each_device
def test_sent_lists_arrive_in_order_and_both_ways(devices: tuple[str, str]) -> None:
    def ping(group: TensorGroup) -> list[float]:
        got = []
        for number in range(5):
            group.send({"x": torch.full((700,), float(number), device=group.device)}, "b", timeout=20)
            answer = torch.zeros(3, device=group.device)
            group.receive([("y", answer)], "b", timeout=20)
            got.append(answer.sum().item())
        return got

    def pong(group: TensorGroup) -> None:
        for _ in range(5):
            x = torch.zeros(700, device=group.device)
            group.receive({"x": x}, "a", timeout=20)
            group.send([("y", x[:3] + 1)], "a", timeout=20)

    with members(devices=devices) as (a, b):
        answers, end = a(ping), b(pong)
        end.result(60)
        assert answers.result(60) == [3.0, 6.0, 9.0, 12.0, 15.0]
        stats = a(lambda group: group.stats).result()
    assert (stats.messages_sent, stats.bytes_sent) == (5, 5 * 700 * 4)
    assert (stats.messages_received, stats.bytes_received) == (5, 5 * 3 * 4)
    assert stats.waits == 10
    assert stats.wait_seconds > 0


def test_a_ring_of_three_exchanges_large_tensors_without_taking_turns() -> None:
    """Each sends before it receives: had they to take turns, nobody would begin."""
    names = ("a", "b", "c")

    def turn(group: TensorGroup) -> float:
        place = names.index(group.me)
        out, into = torch.full((1 << 21,), float(place)), torch.empty(1 << 21)
        group.exchange([(out, names[(place + 1) % 3])], [(into, names[place - 1])], timeout=20)
        assert into.min() == into.max()
        return into[0].item()

    with members(names) as run:
        assert [future.result(30) for future in [do(turn) for do in run]] == [2.0, 0.0, 1.0]


@on_each_device
def test_single_tensors_go_through_callables(devices: tuple[str, str]) -> None:
    def put(group: TensorGroup) -> None:
        send = group.sender(timeout=20)
        for number in range(3):
            send(torch.full((2, 3), number, device=group.device), "b")
        send(torch.empty(0, device=group.device), "b")

    def take(group: TensorGroup) -> list[int]:
        receive = group.receiver(timeout=20)
        tensors = [torch.zeros(2, 3, dtype=torch.int64, device=group.device) for _ in range(3)]
        for tensor in [*tensors, torch.empty(0, device=group.device)]:
            receive(tensor, "a")
        return [int(tensor.sum()) for tensor in tensors]

    with members(devices=devices) as (a, b):
        sent, taken = a(put), b(take)
        sent.result(30)
        assert taken.result(30) == [0, 6, 12]


def test_lists_that_differ_break_the_group_before_anything_is_written() -> None:
    mine = {"w": torch.ones(100), "v": torch.ones(2)}
    theirs = {"w": torch.zeros(100), "renamed": torch.zeros(2)}
    with members() as (a, b):
        sent = a(lambda group: group.send(mine, "b", timeout=20) or group.receive(mine, "b", timeout=20))
        with pytest.raises(GroupBroken, match=r"receive from a.* at b failed: 2 tensors .*both sides pass the same"):
            b(lambda group: group.receive(theirs, "a", timeout=20)).result(30)
        with pytest.raises(GroupBroken, match=r"2 tensors of 408 bytes were sent, 2 of 408 expected") as caught:
            sent.result(30)
        assert caught.value.missing == ()
    assert theirs["w"].max() == 0


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


def test_a_group_that_is_not_complete_in_time_names_who_is_absent_and_what_others_wait_for() -> None:
    with Rendezvous.host() as host, Rendezvous.join(host.address) as second, ThreadPoolExecutor(1) as pool:
        other = pool.submit(TensorGroup.form, ("b", "d"), "b", second, timeout=2)
        wait_until(other.running, "b to wait")
        with pytest.raises(GroupBroken, match=r"within 0.5 s: b waits for b, d .* instead; c did not come") as caught:
            TensorGroup.form(("a", "b", "c"), "a", host, timeout=0.5)
        assert caught.value.missing == ("b", "c")
        with pytest.raises(GroupBroken, match="d did not come"):
            other.result(10)


def test_members_with_other_terms_do_not_meet() -> None:
    with Rendezvous.host() as host, Rendezvous.join(host.address) as second, ThreadPoolExecutor(1) as pool:
        other = pool.submit(TensorGroup.form, PAIR, "b", second, timeout=1, bucket_bytes=32)
        with pytest.raises(GroupBroken, match="b waits for a, b with gloo, buckets of 32 bytes instead"):
            TensorGroup.form(PAIR, "a", host, timeout=0.5, bucket_bytes=16)
        assert isinstance(other.exception(10), GroupBroken)


def test_a_process_that_dies_while_it_waits_is_named_and_its_successor_takes_the_seat() -> None:
    names = ("a", "b", "c")
    with Rendezvous.host() as host:
        with process(host.address, "cpu", "a,b,c", "idle") as child:
            said(child, "joining")
            with pytest.raises(GroupBroken, match="c did not come") as caught:
                TensorGroup.form(names, "a", host, timeout=1)
            assert caught.value.missing == ("c",)  # b waits
            child.send_signal(signal.SIGKILL)
            with pytest.raises(GroupBroken, match=r"b its process ended while it waited, .* s ago; c did") as caught:
                TensorGroup.form(names, "a", host, timeout=3)
            assert caught.value.missing == ("b", "c")
        with process(host.address, "cpu", "a,b", "idle") as child:
            with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                assert group.broken == ""


@on_each_device
def test_a_member_killed_in_an_operation_is_named_at_once_and_nothing_of_the_group_is_left(
    devices: tuple[str, str],
) -> None:
    with Rendezvous.host() as host:
        before = resources()
        for turn in range(2):
            with process(host.address, devices[1], "a,b", "idle") as child:
                said(child, "joining")
                with TensorGroup.form(PAIR, "a", host, timeout=60, device=devices[0]) as group:
                    said(child, "formed")
                    threading.Timer(0.2, child.kill).start()
                    start = time.monotonic()
                    with pytest.raises(GroupBroken, match=r"receive from b.*b is gone") as caught:
                        group.receive({"x": torch.zeros(1 << 20, device=devices[0])}, "b", timeout=60)
                    assert caught.value.missing == ("b",)
                    assert time.monotonic() - start < 10
            if turn == 0 and devices[0] != "cpu":
                before = resources()  # the first use of a GPU starts threads that stay
            wait_until(lambda before=before: resources() <= before, f"no more than {before} threads, descriptors")


@on_each_device
def test_a_stopped_process_is_named_at_the_deadline(devices: tuple[str, str]) -> None:
    with Rendezvous.host() as host, process(host.address, devices[1], "a,b", "idle") as child:
        said(child, "joining")
        with TensorGroup.form(PAIR, "a", host, timeout=60, device=devices[0]) as group:
            said(child, "formed")
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(GroupBroken, match=r"b says nothing for 1.5 s: it is stopped") as caught:
                group.receive({"x": torch.zeros(4, device=devices[0])}, "b", timeout=0.5)
            assert caught.value.missing == ("b",)


def test_a_restarted_member_breaks_the_idle_old_group_and_joins_the_next() -> None:
    with Rendezvous.host() as host:
        with process(host.address, "cpu", "a,b", "idle") as first:
            said(first, "joining")
            old = TensorGroup.form(PAIR, "a", host, timeout=20)
            said(first, "formed")
            with process(host.address, "cpu", "a,b", "broadcast") as second:
                wait_until(lambda: "b came back as a new process" in old.broken, "the old group to be broken")
                with pytest.raises(GroupBroken, match="came back as a new process"):
                    old.broadcast({"x": torch.zeros(4)}, "b", timeout=10)
                old.close()
                with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                    assert group.generation == old.generation + 1
                    x = torch.zeros(5)
                    group.broadcast({"x": x}, "b", timeout=20)
                    assert x.tolist() == [7.0] * 5
                said(second, "joining")


def test_members_that_leave_and_come_make_new_generations() -> None:
    """Three, then two, then three: each generation works, and the departed are named to those who did not know."""
    with Rendezvous.host() as host, ThreadPoolExecutor(3) as pool:
        ways = {"a": host, "b": Rendezvous.join(host.address), "c": Rendezvous.join(host.address)}
        for names in (("a", "b", "c"), PAIR, ("a", "b", "c")):
            forming = [pool.submit(TensorGroup.form, names, name, ways[name], timeout=20) for name in names]
            groups = [future.result(30) for future in forming]
            x = {name: torch.full((9,), float(len(names)) if name == "a" else 0.0) for name in names}
            for done in [pool.submit(group.broadcast, {"x": x[group.me]}, "a", timeout=20) for group in groups]:
                done.result(30)
            assert all(tensor.tolist() == [len(names)] * 9 for tensor in x.values())
            groups[-1].close()
            wait_until(lambda groups=groups: f"{groups[-1].me} left" in groups[0].broken, "the news of who left")
            for group in groups:
                group.close()
        for way in reversed(ways.values()):
            way.close()


def test_who_closes_after_sending_waits_for_those_who_read() -> None:
    """What is sent and not yet read is lost with the sender's connections: close keeps them open for so long."""
    reading = threading.Event()
    tensors = {f"{number}": torch.ones(1 << 18) for number in range(8)}
    copies = {name: torch.zeros(1 << 18) for name in tensors}

    def take(group: TensorGroup) -> None:
        group._read, read = lambda *args: reading.wait(10) and read(*args), group._read  # type: ignore[method-assign]
        group.receive(copies, "a", timeout=20)

    with members(bucket_bytes=1 << 26) as (a, b):
        taking = b(take)
        sending = a(lambda group: group.send(tensors, "b", timeout=20) or group.close())
        threading.Timer(0.3, reading.set).start()
        sending.result(30)
        taking.result(30)
    assert all(copy.min() == 1 for copy in copies.values())


def test_the_death_of_the_rendezvous_breaks_its_groups_by_name() -> None:
    with process("host", "cpu", "a,b", "idle") as child:
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


def test_groups_live_beside_each_other_and_beside_torchs_own() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with members(name="one") as (a, b), members(name="two") as (c, d):
            for number, (first, second) in enumerate(((a, b), (c, d), (a, b))):
                x, y = torch.full((3,), float(number)), torch.zeros(3)
                sent = first(lambda group, x=x: group.send({"x": x}, "b", timeout=20))
                second(lambda group, y=y: group.receive({"x": y}, "a", timeout=20)).result(30)
                sent.result(30)
                assert y.tolist() == x.tolist()
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total.item() == 1
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_takes_two_buckets_and_no_more() -> None:
    """Forty tensors of a quarter bucket, and one of a hundred buckets, which is moved from and to its own memory."""
    tensors = {f"{number}": torch.ones(BUCKET // 16) for number in range(40)} | {"large": torch.ones(BUCKET * 25)}
    with members() as (a, b):
        taken = b(lambda group: group.receive({n: torch.zeros_like(t) for n, t in tensors.items()}, "a", timeout=20))
        a(lambda group: group.send(tensors, "b", timeout=20)).result(30)
        taken.result(30)
        for run in (a, b):
            assert run(lambda group: [bucket.nbytes for bucket in group._staging._buckets]).result() == [BUCKET] * 2


def test_what_cannot_be_sent_is_refused_before_it_is_and_the_group_goes_on() -> None:
    strided = torch.zeros(64, 64).t()
    cases: list[tuple[Any, str]] = [
        ({"w": strided}, r"'w' has 16384 bytes and is not contiguous: .* bucket of 1024"),
        ([("w", torch.zeros(1)), ("w", torch.zeros(2))], r"two tensors of the list are named 'w'"),
        ({"w": torch.zeros(1, device="meta")}, r"'w' is on meta, the group's tensors are on cpu"),
        ({"w": torch.eye(2).to_sparse()}, r"'w' is no plain dense tensor"),
        ({"w": [1.0]}, r"'w' is a list: pass plain tensors"),
    ]
    with members() as (a, b):
        for tensors, text in cases:
            with pytest.raises(ValueError, match=text):
                a(lambda group, tensors=tensors: group.send(tensors, "b", timeout=20)).result(30)
        with pytest.raises(ValueError, match=r"'w' of shape \(3, 3\) is expanded, and cannot be written"):
            b(lambda group: group.receive({"w": torch.zeros(3).expand(3, 3)}, "a", timeout=20)).result(30)
        with pytest.raises(ValueError, match="'z' is no member: the group has a, b"):
            a(lambda group: group.send({}, "z", timeout=20)).result(30)
        with pytest.raises(ValueError, match="'a' is this member itself"):
            a(lambda group: group.receive({}, "a", timeout=20)).result(30)
        sent = a(lambda group: group.send({"w": torch.ones(3).expand(3, 3)}, "b", timeout=20))
        copy = torch.zeros(3, 3)
        b(lambda group: group.receive({"w": copy}, "a", timeout=20)).result(30)
        sent.result(30)
    assert copy.sum() == 9


def test_misuse_is_said() -> None:
    with Rendezvous.host() as host:
        for names, me, text in (
            (("a",), "a", "name two or more"),
            (("a", "a"), "a", "each once"),
            (PAIR, "c", "'c' is not among the members"),
        ):
            with pytest.raises(ValueError, match=text):
                TensorGroup.form(names, me, host, timeout=1)
        with pytest.raises(ValueError, match="multiple of 16"):
            TensorGroup.form(PAIR, "a", host, timeout=1, bucket_bytes=100)
        with pytest.raises(ValueError, match="timeout is 0 s"):
            TensorGroup.form(PAIR, "a", host, timeout=0)
        with pytest.raises(ValueError, match="there is no cuda:99 here"):
            TensorGroup.form(PAIR, "a", host, timeout=1, device="cuda:99")
        with pytest.raises(ValueError, match="tensors on meta cannot be exchanged"):
            TensorGroup.form(PAIR, "a", host, timeout=1, device="meta")
    with members() as (a, b):
        mine: TensorGroup = a(lambda group: group).result()
        group: TensorGroup = b(lambda group: group).result()
        waiting = a(lambda group: group.receive({"x": torch.zeros(1)}, "b", timeout=20))
        wait_until(mine._busy.locked, "a to wait")
        with pytest.raises(RuntimeError, match="another thread uses the group"):
            mine.send({"x": torch.zeros(1)}, "b", timeout=1)
        group.send({"x": torch.ones(1)}, "a", timeout=20)
        waiting.result(30)
        group.close()
        with pytest.raises(RuntimeError, match="the group is closed: form the next one"):
            group.send({"x": torch.zeros(1)}, "a", timeout=1)


def test_members_on_several_hosts_need_a_word_about_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["first 1 net", "second 2 net"])
    monkeypatch.setattr("drivetrain_transport.device._forming.machine", lambda: next(hosts))
    with pytest.raises((ValueError, GroupBroken), match=r"several hosts \(first, second\).*trusted_network=True|left"):
        with members():
            pass
    hosts = iter(["first 1 net", "second 2 net"])
    with members(trusted_network=True) as (a, b):
        x = torch.zeros(2)
        sent = a(lambda group: group.send({"x": torch.ones(2)}, "b", timeout=20))
        b(lambda group: group.receive({"x": x}, "a", timeout=20)).result(30)
        sent.result(30)
    assert x.tolist() == [1.0, 1.0]


def test_a_rendezvous_that_others_reach_needs_keys_and_lets_only_their_holders_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no keys"):
        Rendezvous.host("tcp://0.0.0.0:0")
    keys = make_keys(tmp_path / "ours")
    with Rendezvous.host("tcp://0.0.0.0:0", keys=keys) as host:
        address = f"tcp://127.0.0.1:{host.address.rpartition(':')[2]}"
        with pytest.raises((TimeoutError, PeerRefused)):
            Rendezvous.join(address, keys=make_keys(tmp_path / "theirs"), timeout=1)
        with Rendezvous.join(address, keys=load_keys(tmp_path / "ours")) as second, ThreadPoolExecutor(1) as pool:
            other = pool.submit(TensorGroup.form, PAIR, "b", second, timeout=20)
            with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                assert group.broken == ""
                other.result(10).close()


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


def member(address: str, device: str, names: str, action: str) -> None:
    """Member b as a process. "idle" forms the group and waits to be killed; "broadcast" sends sevens and leaves."""
    if address == "host":
        with Rendezvous.host() as meeting:
            print(meeting.address, flush=True)  # noqa: T201
            act(meeting, device, names, action)
        return
    with Rendezvous.join(address) as meeting:
        print("joining", flush=True)  # noqa: T201
        act(meeting, device, names, action)


def act(meeting: Rendezvous, device: str, names: str, action: str) -> None:
    with TensorGroup.form(names.split(","), "b", meeting, timeout=60, device=device) as group:
        print("formed", flush=True)  # noqa: T201
        if action == "idle":
            threading.Event().wait(60)
        group.broadcast({"x": torch.full((5,), 7.0, device=device)}, "b", timeout=30)


if __name__ == "__main__":
    member(*sys.argv[1:])
