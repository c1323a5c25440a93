"""Two ranks on gloo. This file is also the program that each rank runs; it leaves what it found as JSON."""

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from drivetrain_learner import (
    Learner,
    LearnerConfig,
    LossTerms,
    PackedBatch,
    PolicyModel,
    ValueModel,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WORLD = 2
DEVICE = "cpu"


def policy(*, sharded: bool, seed: int = 0) -> PolicyModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    module = PolicyModel(LlamaForCausalLM(config)).to(DEVICE)
    return cast(PolicyModel, shard(module)) if sharded else module


def shard(module: Any) -> Any:
    mesh = init_device_mesh(DEVICE, (WORLD,))
    layers = module.model.model.layers if isinstance(module, PolicyModel) else module.backbone.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def pack(lengths: list[int]) -> PackedBatch:
    """Sequences of three prompt tokens and so many response tokens."""
    generator = torch.Generator().manual_seed(3)
    token_ids = [torch.randint(0, 7, (3 + length,), generator=generator).tolist() for length in lengths]
    return PackedBatch.pack(token_ids, [[index >= 3 for index in range(len(ids))] for ids in token_ids])


def learner_of(module: nn.Module, *, alone: bool = False, **settings: Any) -> Learner:
    config = LearnerConfig(**{"lr": 1e-2, "max_grad_norm": 0.05} | settings)
    return Learner(module, config, process_group=None if alone else dist.group.WORLD)


def token_mean(
    learner: Learner, batch: PackedBatch, calls: list[int] | None = None
) -> Callable[[PackedBatch], LossTerms]:
    denominator = learner.reduce(batch.loss_mask.sum())

    def loss(part: PackedBatch) -> LossTerms:
        if calls is not None:
            calls.append(part.num_tokens)
        output = learner.module(part)
        per_token = -output.logprobs if isinstance(learner.module, PolicyModel) else (output - 1.0) ** 2
        summed = per_token[part.loss_mask].sum() / denominator
        return LossTerms(loss=summed, metrics={"tokens": part.loss_mask.sum()})

    return loss


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def step(learner: Learner, batch: PackedBatch) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """The numbers of an update, the gradients before clipping, and the parameters after it."""
    clipped: list[Tensor] = []
    handle = learner.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: clipped.extend(whole(cast(Tensor, p.grad)) for p in learner.module.parameters())
    )
    result = learner.update(batch, token_mean(learner, batch))
    handle.remove()
    scale = max(result.grad_norm / cast(float, learner.config.max_grad_norm), 1.0)
    numbers = [result.loss, result.grad_norm, result.metrics["tokens"]]
    return numbers, [g * scale for g in clipped], [whole(p.detach()) for p in learner.module.parameters()]


