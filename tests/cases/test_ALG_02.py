"""ALG-02: the gradient's size depends on the number of data-parallel ranks, because averages are taken of averages.

PrimeIntellect-ai/prime-rl#2358, NovaSky-AI/SkyRL#794, areal-project/AReaL#335,
Snowflake-AI-Research/Arctic-Platform#119, NovaSky-AI/SkyRL#1504

This file is also the program that each of the two ranks runs; it leaves what it found as JSON.
"""

import itertools
import sys
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from drivetrain_algorithms import AggregationMode, Reduce, aggregate, loss_denominator, ppo_clip
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor

WORLD = 2
MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
RESPONSES = [1, 3, 50, 400]
PARTITIONS = list(itertools.product(range(WORLD), repeat=len(RESPONSES)))
"""The rank of each of the four sequences; in two of them one rank has nothing."""
MAX_GRAD_NORM = 1e-3


def tiny_policy() -> PolicyModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    return PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)))


def four_sequences() -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    token_ids = [torch.randint(7, (3 + length,), generator=generator).tolist() for length in RESPONSES]
    return PackedBatch.pack(token_ids, [[index >= 3 for index in range(len(ids))] for ids in token_ids])


def step(
    learner: Learner[PolicyModel], batch: PackedBatch, mode: AggregationMode, *, reduce: Reduce | None
) -> dict[str, Any]:
    """One update; the gradients are those before clipping."""
    denominator = loss_denominator(
        batch.loss_mask,
        mode=mode,
        cu_seqlens=batch.cu_seqlens,
        norm_length=400 if mode == "seq_mean_token_sum_norm" else None,
        reduce=reduce,
    )
    micro_batches: list[int] = []

    def loss(part: PackedBatch) -> LossTerms:
        micro_batches.append(part.num_tokens)
        logprobs = learner.module(part).logprobs
        # Made of the token and its place, so that they are the same wherever the sequence lies.
        advantages, old_logprobs = torch.sin(1.0 + part.labels * part.positions), logprobs.detach() - 0.1
        policy = ppo_clip(logprobs, old_logprobs, advantages, part.loss_mask, clip_low=0.2, clip_high=0.2)
        total = aggregate(policy.loss, part.loss_mask, mode=mode, denominator=denominator, cu_seqlens=part.cu_seqlens)
        return LossTerms(loss=total)

    clipped: list[Tensor] = []
    handle = learner.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: clipped.extend(p.grad.flatten().clone() for p in learner.module.parameters())
    )
    result = learner.update(batch, loss)
    handle.remove()
    assert result.skipped is None
    return {
        "micro_batches": len(micro_batches),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "gradient": torch.cat(clipped) * max(result.grad_norm / MAX_GRAD_NORM, 1.0),
        "parameters": torch.cat([p.detach().flatten() for p in learner.module.parameters()]),
    }


def learner_of(max_tokens: int, group: dist.ProcessGroup | None) -> Learner[PolicyModel]:
    # An epsilon far above the gradients, and AdamW no longer hides their size from the parameters.
    config = LearnerConfig(
        lr=1.0, eps=1e-2, weight_decay=0.1, max_grad_norm=MAX_GRAD_NORM, max_tokens_per_microbatch=max_tokens
    )
    return Learner(tiny_policy(), config, process_group=group)


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Relative ones of the loss, the norm and (to the largest) the gradient; absolute ones of the parameters."""
    return {
        "loss": abs(found["loss"] / wanted["loss"] - 1.0),
        "grad_norm": abs(found["grad_norm"] / wanted["grad_norm"] - 1.0),
        "gradient": ((found["gradient"] - wanted["gradient"]).abs().max() / wanted["gradient"].abs().max()).item(),
        "parameters": (found["parameters"] - wanted["parameters"]).abs().max().item(),
    }


def look(rank: int) -> dict[str, Any]:
    """Every partition against one rank that has all sequences in one micro-batch.

    With token_mean each is tried with and without accumulation, with the other modes one with it, the next without.
    """
    batch, alone, found = four_sequences(), learner_of(10_000, None), {}
    start = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    ranks = {"accumulated": learner_of(60, dist.group.WORLD), "whole": learner_of(10_000, dist.group.WORLD)}
    for mode in MODES:
        alone.load_state_dict(start)
        wanted = step(alone, batch, mode, reduce=None)
        worst = dict.fromkeys(("loss", "grad_norm", "gradient", "parameters"), 0.0)
        micro_batches: dict[str, set[int]] = {name: set() for name in ranks}
        for index, owners in enumerate(PARTITIONS):
            own = batch.select([sequence for sequence, owner in enumerate(owners) if owner == rank])
            for name in ranks if mode == "token_mean" else [list(ranks)[index % 2]]:
                ranks[name].load_state_dict(start)
                result = step(ranks[name], own, mode, reduce=ranks[name].reduce)
                micro_batches[name].add(result["micro_batches"])
                for key, difference in differences(result, wanted).items():
                    worst[key] = max(worst[key], difference)
        found[mode] = {
            "grad_norm": wanted["grad_norm"],
            "worst": worst,
            "micro_batches": {name: sorted(counts) for name, counts in micro_batches.items()},
        }
    # What goes wrong: each rank divides by its own tokens, and the average of the ranks is taken.
    alone.load_state_dict(start)
    wanted = step(alone, batch, "token_mean", reduce=None)
    ranks["whole"].load_state_dict(start)
    own = batch.select([0, 3] if rank == 0 else [1, 2])
    found["wrong"] = differences(step(ranks["whole"], own, "token_mean", reduce=lambda x: x * WORLD), wanted)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_take_the_step_of_one(found: list[dict[str, Any]], mode: AggregationMode) -> None:
    for rank in found:
        assert rank[mode]["grad_norm"] > 10 * MAX_GRAD_NORM  # clipping acts
        assert max(rank[mode]["worst"].values()) < 1e-5
        # The sequences of 1, 3 and 50 tokens fit into one micro-batch, that of 400 is another, of whichever rank.
        assert rank[mode]["micro_batches"] == {"accumulated": [1, 2], "whole": [1]}


def test_an_average_of_averages_would_be_seen(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["wrong"]["grad_norm"] > 0.1
        assert rank["wrong"]["gradient"] > 0.1
        assert rank["wrong"]["parameters"] > 1e-3


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], lambda: look(int(sys.argv[1])), world=WORLD)
