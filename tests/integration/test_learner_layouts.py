"""A learner on a model that lies over four ranks learns what it learns alone. This file is also the ranks' program."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, UpdateResult
from drivetrain_sharding import (
    Mesh,
    OptimizerOffload,
    checkpoint_activations,
    device_mesh,
    digest,
    named_tensors,
    shard_model,
    train_layout,
)
from gloo_ranks import be_a_rank, run_ranks
from tiny_models import tiny_config, tiny_model

WORLD = 4
LAYOUTS: dict[str, tuple[Mesh, dict[str, str]]] = {
    "shards and copies": (Mesh((("replica", 2), ("dp", 2))), {"fsdp": "dp"}),
    "tensor parallel": (Mesh((("dp", 2), ("tp", 2))), {"tp": "tp"}),
    "tensor parallel and shards": (Mesh((("dp", 2), ("tp", 2))), {"fsdp": "dp", "tp": "tp"}),
}
CASES = [(name, layout) for name in ("qwen3", "qwen3 moe") for layout in LAYOUTS]
LENGTHS = [4, 9, 3, 6, 5, 2, 8, 7]


def policy_of(name: str) -> PolicyModel:
    config = tiny_config(name)
    config._experts_implementation = "eager"  # grouped products want sizes that are multiples of 16 bytes
    policy = PolicyModel(tiny_model(config))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.3)
    return policy


def learner_of(policy: PolicyModel, group: dist.ProcessGroup | None = None) -> Learner[PolicyModel]:
    settings = LearnerConfig(lr=1e-3, max_grad_norm=0.5, max_tokens_per_microbatch=24)
    return Learner(policy, settings, process_group=group)


def sequences() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    token_ids = [torch.randint(0, 130, (length,), generator=generator).tolist() for length in LENGTHS]
    return PackedBatch.pack(token_ids, [[index > 0 for index in range(len(ids))] for ids in token_ids])


def train(learner: Learner[PolicyModel], batch: PackedBatch) -> list[UpdateResult]:
    count = learner.reduce(batch.loss_mask.sum())

    def loss(part: PackedBatch) -> LossTerms:
        return LossTerms(loss=-learner.module(part).logprobs.sum() / count)

    return [learner.update(batch, loss) for _ in range(3)]


def off(found: list[UpdateResult], wanted: list[UpdateResult], what: str) -> float:
    return max(abs(getattr(a, what) / getattr(b, what) - 1) for a, b in zip(found, wanted, strict=True))


def look() -> dict[str, Any]:
    found = {}
    for name, layout in CASES:
        plain = policy_of(name)
        policy = checkpoint_activations(copy.deepcopy(plain))
        alone = learner_of(plain)
        wanted = train(alone, sequences())

        mesh, dims = LAYOUTS[layout]
        ranks = device_mesh(mesh, "cpu")
        shard_model(policy, ranks, train_layout(policy.model.config, mesh, dtype=torch.float32, **dims))
        group = dist.group.WORLD if "tp" not in dims else ranks.get_group("dp")
        assert group is not None
        learner = learner_of(policy, group)
        own = range(dist.get_rank(group), len(LENGTHS), dist.get_world_size(group))
        with OptimizerOffload(learner.optimizer):
            got = train(learner, sequences().select(list(own)))

        state, held = alone.state_dict(), learner.state_dict()
        before = digest(named_tensors(policy))
        again = [key for key, tensor in held.items() if not key.startswith("exp") and tensor.numel() > 1]
        everywhere = {key: held.get(key, torch.zeros_like(tensor)) for key, tensor in state.items()}
        for tensor in everywhere.values():
            dist.broadcast(tensor, group_src=0, group=group)
        for parameter in policy.parameters():
            torch.nn.init.zeros_(parameter)
        learner.load_state_dict(everywhere)
        found[f"{name}, {layout}"] = {
            "loss": off(got, wanted, "loss"),
            "grad_norm": off(got, wanted, "grad_norm"),
            "parameters": max(((held[key] - state[key]).abs().max().item() for key in again), default=0),
            "names": held.keys() == state.keys() or not held,
            "loaded": digest(named_tensors(policy)) == before,
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_learner_learns_what_it_learns_alone(found: list[dict[str, Any]], name: str, layout: str) -> None:
    for rank in found:
        case = rank[f"{name}, {layout}"]
        assert case["loss"] < 1e-5
        assert case["grad_norm"] < 1e-5
        # AdamW's first steps are of the learning rate's size, whatever the gradient's: 3 times 1e-3.
        assert case["parameters"] < 1e-4
        assert case["names"]
        assert case["loaded"]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
