import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_sharding import Box, Layout, Mesh, Piece, train_layout, vllm_layout
from tiny_models import MODELS, save, tiny_config

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
# One layer; 4 heads of 2, 2 key-value heads; the vocabulary is padded from 70 to 128.
SMALL = {
    "model_type": "qwen2",
    "vocab_size": 70,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_EXPERTS = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "tie_word_embeddings": True,
}
F32 = torch.float32


def pieces_of(layout: Layout, rank: int, parameter: str) -> list[Piece]:
    return [piece for piece in layout.pieces(rank) if piece.parameter == parameter]


@pytest.mark.parametrize("name", MODELS)
def test_whole_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    config = tiny_config(name)
    save(config, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for described in (config, json.loads((tmp_path / "config.json").read_text())):
        layout = train_layout(described, Mesh((("dp", 1),)), dtype=F32)
        assert {spec.name: spec.shape for spec in layout.tensors} == saved


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_ties_are_those_of_the_module(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = train_layout(config, Mesh((("dp", 1),)), dtype=F32)
    own = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert list(layout.parameter_shapes(0).items()) == list(own.items())
    assert layout.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(layout.ties)


@pytest.mark.parametrize("name", MODELS)
def test_together_the_ranks_hold_every_element(name: str) -> None:
    config = tiny_config(name, hidden_size=40, intermediate_size=88, num_experts=4)
    mesh = Mesh((("dp", 3), ("tp", 2)))
    layouts = [
        train_layout(config, mesh, dtype=F32, fsdp="dp", tp="tp"),
        train_layout(config, mesh, dtype=F32, fsdp="dp"),
        vllm_layout(config, tp=1, replicas=2, dtype=F32),
        vllm_layout(config, tp=4, dtype=F32) if config.model_type != "qwen3_moe" else vllm_layout(config, dtype=F32),
        vllm_layout(config, tp=2, dtype=F32, expert_parallel=True),
    ]
    for layout in layouts:
        seen = {spec.name: torch.zeros(spec.shape, dtype=torch.int) for spec in layout.tensors}
        for rank in range(layout.mesh.size):
            shapes = layout.parameter_shapes(rank)
            taken = {key: torch.zeros(shape, dtype=torch.int) for key, shape in shapes.items()}
            for piece in layout.pieces(rank):
                piece.box.of(seen[piece.tensor]).add_(1)
                piece.at.of(taken[piece.parameter]).add_(1)
            assert all(int(value.max()) <= 1 for value in taken.values() if value.numel())
        assert all(int(value.min()) >= 1 for value in seen.values())
        assert Layout.from_json(layout.to_json()) == layout


def test_fsdp_cuts_what_tensor_parallelism_left() -> None:
    layout = train_layout(SMALL, Mesh((("dp", 2), ("tp", 2))), dtype=F32, fsdp="dp", tp="tp")
    # Six rows of gate_proj for each tensor-parallel rank, of which FSDP2 gives three to each.
    rows = [pieces_of(layout, rank, "model.layers.0.mlp.gate_proj.weight")[0].box for rank in range(4)]
    assert rows == [Box((first, 0), (first + 3, 8)) for first in (0, 6, 3, 9)]
    # down_proj is cut by inputs, then by rows; its input norm by rows alone.
    assert pieces_of(layout, 3, "model.layers.0.mlp.down_proj.weight")[0].box == Box((4, 6), (8, 12))
    assert pieces_of(layout, 3, "model.layers.0.input_layernorm.weight")[0].box == Box((4,), (8,))
    assert pieces_of(layout, 2, "model.layers.0.self_attn.o_proj.weight")[0].box == Box((4, 0), (8, 4))


def test_uneven_fsdp_leaves_the_last_ranks_short_or_empty() -> None:
    layout = train_layout(SMALL | {"vocab_size": 9}, Mesh((("dp", 4),)), dtype=F32, fsdp="dp")
    rows = [layout.parameter_shapes(rank)["lm_head.weight"][0] for rank in range(4)]
    assert rows == [3, 3, 3, 0]
    assert pieces_of(layout, 3, "lm_head.weight") == []


def test_a_dimension_that_nothing_is_cut_over_holds_copies() -> None:
    layout = train_layout(SMALL, Mesh((("replica", 2), ("dp", 2))), dtype=F32, fsdp="dp")
    assert layout.pieces(0) == layout.pieces(2) != layout.pieces(1) == layout.pieces(3)


def test_experts_are_stacked_and_sharded_by_expert() -> None:
    layout = train_layout(SMALL_EXPERTS, Mesh((("dp", 2), ("tp", 2))), dtype=F32, fsdp="dp", tp="tp")
    stack = "model.layers.0.mlp.experts"
    assert layout.parameter_shapes(3)[f"{stack}.gate_up_proj"] == (2, 6, 8)
    # Rank 3 has experts 2 and 3, and of each the second halves of gate and up.
    assert pieces_of(layout, 3, f"{stack}.gate_up_proj") == [
        Piece(f"{stack}.{expert}.{name}.weight", Box((3, 0), (6, 8)), f"{stack}.gate_up_proj", at)
        for expert, name, at in (
            (2, "gate_proj", Box((0, 0, 0), (1, 3, 8))),
            (2, "up_proj", Box((0, 3, 0), (1, 6, 8))),
            (3, "gate_proj", Box((1, 0, 0), (2, 3, 8))),
            (3, "up_proj", Box((1, 3, 0), (2, 6, 8))),
        )
    ]
    assert pieces_of(layout, 0, f"{stack}.down_proj")[1].box == Box((0, 0), (8, 3))


def test_vllm_fuses_and_shares_key_value_heads() -> None:
    layout = vllm_layout(SMALL, tp=4, replicas=2, dtype=torch.bfloat16)
    assert layout.mesh == Mesh((("replica", 2), ("tp", 4)))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert layout.parameter_shapes(0)[name] == (2 + 2 + 2, 8)
    # Query head 3, and the second of the two key-value heads, which rank 2 holds as well.
    at = "model.layers.0.self_attn"
    assert pieces_of(layout, 7, name) == [
        Piece(f"{at}.q_proj.weight", Box((6, 0), (8, 8)), name, Box((0, 0), (2, 8))),
        Piece(f"{at}.k_proj.weight", Box((2, 0), (4, 8)), name, Box((2, 0), (4, 8))),
        Piece(f"{at}.v_proj.weight", Box((2, 0), (4, 8)), name, Box((4, 0), (6, 8))),
    ]
    assert [piece.box for piece in pieces_of(layout, 2, name)[1:]] == [Box((2, 0), (4, 8))] * 2
    assert layout.parameter_shapes(1)["model.layers.0.mlp.gate_up_proj.weight"] == (6, 8)
    assert layout.parameter_shapes(1)["model.layers.0.mlp.down_proj.weight"] == (8, 3)


def test_vllm_pads_the_vocabulary_before_it_cuts() -> None:
    layout = vllm_layout(SMALL, tp=4, dtype=F32)
    boxes = [pieces_of(layout, rank, "model.embed_tokens.weight") for rank in range(4)]
    assert [[piece.box for piece in held] for held in boxes] == [
        [Box((0, 0), (32, 8))],
        [Box((32, 0), (64, 8))],
        [Box((64, 0), (70, 8))],
        [],
    ]
    assert {layout.parameter_shapes(rank)["lm_head.weight"] for rank in range(4)} == {(32, 8)}


def test_vllm_cuts_experts_or_shares_them_out() -> None:
    at = "model.layers.0.mlp.experts.routed_experts"
    cut, shared = (vllm_layout(SMALL_EXPERTS, tp=2, dtype=F32, expert_parallel=parallel) for parallel in (False, True))
    assert cut.parameter_shapes(1)[f"{at}.w13_weight"] == (4, 6, 8)
    assert cut.parameter_shapes(1)[f"{at}.w2_weight"] == (4, 8, 3)
    assert shared.parameter_shapes(1)[f"{at}.w13_weight"] == (2, 12, 8)
    assert {piece.tensor.split(".")[5] for piece in pieces_of(shared, 1, f"{at}.w2_weight")} == {"2", "3"}
    assert shared.parameter_shapes(1)["model.layers.0.self_attn.qkv_proj.weight"] == (8, 8)


def test_defaults_of_a_family_hold_where_the_file_says_nothing() -> None:
    tied = train_layout(SMALL | {"model_type": "gemma3_text"}, Mesh((("dp", 1),)), dtype=F32)
    assert tied.ties
    assert tied.spec("model.layers.0.self_attn.q_proj.weight").shape == (4 * 256, 8)
    assert tied.spec("lm_head.weight").shape == (70, 8)
    untied = train_layout(SMALL | {"num_key_value_heads": None}, Mesh((("dp", 1),)), dtype=F32)
    assert not untied.ties
    assert untied.spec("model.layers.0.self_attn.k_proj.weight").shape == (8, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3': layouts are known for llama, .*read_layout.*named_tensors"),
        ({"model_type": None}, "model type None"),
        ({"hidden_size": None}, "hidden_size of this qwen2 config is None"),
        ({"model_type": "qwen3_moe"}, "num_experts of this qwen3_moe config is None"),
    ],
)
def test_a_config_that_says_too_little_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        train_layout(SMALL | change, Mesh((("dp", 1),)), dtype=F32)
    with pytest.raises(ValueError, match=said):
        vllm_layout(SMALL | change, dtype=F32)


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="4 tensor-parallel ranks do not divide num_key_value_heads 2, vocab_size 70:"):
        train_layout(SMALL, Mesh((("tp", 4),)), dtype=F32, tp="tp")
    with pytest.raises(ValueError, match=r"3 .*heads 4, num_key_value_heads 2, vocab_size \(padded\) 128:"):
        vllm_layout(SMALL, tp=3, dtype=F32)
    with pytest.raises(ValueError, match="4 tensor-parallel ranks do not divide moe_intermediate_size 6:"):
        vllm_layout(SMALL_EXPERTS, tp=4, dtype=F32)
    assert vllm_layout(SMALL_EXPERTS, tp=4, dtype=F32, expert_parallel=True).mesh.size == 4
    with pytest.raises(ValueError, match="2 tensor-parallel ranks do not divide num_experts 3:"):
        vllm_layout(SMALL_EXPERTS | {"num_experts": 3}, tp=2, dtype=F32, expert_parallel=True)
    with pytest.raises(ValueError, match=r"o_proj\.bias"):
        vllm_layout(SMALL_EXPERTS | {"attention_bias": True}, dtype=F32)
    with pytest.raises(ValueError, match="head_dim is 3, and vLLM's qwen2 has 8 / 4"):
        vllm_layout(SMALL | {"head_dim": 3}, dtype=F32)


def test_mesh_dimensions_must_be_there() -> None:
    for names in ({"fsdp": "data"}, {"tp": "model"}, {"fsdp": "dp", "tp": "dp"}):
        with pytest.raises(ValueError, match=r"name two of this mesh's dimensions \['dp'\]"):
            train_layout(SMALL, Mesh((("dp", 2),)), dtype=F32, **names)


def test_a_70b_is_laid_out_over_512_ranks_in_no_time() -> None:
    start = time.perf_counter()
    trained = train_layout(LLAMA_70B, Mesh((("dp", 512),)), dtype=F32, fsdp="dp")
    served = vllm_layout(LLAMA_70B, tp=8, replicas=64, dtype=torch.bfloat16)
    assert time.perf_counter() - start < 2
    assert sum(spec.nbytes for spec in served.tensors) == 70_553_706_496 * 2  # what Llama 3 70B has
    assert [(spec.name, spec.shape) for spec in trained.tensors] == [(spec.name, spec.shape) for spec in served.tensors]
