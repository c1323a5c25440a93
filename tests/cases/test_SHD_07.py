"""SHD-07: sizes that do not divide: vocabularies, heads, parameters with fewer rows than there are ranks.

NVIDIA-NeMo/RL#403, pytorch/pytorch#144109, nvidia-cosmos/cosmos-rl#11, vllm-project/vllm PR 20843

Four ranks on gloo, and one process. This file is also the program that each rank runs.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from drivetrain_learner import PackedBatch, PolicyModel
from drivetrain_sharding import (
    Layout,
    Mesh,
    device_mesh,
    load_named_tensors,
    local_parameters,
    make_plan,
    named_tensors,
    pull,
    read_layout,
    shard_model,
    train_layout,
    vllm_layout,
)
from gloo_ranks import be_a_rank, run_ranks
from layouts import wrong_pieces
from tiny_models import tiny_config, tiny_model
from torch import Tensor, nn

WORLD = 4
ROWS = (1, 3, 7, 1031)
MESHES = {"2 ranks": Mesh((("replica", 2), ("dp", 2))), "4 ranks": Mesh((("dp", 4),))}
VOCABULARY = 130  # vLLM pads it to 192
KV_HEADS = 2


class Uneven(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.odd = nn.ParameterList([nn.Parameter(torch.randn(rows, 2)) for rows in ROWS])


def round_trip(mesh: Mesh) -> dict[str, Any]:
    """Shards, gathered; other values loaded into shards, and gathered."""
    first, second = (dict(named_tensors(Uneven(seed))) for seed in (0, 1))
    module, ranks = Uneven(0), device_mesh(mesh, "cpu")
    layout = read_layout(module)
    shards = shard_model(module, ranks["dp"])

    def gathered(wanted: Mapping[str, Tensor]) -> list[bool]:
        return [torch.equal(tensor, wanted[name]) for name, tensor in named_tensors(shards)]

    found = {
        "rows": [held.shape[0] for held in local_parameters(shards).values()],
        "gathered": gathered(first),
        "tensors": read_layout(shards, ranks).tensors == layout.tensors,
        "wrong": wrong_pieces(read_layout(shards), ranks.get_local_rank("dp"), local_parameters(shards), first),
    }
    load_named_tensors(shards, second)
    return {**found, "loaded": gathered(second)}


def every_label() -> list[float]:
    """The sums of the probabilities that tensor-parallel ranks give the labels there are, and how far they are off."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    config = tiny_config("qwen2 tied")
    plain = tiny_model(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.3)
    batch = PackedBatch.pack([[3, 1, label] for label in range(VOCABULARY)], [[False, False, True]] * VOCABULARY)
    with torch.no_grad():
        wanted = PolicyModel(plain)(batch).logprobs[batch.loss_mask]
        policy = PolicyModel(plain)
        layout = train_layout(config, mesh, dtype=torch.float32, fsdp="dp", tp="tp")
        shard_model(policy, device_mesh(mesh, "cpu"), layout)
        found = policy(batch).logprobs[batch.loss_mask]
    assert found.numel() == VOCABULARY
    return [found.double().exp().sum().item(), (found - wanted).abs().max().item()]


def refusals() -> list[str]:
    """Set-ups that divide heads, asked for by a layout of one's own: what is said."""
    config = tiny_config("llama", intermediate_size=92)
    mesh = Mesh((("dp", 1), ("tp", 4)))
    asked = train_layout(config, Mesh((("dp", 2), ("tp", 2))), dtype=torch.float32, tp="tp")
    said = []
    for layout in (dataclasses.replace(asked, mesh=mesh), vllm_layout(config, tp=4, dtype=torch.float32)):
        model = tiny_model(config)
        try:
            shard_model(model, device_mesh(layout.mesh, "cpu"), layout)
        except ValueError as error:
            said.append(str(error))
    return said


