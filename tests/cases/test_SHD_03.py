"""SHD-03: the gradient's norm is that of the local shard, and ranks clip by different coefficients.

areal-project/AReaL#312, pytorch/pytorch#170862

Four ranks on gloo. This file is also the program that each rank runs; it leaves what it found as JSON.
"""

import copy
import dataclasses
import math
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch
from drivetrain_sharding import Layout, Mesh, Split, device_mesh, named_tensors, read_layout, shard_model
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WORLD = 4
PARAMETERS = 7 * 5 + 7 + 8 * 5 + 8 + 3
"""With a gradient."""
INPUTS = {"ones": torch.ones(1, 5), "random": torch.randn(1, 5, generator=torch.Generator().manual_seed(2))}
LIMITS = {"below": 1.0, "above": 1000.0}
# How the module lies: the mesh, and the dimension whose ranks bring batches of their own (None: all).
LAYOUTS: dict[str, tuple[Mesh, str | None]] = {
    "copies on 2 ranks": (Mesh((("other", 2), ("dp", 2))), "dp"),
    "copies on 4 ranks": (Mesh((("dp", 4),)), "dp"),
    "shards on 2 ranks": (Mesh((("other", 2), ("dp", 2))), "dp"),
    "shards on 4 ranks": (Mesh((("dp", 4),)), "dp"),
    "shards and copies": (Mesh((("replica", 2), ("dp", 2))), None),
    "shards beside plain parameters": (Mesh((("dp", 4),)), "dp"),
    "tensor parallel": (Mesh((("dp", 2), ("tp", 2))), "dp"),
    "tensor parallel and shards": (Mesh((("dp", 2), ("tp", 2))), "dp"),
}


class Known(nn.Module):
    """The gradient of every bias is 1 and that of every weight's row is the input; the loss does not reach `unused`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(5, 7), nn.Linear(5, 8)])
        self.free = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, sum(block(inputs).sum() for block in self.blocks) + self.free.sum())


def lay_out(module: Known, name: str, mesh: Mesh) -> None:
    ranks = device_mesh(mesh, "cpu")
    match name.split():
        case ["shards", "on", *_]:
            shard_model(module, ranks["dp"])
        case ["shards", "and", *_]:
            shard_model(module, ranks)
        case ["shards", "beside", *_]:
            for block in module.blocks:
                fully_shard(block, mesh=ranks)
        case ["tensor", "parallel", *more]:
            shard_model(module, ranks, cut(module, mesh, shards=bool(more)))


def cut(module: nn.Module, mesh: Mesh, *, shards: bool) -> Layout:
    """The second block is cut by outputs over `tp`; `dp` has shards or copies of everything."""
    plain = read_layout(module)
    over_dp = (Split(over="dp", dim=0),) if shards else ()

    def splits(name: str) -> tuple[Split, ...]:
        return (*([Split(over="tp", dim=0)] if name.startswith("blocks.1.") else []), *over_dp)

    parameters = tuple(
        dataclasses.replace(
            each, parts=tuple(dataclasses.replace(part, splits=splits(part.tensor)) for part in each.parts)
        )
        for each in plain.parameters
    )
    return dataclasses.replace(plain, mesh=mesh, parameters=parameters)


def whole(named: dict[str, Tensor]) -> dict[str, Tensor]:
    holder = nn.ParameterDict({name.replace(".", "-"): nn.Parameter(tensor) for name, tensor in named.items()})
    return {name: tensor.clone() for name, tensor in named_tensors(holder)}


def update(
    module: Known, inputs: Tensor, limit: float, ranks: int, group: dist.ProcessGroup | None
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The norm that was reported, the gradients that the optimizer was given, and the parameters after its step."""
    learner = Learner(module, LearnerConfig(lr=1e-2, max_grad_norm=limit), process_group=group)
    given: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        given.update(whole({name: cast(Tensor, p.grad) for name, p in module.named_parameters()}))

    learner.optimizer.register_step_pre_hook(keep)
    batch = PackedBatch.pack([[0, 1, 2]], [[False, True, True]])
    result = learner.update(batch, lambda _: LossTerms(loss=module(inputs) / ranks))
    assert result.skipped is None
    return result.grad_norm, given, whole({name: p.detach() for name, p in module.named_parameters()})


def look() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, inputs in INPUTS.items():
        for limit, max_norm in LIMITS.items():
            norm, gradients, parameters = update(Known(), inputs, max_norm, 1, None)
            clipped = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
            found[f"alone, {kind}, {limit}"] = {"norm": norm, "clipped": clipped}
            for name, (mesh, over) in LAYOUTS.items():
                module = Known()
                lay_out(module, name, mesh)
                group = dist.group.WORLD if over is None else device_mesh(mesh, "cpu").get_group(over)
                got = update(module, inputs, max_norm, dist.get_world_size(group), group)
                found[f"{name}, {kind}, {limit}"] = {
                    "norm": got[0],
                    "gradients": all(torch.equal(got[1][each], gradients[each]) for each in gradients),
                    "parameters": max((got[2][each] - parameters[each]).abs().max().item() for each in parameters),
                    "sharded": sum(isinstance(parameter, DTensor) for parameter in module.parameters()),
                }
    found["wrong group"] = wrong_group()
    return found


def wrong_group() -> str:
    """All ranks as one group, of a module that pairs of them share."""
    module = copy.deepcopy(Known())
    shard_model(module, device_mesh(Mesh((("other", 2), ("dp", 2))), "cpu")["dp"])
    try:
        Learner(module, LearnerConfig(lr=1e-2), process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_is_global_and_ranks_clip_alike(found: list[dict[str, Any]], name: str, limit: str, kind: str) -> None:
    # Rows of weights have the gradient of the inputs, 15 rows in all; the rest have ones.
    norm = math.sqrt(15 * INPUTS[kind].double().square().sum().item() + 7 + 8 + 3)
    if kind == "ones":
        assert norm == math.sqrt(PARAMETERS)
    alone = found[0][f"alone, {kind}, {limit}"]
    assert alone["norm"] == pytest.approx(norm, rel=1e-12)
    assert alone["clipped"] == pytest.approx(min(norm, LIMITS[limit]), rel=1e-6)
    assert len({rank[f"{name}, {kind}, {limit}"]["norm"] for rank in found}) == 1
    for rank in found:
        case = rank[f"{name}, {kind}, {limit}"]
        assert case["norm"] == pytest.approx(norm, rel=1e-12)
        assert case["gradients"]
        assert case["parameters"] == 0


def test_layouts_are_what_they_are_called(found: list[dict[str, Any]]) -> None:
    sharded = {name: found[0][f"{name}, ones, below"]["sharded"] for name in LAYOUTS}
    assert list(sharded.values()) == [0, 0, 6, 6, 6, 4, 2, 6]


def test_a_group_that_shares_parameters_in_part_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "parameter free is shared by some ranks of the process_group and not by others" in rank["wrong group"]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
