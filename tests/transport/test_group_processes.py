"""A group whose members are all processes: all it moves, and how it ends. With gloo, and with NCCL on a single GPU.

NCCL refuses two members on one GPU, unless it takes them to be on two hosts: NCCL_HOSTID says so. They talk over
loopback then, so this shows that the calls are right, and nothing of their speed.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from programs import environment
from tensor_groups import said, say, say_when_busy

NAMES = ("a", "b", "c")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
kinds = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda:0", marks=on_gpu)],
    ids=["gloo", "nccl"],
)


@contextmanager
def processes(device: str, action: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The members, each of which does the action."""
    with ExitStack() as stack:
        host = stack.enter_context(Rendezvous.host())
        children = []
        for name in NAMES:
            apart = {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            command = [sys.executable, __file__, host.address, name, device, action]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment() | apart)
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            said(child, "formed")
        yield children


@kinds
def test_all_that_a_group_moves_arrives(device: str) -> None:
    with processes(device, "move") as children:
        for child in children:
            for word in ("broadcast", "sent", "rounds", "misfits", "closed"):
                said(child, word)
            assert child.wait(30) == 0


@kinds
def test_a_killed_member_is_named_by_the_others_at_once(device: str) -> None:
    with processes(device, "wait") as (a, b, c):
        for child in (a, b):
            said(child, "waiting")
        start = time.monotonic()
        c.kill()
        for child in (a, b):
            said(child, "broken ('c',)")
        assert time.monotonic() - start < 2
        for child in (a, b):
            said(child, "closed")
            assert child.wait(30) == 0


@kinds
def test_ctrl_c_at_one_member_is_prompt_and_told_to_the_others(device: str) -> None:
    with processes(device, "wait") as (a, b, _):
        for child in (a, b):
            said(child, "waiting")
        start = time.monotonic()
        a.send_signal(signal.SIGINT)
        said(a, "interrupted")
        # NCCL's abort alone takes half a second.
        assert time.monotonic() - start < (0.5 if device == "cpu" else 1.5)
        said(b, "broken ()")
        for child in (a, b):
            said(child, "closed")


def member(address: str, me: str, device: str, action: str) -> None:
    with Rendezvous.join(address) as meeting:
        with TensorGroup.form(NAMES, me, meeting, timeout=60, device=device, bucket_bytes=1 << 16) as group:
            say("formed")
            {"move": move, "wait": wait}[action](group)
        say("closed")


def move(group: TensorGroup) -> None:
    def filled(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, device=group.device)

    here = NAMES.index(group.me)
    after, before = NAMES[(here + 1) % 3], NAMES[here - 1]
    for number, source in enumerate(NAMES):
        mine = {
            f"{size}": filled(size, number + 1.0 if source == group.me else 0.0) for size in (1, 300, 4096, 1 << 20)
        }
        group.broadcast(mine, source, timeout=30)
        assert all((tensor == number + 1).all() for tensor in mine.values())
    say("broadcast")

    if group.me == "a":
        group.send({"x": filled(1 << 18, 3.0), "y": filled(5, 4.0)}, "b", timeout=30)
    elif group.me == "b":
        x, y = filled(1 << 18, 0.0), filled(5, 0.0)
        group.receive({"x": x, "y": y}, "a", timeout=30)
        assert (x == 3).all()
        assert (y == 4).all()
    say("sent")

    out = [filled(1 << 20, 0.0) for _ in range(2)]
    into = [filled(1 << 20, 0.0) for _ in range(2)]
    flying = []
    for number in range(6):
        if number >= 2:
            flying[number - 2].wait()
            assert (into[number % 2] == (number - 2) * 3 + NAMES.index(before)).all()
        out[number % 2].fill_(number * 3 + here)
        flying.append(group.start([(after, out[number % 2])], [(before, into[number % 2])], timeout=30))
    for started in flying:
        started.wait()
    assert (into[1] == 15 + NAMES.index(before)).all()
    say("rounds")

    small = filled(7 + here, 0.0)
    with pytest.raises(ValueError, match=rf"tensor 0 from {before}: float32 \({7 + here},\) is expected, and float32"):
        group.exchange([(after, filled(99, 1.0))], [(before, small)], timeout=30)
    assert not small.any()
    nine = filled(9, 0.0)
    group.exchange([(after, filled(9, 1.0))], [(before, nine)], timeout=30)
    assert (nine == 1).all()
    say("misfits")


def wait(group: TensorGroup) -> None:
    if group.me == "c":
        threading.Event().wait(60)
    say_when_busy(group)
    try:
        group.broadcast({"x": torch.zeros(1 << 20, device=group.device)}, "c", timeout=60)
    except GroupBroken as error:
        say(f"broken {error.missing}")
    except KeyboardInterrupt:
        say("interrupted")


if __name__ == "__main__":
    member(*sys.argv[1:])