def look() -> dict[str, Any]:
    trips = {name: round_trip(mesh) for name, mesh in MESHES.items()}
    return {"trips": trips, "every label": every_label(), "refusals": refusals()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


@pytest.mark.parametrize("name", MESHES)
def test_gathered_shards_are_the_original(found: list[dict[str, Any]], name: str) -> None:
    trips = [rank["trips"][name] for rank in found]
    for trip in trips:
        assert trip["gathered"] == trip["loaded"] == [True] * len(ROWS)
        assert trip["tensors"]
        assert trip["wrong"] == []
    two = [[1, 2, 4, 516], [0, 1, 3, 515]]
    four = [[1, 1, 2, 258], [0, 1, 2, 258], [0, 1, 2, 258], [0, 0, 1, 257]]
    assert [trip["rows"] for trip in trips] == (two * 2 if name == "2 ranks" else four)


def test_probabilities_are_those_of_labels_that_there_are(found: list[dict[str, Any]]) -> None:
    for rank in found:
        total, off = rank["every label"]
        assert total == pytest.approx(1, abs=1e-5)
        assert off < 1e-5


def test_sizes_that_do_not_divide_are_refused_when_the_model_is_set_up(found: list[dict[str, Any]]) -> None:
    for rank in found:
        divided, padded = rank["refusals"]
        assert "lm_head.weight has 130 in dimension 0: use a number of ranks that divides it" in divided
        assert "self_attn.k_proj: it has 2 heads of 10: use a number of ranks that divides the heads" in divided
        assert "the module is not the layout's" in padded


def test_sizes_that_do_not_divide_are_refused_when_the_layout_is_made() -> None:
    config, mesh = tiny_config("llama"), Mesh((("tp", 4),))
    with pytest.raises(
        ValueError, match="4 tensor-parallel ranks do not divide num_key_value_heads 2, vocab_size 130, intermediate"
    ):
        train_layout(config, mesh, dtype=torch.float32, tp="tp")
    with pytest.raises(ValueError, match="3 tensor-parallel ranks do not divide num_attention_heads 4"):
        vllm_layout(config, tp=3, dtype=torch.float32)


def whole_tensors(layout: Layout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in layout.tensors}


def empty(layout: Layout, rank: int) -> dict[str, Tensor]:
    """The parameters of a rank, all NaN: what nothing was written to can be told."""
    return {name: torch.full(shape, torch.nan) for name, shape in layout.parameter_shapes(rank).items()}


@pytest.mark.parametrize("shards", [2, 4])
def test_padding_is_neither_sent_nor_exported(shards: int) -> None:
    # An MLP that four ranks divide, and twice as many ranks as key-value heads.
    config = tiny_config("smollm2", intermediate_size=92)
    trained = train_layout(config, Mesh((("dp", shards),)), dtype=torch.float32, fsdp="dp")
    served = vllm_layout(config, tp=4, dtype=torch.float32)
    whole = whole_tensors(trained)
    held = [empty(trained, rank) for rank in range(shards)]
    for rank in range(shards):
        for piece in trained.pieces(rank):
            piece.at.of(held[rank][piece.parameter]).copy_(piece.box.of(whole[piece.tensor]))
    there = [empty(served, rank) for rank in range(4)]
    for rank in range(4):
        pull(make_plan(trained, served), rank, lambda source: held[source], there[rank])

    embedding = "model.embed_tokens.weight"
    padding = [int(parameters[embedding].isnan().any(1).sum()) for parameters in there]
    assert [len(parameters[embedding]) for parameters in there] == [48] * 4
    assert padding == [0, 0, 3 * 48 - VOCABULARY, 48]
    for rank in range(4):
        assert wrong_pieces(served, rank, there[rank], whole, padded=[embedding]) == []
        assert [name for name, tensor in there[rank].items() if tensor.isnan().any()] in ([], [embedding])
    queries = config.head_dim  # one head a rank, then the key-value head that two ranks share
    keys = [parameters["model.layers.0.self_attn.qkv_proj.weight"][queries:] for parameters in there]
    assert [torch.equal(keys[0], other) for other in keys] == [True, True, False, False]
    assert torch.equal(keys[2], keys[3])

    back = [empty(trained, rank) for rank in range(shards)]
    for rank in range(shards):
        pull(make_plan(served, trained), rank, lambda source: there[source], back[rank])
        assert all(torch.equal(back[rank][name], tensor) for name, tensor in held[rank].items())


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
