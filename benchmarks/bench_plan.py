"""A plan for 1,024 ranks in seconds, no rank sending more than its share, in hardly more rounds than the bytes need."""

import math

import pytest
import torch
from drivetrain_sharding import Layout, Mesh, Plan, make_plan, train_layout, vllm_layout

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
OWED_S = 10.0


def trained(config: dict, *, copies: int) -> Layout:
    """On 512 ranks, FSDP2 over 512 / copies."""
    mesh = Mesh((("copies", copies), ("dp", 512 // copies)))
    return train_layout(config, mesh, dtype=torch.float32, fsdp="dp")


def served(config: dict) -> Layout:
    """On 512 ranks, 64 replicas of tensor parallelism over 8."""
    return vllm_layout(config, tp=8, replicas=64, dtype=torch.bfloat16)


def fewest_rounds(plan: Plan) -> int:
    """What the rank with the most to send or to receive needs, however well its rounds are filled."""
    traffic = plan.traffic()
    return math.ceil(max(int(traffic.sum(0).max()), int(traffic.sum(1).max())) / plan.bucket_bytes)


@pytest.mark.parametrize(
    ("config", "copies", "near"),
    [(LLAMA_70B, 1, False), (LLAMA_70B, 8, True), (QWEN3_235B, 1, False)],
    ids=["llama_70b_fsdp_512", "llama_70b_hsdp_64_on_hosts_of_8", "qwen3_235b_fsdp_512"],
)
def test_make_plan(within, benchmark, config, copies, near):
    source, target = trained(config, copies=copies), served(config)
    names = [[f"{side}{rank // 8}/gpu{rank % 8}" for rank in range(512)] for side in ("train", "serve")]
    plans: list[Plan] = []
    within(
        lambda: plans.append(make_plan(source, target, places=(names[0], names[1]) if near else None)),
        limit=OWED_S,
        rounds=3,
    )
    sent = plans[-1].traffic().sum(1)
    benchmark.extra_info.update(
        rounds=plans[-1].rounds,
        fewest_rounds=fewest_rounds(plans[-1]),
        most_sent_to_mean=float(sent.max() / sent.float().mean()),
        tensors=len(source.tensors),
    )


def test_one_rank_of_the_plan(within, benchmark):
    """What each rank does of it: spell out what it receives."""
    plan = make_plan(trained(LLAMA_70B, copies=1), served(LLAMA_70B))
    received = []
    within(lambda: received.append(plan.receives(200)), limit=OWED_S, rounds=3)
    benchmark.extra_info.update(transfers=sum(map(len, received[-1])))
