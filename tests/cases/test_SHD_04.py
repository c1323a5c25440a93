"""SHD-04: parameters or optimizer states in bf16, in which steps of RL's size round to nothing.

areal-project/AReaL#1292, areal-project/AReaL PR 1369, huggingface/accelerate#3979

This file is also the program that each of two ranks runs; it leaves what it found as JSON.
"""

import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_learner import (
    Learner,
    LearnerConfig,
    LossTerms,
    PackedBatch,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from drivetrain_sharding import Mesh, device_mesh, named_tensors, shard_model
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor, nn

WORLD = 2
START, LR, STEPS = 0.02, 1e-6, 100
CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Constant(nn.Module):
    """A parameter with the same gradient at every step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 3, bias=False, dtype=dtype)])
        nn.init.constant_(self.blocks[0].weight, START)

    def forward(self, inputs: Tensor) -> Tensor:
        self.computed = self.blocks[0](inputs)
        return self.computed.sum()  # type: ignore[no-any-return]


def learner_of(module: Constant, group: dist.ProcessGroup | None = None) -> Learner[Constant]:
    return Learner(module, LearnerConfig(lr=LR, weight_decay=0.0), process_group=group)


def train(learner: Learner[Constant], steps: int, *, autocast: bool) -> None:
    batch = PackedBatch.pack([[0, 1, 2]], [[False, True, True]])

    def loss(part: PackedBatch) -> LossTerms:
        inputs = torch.ones(1, 4, device=part.input_ids.device)
        with torch.autocast(part.input_ids.device.type, torch.bfloat16, enabled=autocast):
            return LossTerms(loss=learner.module(inputs).float())

    for _ in range(steps):
        assert learner.update(batch, loss).skipped is None


def looked_at(learner: Learner[Constant]) -> dict[str, Any]:
    """How far the master has gone, in which dtypes all of it is, and what goes on the wire."""
    (weight,) = learner.module.parameters()
    moments = learner.optimizer.state[weight]
    (master,) = (tensor for _, tensor in named_tensors(learner.module))
    (wire,) = (tensor for _, tensor in named_tensors(learner.module, dtype=torch.bfloat16))
    return {
        "moved": [(START - master).min().item(), (START - master).max().item()],
        "dtypes": [str(tensor.dtype) for tensor in (weight, moments["exp_avg"], moments["exp_avg_sq"])],
        "computed": str(learner.module.computed.dtype),
        "wire": [str(wire.dtype), torch.equal(wire, master.to(torch.bfloat16))],
        "wire moved": [wire.min().item(), wire.max().item()],
    }


def resumed(learner: Learner[Constant], other: Learner[Constant], *, autocast: bool, folder: pathlib.Path) -> bool:
    """Whether half of the steps, a checkpoint and the other half in another learner are the same as all at once."""
    train(other, STEPS // 2, autocast=autocast)
    state = other.state_dict()
    if state:
        assert {tensor.dtype for name, tensor in state.items() if name != "step"} == {torch.float32}
        save_checkpoint(folder, other.step, state, None)
    if other.process_group is not None:
        dist.barrier()
    found = latest_checkpoint(folder)
    assert found is not None
    torch.nn.init.zeros_(next(other.module.parameters()))
    again = learner_of(other.module, other.process_group)
    again.load_state_dict(load_checkpoint(found).tensors)
    train(again, STEPS // 2, autocast=autocast)
    ours, theirs = again.state_dict(), learner.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def assert_right(found: dict[str, Any]) -> None:
    assert found["moved"] == pytest.approx([STEPS * LR] * 2, rel=1e-3)
    assert found["dtypes"] == ["torch.float32"] * 3
    assert found["computed"] == "torch.bfloat16"
    assert found["wire"] == ["torch.bfloat16", True]
    # The bf16 numbers next to 0.02 and to 0.0199 are neighbours.
    assert found["wire moved"] == [163 * 2.0**-13] * 2
    assert torch.tensor(START).bfloat16().item() == 164 * 2.0**-13


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_masters_move_by_what_rl_asks_for(device: str, tmp_path: pathlib.Path) -> None:
    torch.set_num_threads(1)
    learner = learner_of(Constant().to(device))
    train(learner, STEPS, autocast=True)
    assert_right(looked_at(learner))
    assert resumed(learner, learner_of(Constant().to(device)), autocast=True, folder=tmp_path)


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_in_bf16_the_same_steps_change_nothing_and_are_refused(device: str) -> None:
    module = Constant(torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(STEPS):
        next(module.parameters()).grad = torch.ones_like(next(module.parameters()))
        optimizer.step()
    assert next(module.parameters()).unique().tolist() == [164 * 2.0**-13]
    with pytest.raises(ValueError, match=r"blocks\.0\.weight is torch\.bfloat16, in which steps of RL's size round"):
        learner_of(module)


def sharded() -> Learner[Constant]:
    """FSDP2's mixed precision: fp32 shards, which are gathered and computed with in bf16."""
    ranks = device_mesh(Mesh((("dp", WORLD),)), "cpu")
    return learner_of(shard_model(Constant(), ranks, param_dtype=torch.bfloat16), dist.group.WORLD)


def look(folder: pathlib.Path) -> dict[str, Any]:
    learner = sharded()
    train(learner, STEPS, autocast=False)
    return {**looked_at(learner), "resumed": resumed(learner, sharded(), autocast=False, folder=folder)}


def test_sharded_masters_move_as_well(tmp_path: pathlib.Path) -> None:
    for rank in run_ranks(__file__, tmp_path, world=WORLD):
        assert_right(rank)
        assert rank["resumed"]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], lambda: look(pathlib.Path(sys.argv[2], "checkpoints")), world=WORLD)