def furthest(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def partitions(rank: int) -> dict[str, Any]:
    """Every way to deal four uneven sequences to two ranks, against one rank that has them all."""
    batch = pack([1, 3, 50, 400])
    alone = learner_of(policy(sharded=False), alone=True)
    start = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    want_numbers, want_gradients, want_parameters = step(alone, batch)
    found: dict[str, Any] = {"alone": want_numbers}
    for kind in ("replicated", "sharded"):
        worst = {"numbers": 0.0, "gradients": 0.0, "parameters": 0.0}
        module = policy(sharded=kind == "sharded", seed=9)
        # Up to exchanging the ranks, and one more in which rank 0 has nothing; some of them without accumulation.
        dealt = [*((0, *others) for others in itertools.product(range(WORLD), repeat=3)), (1, 1, 1, 1)]
        for limit, owners in [*((60, owners) for owners in dealt), *((10_000, owners) for owners in dealt[::3])]:
            learner = learner_of(module, max_tokens_per_microbatch=limit)
            learner.load_state_dict(start)
            own = batch.select([index for index, owner in enumerate(owners) if owner == rank])
            numbers, gradients, parameters = step(learner, own)
            relative = max(abs(a - b) / abs(b) for a, b in zip(numbers, want_numbers, strict=True))
            worst["numbers"] = max(worst["numbers"], relative)
            worst["gradients"] = max(worst["gradients"], furthest(gradients, want_gradients))
            worst["parameters"] = max(worst["parameters"], furthest(parameters, want_parameters))
        found[kind] = worst
    return found


class Ones(nn.Module):
    """Parameters with a gradient of one each (30 sharded, 3 not), and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.free = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, batch: PackedBatch) -> Tensor:
        return (
            self.inner(torch.ones(batch.num_tokens, 5, device=self.free.device)).sum()
            + self.free.sum() * batch.num_tokens
        )


def ones(rank: int) -> dict[str, Any]:
    norms = []
    batch = pack([1])
    for max_norm in (100.0, 1.0):
        module = Ones().to(DEVICE)
        fully_shard(module.inner, mesh=init_device_mesh(DEVICE, (WORLD,)))
        learner = learner_of(module, max_grad_norm=max_norm)
        scale = WORLD * batch.num_tokens
        result = learner.update(batch, lambda part: LossTerms(loss=module(part) / scale))  # noqa: B023
        norms.append(result.grad_norm)
    return {"norms": norms}


def micro_batches(rank: int) -> dict[str, Any]:
    """Five long sequences here and five short ones there; one or three sequences for two ranks; a critic."""
    found: dict[str, Any] = {}
    lengths = [92] * 5 + [17] * 5
    for name, shares in {"five": ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]), "one": ([0], []), "three": ([0, 5], [6])}.items():
        everything = pack(lengths).select([index for share in shares for index in share])
        batch = pack(lengths).select(shares[rank])
        for kind in ("policy", "critic"):
            plain: nn.Module = policy(sharded=False)
            module: nn.Module = policy(sharded=kind == "policy")
            if kind == "critic":
                plain, module = ValueModel(cast(PolicyModel, plain).model), ValueModel(cast(PolicyModel, module).model)
                module = shard(module)
            alone = learner_of(plain, alone=True, max_tokens_per_microbatch=10_000)
            want = alone.update(everything, token_mean(alone, everything))
            learner = learner_of(module, max_tokens_per_microbatch=100)
            calls: list[int] = []
            got = learner.update(batch, token_mean(learner, batch, calls))
            outputs = learner.infer(batch, module)
            found[f"{name} {kind}"] = {
                "calls": calls,
                "loss": [got.loss, want.loss],
                "norm": [got.grad_norm, want.grad_norm],
                "inferred": (outputs[0] if isinstance(outputs, tuple) else outputs).numel() == batch.num_tokens,
            }
    learner = learner_of(policy(sharded=True))
    nothing = pack([4]).select([])
    found["nothing"] = learner.update(nothing, token_mean(learner, nothing)).skipped
    return found


def resume(rank: int) -> dict[str, Any]:
    """Four steps straight, and two and two with another module in between; then on to one rank."""
    batch = pack([5, 9, 4]).select([0, 2] if rank == 0 else [1])
    straight = learner_of(policy(sharded=True))
    losses = [straight.update(batch, token_mean(straight, batch)).loss for _ in range(4)]
    first = learner_of(policy(sharded=True))
    numbers = [first.update(batch, token_mean(first, batch)).loss for _ in range(2)]
    state = first.state_dict()
    sizes = [len(state)]
    if rank == 0:
        save_checkpoint("checkpoints", first.step, state, None)
    dist.barrier()
    state = load_checkpoint(cast(Path, latest_checkpoint("checkpoints"))).tensors
    second = learner_of(policy(sharded=True, seed=4))
    second.load_state_dict(state)
    numbers += [second.update(batch, token_mean(second, batch)).loss for _ in range(2)]
    one, other = straight.state_dict(), second.state_dict()
    alone = learner_of(policy(sharded=False, seed=5), alone=True)
    alone.load_state_dict(state)
    back = alone.state_dict()
    return {
        "losses": losses == numbers,
        "states": all(torch.equal(one[name], other[name]) for name in one),
        "sizes": sizes,
        "alone": all(torch.equal(back[name], state[name]) for name in state),
        "tie": "model/model.lm_head.weight" in state,
    }


def looks(rank: int, device: str) -> dict[str, Any]:
    global DEVICE
    DEVICE = device
    return {look.__name__: look(rank) for look in (partitions, ones, micro_batches, resume)}


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.multigpu, two_gpus])])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), request.param, world=WORLD)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_updates_do_not_depend_on_how_sequences_are_dealt_to_ranks(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert rank["partitions"]["alone"][2] == 454
        assert rank["partitions"][kind]["numbers"] < 1e-5
        assert rank["partitions"][kind]["gradients"] < 1e-6
        assert rank["partitions"][kind]["parameters"] < 1e-5


def test_the_norm_counts_every_shard_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["ones"]["norms"] == pytest.approx([math.sqrt(33)] * 2)


def test_ranks_run_as_many_micro_batches_as_the_busiest(found: list[dict[str, Any]]) -> None:
    busy, light = (rank["micro_batches"]["five policy"]["calls"] for rank in found)
    assert busy == [94] * 5
    assert light == [95, 0, 0, 0, 0]
    assert found[1]["micro_batches"]["one policy"]["calls"] == [0]
    for rank in found:
        for name, case in rank["micro_batches"].items():
            if name != "nothing":
                assert case["loss"][0] == pytest.approx(case["loss"][1], rel=1e-5)
                assert case["norm"][0] == pytest.approx(case["norm"][1], rel=1e-5)
                assert case["inferred"]


def test_no_samples_on_any_rank(found: list[dict[str, Any]]) -> None:
    assert [rank["micro_batches"]["nothing"] for rank in found] == ["no slot has loss_mask true"] * 2


def test_a_sharded_learner_resumes_bit_equal_and_on_another_layout(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["resume"]["losses"]
        assert rank["resume"]["states"]
        assert rank["resume"]["alone"]
        assert not rank["resume"]["tie"]
    assert found[0]["resume"]["sizes"][0] > 0
    assert found[1]["resume"]["sizes"] == [0]


if __name__ == "__main__":
    rank, folder, device = sys.argv[1:]
    be_a_rank(rank, folder, lambda: looks(int(rank), device), world=WORLD, device=device)
