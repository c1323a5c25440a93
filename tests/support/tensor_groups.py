"""Members of tensor groups: threads of the test, each with its own way to the rendezvous, and processes that die."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drivetrain_transport.device import Rendezvous, TensorGroup
from programs import environment
from waiting import wait_until

BUCKET = 1024
PAIR = ("a", "b")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
on_each_device = pytest.mark.parametrize(
    "devices",
    [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=[pytest.mark.multigpu, two_gpus])],
    ids=["cpu", "gpu"],
)

Run = Callable[..., Future[Any]]


@contextmanager
def members(names: tuple[str, ...] = PAIR, **options: Any) -> Iterator[list[Run]]:
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
def member_process(
    address: str, device: str, names: tuple[str, ...], actions: str, *, me: str = "b"
) -> Iterator[subprocess.Popen[str]]:
    """Another member, as a process that forms the group for each of the `actions`, separated by ", ".

    "host" as the address makes it the host of the rendezvous.
    """
    command = [sys.executable, __file__, address, device, ",".join(names), actions, me]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        try:
            yield child
        finally:
            child.kill()
            child.wait(10)


def said(child: subprocess.Popen[str], what: str) -> None:
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    assert line == what, f"it said {line!r}"


def say(what: str) -> None:
    print(what, flush=True)  # noqa: T201


def idle(_: TensorGroup) -> None:
    threading.Event().wait(60)


def broadcast_sevens(group: TensorGroup) -> None:
    group.broadcast({"x": torch.full((5,), 7.0, device=group.device)}, group.me, timeout=30)


def say_when_busy(group: TensorGroup, what: str = "waiting") -> None:
    """Say it when the operation that comes next has begun."""

    def tell() -> None:
        wait_until(lambda: group._session.busy, "the operation")
        say(what)

    threading.Thread(target=tell).start()


def wait_in(operation: Callable[[TensorGroup, torch.Tensor], object]) -> Callable[[TensorGroup], None]:
    """Wait in an operation for a member who does not come, until Ctrl-C."""

    def wait(group: TensorGroup) -> None:
        say_when_busy(group)
        try:
            operation(group, torch.zeros(1 << 20, device=group.device))
        except KeyboardInterrupt:
            say("interrupted")

    return wait


def die_in_a_round(group: TensorGroup) -> None:
    """After both sides' headers, and before any tensor moves."""
    receive, headers = group._link.receive, iter([1])

    def take(*arguments: Any) -> Any:
        if next(headers, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(*arguments)

    group._link.receive = take  # type: ignore[method-assign]
    group.start([], [("a", torch.zeros(1 << 22))], timeout=60)


ACTIONS: dict[str, Callable[[TensorGroup], None]] = {
    "idle": idle,
    "broadcast": broadcast_sevens,
    "die in a round": die_in_a_round,
    "wait in broadcast": wait_in(lambda group, x: group.broadcast({"x": x}, "a", timeout=60)),
    "wait in send": wait_in(lambda group, x: group.send({"x": x}, "a", timeout=60)),
    "wait in receive": wait_in(lambda group, x: group.receive({"x": x}, "a", timeout=60)),
    "wait in exchange": wait_in(lambda group, x: group.exchange([("a", x)], [], timeout=60)),
}


def member(address: str, device: str, names: str, actions: str, me: str) -> None:
    def act(meeting: Rendezvous) -> None:
        for action in actions.split(", "):
            with TensorGroup.form(names.split(","), me, meeting, timeout=60, device=device) as group:
                say("formed")
                ACTIONS[action](group)

    if address == "host":
        with Rendezvous.host() as meeting:
            say(meeting.address)
            act(meeting)
        return
    with Rendezvous.join(address) as meeting:
        say("joining")
        act(meeting)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    member(*sys.argv[1:])
