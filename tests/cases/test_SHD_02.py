"""SHD-02: a weight sync dead-locks, because one trainer rank waits for the receiver while others go on to gather.

huggingface/trl#7103, huggingface/trl#6765, allenai/open-instruct#1535: the first sync with more than one trainer rank
hangs until NCCL's watchdog fires, and nothing says where.

Here two ranks of FSDP2 send to a receiver, nothing is gathered, and no rank waits for another's turn. A slow receiver
is waited for; one that never answers is an error on every rank, within the limit, that names the step and the
parameters.

Three processes on gloo; this file is also their program.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_sharding import (
    Executor,
    Layout,
    TorchExchange,
    TransferFailed,
    combine,
    digest,
    local_parameters,
    make_plan,
    named_tensors,
    piece_hashes,
    read_layout,
    shard_model,
)
from drivetrain_sharding.exchange import Message
from gloo_ranks import be_a_rank, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from waiting import wait_until

TRAINERS, RECEIVER, WORLD = (0, 1), 2, 3
TENSORS = 2 * 12 + 1
LIMIT = 2.0
SLACK = 4.0  # of a loaded machine


class Small(nn.Module):
    """Many small parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(TENSORS // 2)])
        self.odd = nn.Parameter(torch.randn(3, 2))


class Slow(TorchExchange):
    """Takes 0.2 s for each tensor; stops for good in a round."""

    def __init__(self, *args: Any, plan: Any, stops: int, gone: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        last = {transfer.tensor: number for number, some in enumerate(plan.receives(0)) for transfer in some}
        self.counts = [list(last.values()).count(number) for number in range(plan.rounds)]  # tensors that are complete
        self.number, self.stops, self.gone = -1, stops, gone

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        self.number += 1
        if self.number == self.stops:
            wait_until(self.gone, "the trainers to give up", 60)
        wait, count = super().start(sends, receives), self.counts[self.number]

        def slowly() -> None:
            wait()
            time.sleep(0.2 * count)

        return slowly


def attempt(executor: Executor, source: Any, target: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        executor.run(source, target)
    except TransferFailed as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "seconds": time.monotonic() - start}


def look() -> dict[str, Any]:
    me, folder = dist.get_rank(), Path(sys.argv[2])
    mesh = DeviceMesh("cpu", list(TRAINERS), mesh_dim_names=("dp",))
    groups = [dist.new_group() for _ in range(3)]
    model = Small(seed=0 if me in TRAINERS else 1)
    target_layout = read_layout(model)
    if me in TRAINERS:
        shard_model(model, mesh)
        (folder / f"layout-{me}").write_text(read_layout(model, mesh).to_json())
    dist.barrier()
    plan = make_plan(Layout.from_json((folder / "layout-0").read_text()), target_layout, bucket_bytes=512)
    held = local_parameters(model)
    sides = (held, None) if me in TRAINERS else (None, held)
    roles: dict[str, Any] = {"source_rank": me} if me in TRAINERS else {"target_rank": 0}

    def gone(number: int) -> bool:
        return all((folder / f"gone-{number}-{rank}").exists() for rank in TRAINERS)

    def executor(number: int, limit: float, *, stops: int = -1) -> Executor:
        options: dict[str, Any] = {"timeout": limit, "group": groups[number]}
        if me in TRAINERS:
            return Executor(plan, TorchExchange(TRAINERS, [RECEIVER], **options), **roles)
        slow = Slow(TRAINERS, [RECEIVER], plan=plan, stops=stops, gone=lambda: gone(number), **options)
        return Executor(plan, slow, **roles)

    found: dict[str, Any] = {"rounds": plan.rounds, "tensors": len(target_layout.tensors)}
    found["slow"] = attempt(executor(0, 60.0), *sides)
    if me in TRAINERS:
        found["digest"] = digest(named_tensors(model))
    else:
        found["digest"] = combine(target_layout, {0: piece_hashes(target_layout, 0, held)}).hex

    found["stops"] = attempt(executor(1, LIMIT, stops=2), *sides)
    (folder / f"gone-1-{me}").touch()

    if me in TRAINERS:
        found["absent"] = attempt(executor(2, LIMIT), *sides)
        (folder / f"gone-2-{me}").touch()
    else:
        wait_until(
            lambda: all((folder / f"gone-2-{rank}").exists() for rank in TRAINERS), "the trainers to give up", 60
        )
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


def test_a_slow_receiver_is_waited_for(found: list[dict[str, Any]]) -> None:
    assert [rank["tensors"] for rank in found] == [TENSORS] * WORLD
    assert found[0]["rounds"] > 5
    for rank in found:
        assert rank["slow"]["error"] == ""
        assert rank["slow"]["seconds"] >= 0.2 * TENSORS  # all of them are through with it when the receiver is
    assert len({rank["digest"] for rank in found}) == 1


def test_a_receiver_that_stops_is_an_error_on_all_ranks_that_names_the_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "round 3 of " in rank["stops"]["error"]
        assert "layers." in rank["stops"]["error"]
    for number in TRAINERS:
        assert found[number]["stops"]["seconds"] < LIMIT + SLACK


def test_a_receiver_that_never_comes_is_an_error_on_all_trainers(found: list[dict[str, Any]]) -> None:
    for number in TRAINERS:
        absent = found[number]["absent"]
        assert LIMIT - 0.1 < absent["seconds"] < LIMIT + SLACK
        assert "the start of the update" in absent["error"]
        assert "layers.0.bias, layers.0.weight, layers.1.bias and 22 more" in absent["error"]
        assert f"the limit is {LIMIT:g} s" in absent["error"]
    assert "target rank 0" in found[0]["absent"]["error"]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
