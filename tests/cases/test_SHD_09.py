"""SHD-09: host memory grows at each weight sync, until the kernel kills a worker after hours.

verl-project/verl#6468, Mini-o3/Mini-o3#23: copies, pinned buffers or shared memory of each sync are not freed.

Here two ranks of FSDP2 send a model to a receiver again and again, and another process reads the receiver's memory:
resident memory, shared memory and open descriptors of every process stay what they are after the first quarter.

Four processes on gloo; this file is also their program.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_sharding import (
    Executor,
    Layout,
    Pull,
    ShardedDigest,
    TorchExchange,
    digest,
    local_parameters,
    make_plan,
    named_tensors,
    read_layout,
    shard_model,
)
from gloo_ranks import be_a_rank, run_ranks
from layouts import simple_layout
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

TRAINERS, RECEIVER, READER, WORLD = (0, 1), 2, 3, 4
SHAPES = [(1000, 512), (512,), (512, 37)]  # of a layer: 2.1 MB in fp32


def usage() -> tuple[int, int, int]:
    """Resident bytes, mappings of shared memory, open descriptors."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return resident, sum("/dev/shm/" in line for line in maps), len(list(Path("/proc/self/fd").iterdir()))


def served(layout: Layout, folder: Path) -> dict[str, Tensor]:
    """The receiver's parameters, in memory that another process can read."""
    return {
        spec.name: torch.from_file(
            str(folder / spec.name), shared=True, size=spec.nbytes // spec.dtype.itemsize, dtype=spec.dtype
        ).view(spec.shape)
        for spec in layout.tensors
    }


def look() -> dict[str, Any]:
    me, folder, syncs, layers = dist.get_rank(), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    mesh = DeviceMesh("cpu", list(TRAINERS), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for _ in range(layers) for shape in SHAPES])
    target = simple_layout({}, {name: t.shape for name, t in model.named_parameters()}, dtype=torch.bfloat16)
    if me in TRAINERS:
        shard_model(model, mesh)
        (folder / f"layout-{me}").write_text(read_layout(model, mesh).to_json())
    dist.barrier()
    plan = make_plan(Layout.from_json((folder / "layout-0").read_text()), target, bucket_bytes=1 << 22)
    exchange = TorchExchange(TRAINERS, [RECEIVER], timeout=60)
    held = local_parameters(model) if me in TRAINERS else served(target, folder)
    proof, used = ShardedDigest(plan.source if me in TRAINERS else target, dtype=torch.bfloat16), []
    found: dict[str, Any] = {"bytes": sum(spec.nbytes for spec in plan.source.tensors), "digests": set()}
    if me in TRAINERS:
        executor = Executor(plan, exchange, source_rank=me)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    elif me == RECEIVER:
        executor = Executor(plan, exchange, target_rank=0)
    else:
        reading, copy = Pull(make_plan(target, target), 0), {name: torch.empty_like(t) for name, t in held.items()}
    for _ in range(syncs):
        if me in TRAINERS:
            optimizer.step()
            executor.run(held)
            proof.hashes(me, held)
        elif me == RECEIVER:
            executor.run(None, held)
            found["digests"].add(proof.combine({0: proof.hashes(0, held)}).hex)
        dist.barrier()
        if me == READER:
            reading.run(lambda _: held, copy)
            found["digests"].add(proof.combine({0: proof.hashes(0, copy)}).hex)
        dist.barrier()
        used.append(usage())
    if me in TRAINERS:
        found["digests"].add(digest(named_tensors(model, dtype=torch.bfloat16)))
    return found | {"digests": sorted(found["digests"]), "used": used}


@pytest.mark.parametrize(
    ("syncs", "layers"),
    [(24, 2), pytest.param(200, 24, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["short", "whole"],
)
def test_nothing_grows(syncs: int, layers: int, tmp_path: Path) -> None:
    found = run_ranks(__file__, tmp_path, str(syncs), str(layers), world=WORLD, timeout=550)
    assert len({digest for rank in found for digest in rank["digests"]}) == 1
    assert found[0]["bytes"] > 2_000_000 * layers
    for rank in found:
        resident, shared, descriptors = zip(*rank["used"][syncs // 4 :], strict=True)
        assert max(resident) < 1.02 * resident[0], resident
        assert max(shared) <= shared[0]
        assert max(descriptors) <= descriptors[0]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:3], look, world=WORLD)
