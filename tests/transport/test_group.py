"""Tensor groups: what arrives, and what is refused before it is sent. Tests that name a device run on two GPUs too."""

from typing import Any

import pytest
import torch
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from tensor_groups import BUCKET, PAIR, members, on_each_device
from waiting import wait_until

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
        wait_until(lambda: mine._session.busy, "a to wait")
        with pytest.raises(RuntimeError, match="another thread uses the group"):
            mine.send({"x": torch.zeros(1)}, "b", timeout=1)
        group.send({"x": torch.ones(1)}, "a", timeout=20)
        waiting.result(30)
        group.close()
        with pytest.raises(RuntimeError, match="the group is closed: form the next one"):
            group.send({"x": torch.zeros(1)}, "a", timeout=1)
