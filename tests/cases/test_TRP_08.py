"""TRP-08: a trainer that was restarted cannot re-join the rollout server that went on running.

huggingface/trl#3408 (https://github.com/huggingface/trl/issues/3408): after a crash of the trainer the server still
held the old weight-update group, the next one met "already initialized" or an NCCL error, and every engine had to be
started again. The old group was taken down only when its client exited in an orderly way.

Here a server process serves throughout, and a trainer is killed with SIGKILL while it is idle and while a sync is
under way, and started again; twice. It runs on two GPUs as well, where the server's GPU memory is counted too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from programs import environment

MEMBERS = ("server", "trainer")
JOIN_S = 30.0
SYNC_S = 60.0
SIZE = 1 << 20  # elements of a large tensor; all of them together are more than sockets hold
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def weights(device: str, value: float) -> dict[str, torch.Tensor]:
    large = {f"large.{n}": torch.full((SIZE,), value + n, device=device) for n in range(8)}
    return large | {f"small.{n}": torch.full((n,), value + n, device=device) for n in range(1, 20)}


def serve(device: str) -> None:
    """Forms a group, takes in syncs until it breaks, forms the next; says what happens, a line each."""
    first: dict[str, int] = {}
    with Rendezvous.host() as meeting:
        say(address=meeting.address)
        while True:
            with TensorGroup.form(
                MEMBERS, "server", meeting, timeout=120, device=device, bucket_bytes=1 << 16
            ) as group:
                say(formed=group.generation)
                mine = weights(device, 0.0)
                try:
                    while True:
                        group.broadcast(mine, "trainer", timeout=SYNC_S)
                        value = mine["large.0"][0].item()
                        right = all(torch.equal(mine[name], tensor) for name, tensor in weights(device, value).items())
                        say(synced=value, right=right)
                except GroupBroken as error:
                    say(broken=error.missing)
                del mine
            now = resources(device, first)
            first = first or now
            say(**now)


def train(device: str, address: str, first: str) -> None:
    """Joins, and syncs `first`, `first` + 1, ... when it is told to; "half" begins one that it does not end."""
    with Rendezvous.join(address, timeout=JOIN_S) as meeting:
        with TensorGroup.form(
            MEMBERS, "trainer", meeting, timeout=JOIN_S, device=device, bucket_bytes=1 << 16
        ) as group:
            say(formed=group.generation)
            value = float(first)
            for line in sys.stdin:
                if line.strip() == "half":
                    die_after(group, 5)
                group.broadcast(weights(device, value), "trainer", timeout=SYNC_S)
                say(sent=value)
                value += 1


def die_after(group: TensorGroup, messages: int) -> None:
    """Kill this process in the middle of the next sync: when it has begun so many messages."""
    begin, left = group._link.broadcast, iter(range(messages))

    def broadcast(*arguments: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(*arguments)

    group._link.broadcast = broadcast  # type: ignore[method-assign]


def resources(device: str, first: dict[str, int]) -> dict[str, int]:
    """What this process holds; the trainer's connections may take a moment to end."""
    deadline = time.monotonic() + 5
    while True:
        now = {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}
        if device != "cpu":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            now["gpu"] = (total - free) >> 20
        if not first or all(now[what] <= first[what] for what in now) or time.monotonic() > deadline:
            return now
        time.sleep(0.01)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


class Role:
    """One of the two processes, and the lines that it has said."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def says(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        assert key in line, line
        return line

    def told(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()


@contextmanager
def role(*arguments: str) -> Iterator[Role]:
    started = Role(*arguments)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


@pytest.mark.parametrize(
    ("server_device", "trainer_device"),
    [("cpu", "cpu"), pytest.param("cuda:0", "cuda:1", marks=[pytest.mark.multigpu, two_gpus])],
    ids=["gloo", "nccl"],
)
@pytest.mark.timeout(300)
def test_a_killed_trainer_joins_the_running_server_again_and_again(server_device: str, trainer_device: str) -> None:
    left: list[dict[str, Any]] = []
    with role("serve", server_device) as server:
        address = server.says("address")["address"]
        for generation, end in enumerate(["between", "during", "between", "during", "leave"], start=1):
            first = 10.0 * generation
            with role("train", trainer_device, address, str(first)) as trainer:
                start = time.monotonic()
                assert trainer.says("formed") == server.says("formed") == {"formed": generation}
                assert time.monotonic() - start < JOIN_S
                for sync in range(2):
                    trainer.told("sync")
                    assert server.says("synced") == {"synced": first + sync, "right": True}
                    trainer.says("sent")
                killed = time.monotonic()
                if end == "during":
                    trainer.told("half")
                elif end == "between":
                    trainer.process.send_signal(signal.SIGKILL)
                else:
                    assert trainer.process.stdin is not None
                    trainer.process.stdin.close()
                assert server.says("broken") == {"broken": ["trainer"]}
                assert time.monotonic() - killed < SYNC_S / 4  # long before the sync's own deadline
                left.append(server.says("threads"))
    # The first generation starts what a library starts once; from then on nothing grows.
    for later in left[1:]:
        assert later["threads"] <= left[0]["threads"]
        assert later["descriptors"] <= left[0]["descriptors"]
        assert later.get("gpu", 0) <= left[0].get("gpu", 0) + 32  # MiB


if __name__ == "__main__":
    {"serve": serve, "train": train}[sys.argv[1]](*sys.argv[2:])
