"""Layouts from a model's config alone: for planning without the model, and without a GPU.

`train_layout` is how a trainer holds a model (FSDP2, tensor parallel, both), `vllm_layout` how vLLM engines hold it.
Both speak of the same whole tensors, those of the model's Hugging Face checkpoint. Families: Llama (SmolLM2 among
them), Mistral, Qwen2 and 2.5, Qwen3, Qwen3-MoE and the text models of Gemma 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from drivetrain_sharding._models import Model
from drivetrain_sharding.layout import Layout, Mesh, Parameter, Part, Split, TensorSpec

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
# Which dimension of its weight a module is cut along, over tensor-parallel ranks: outputs or inputs.
_CUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
_VLLM_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_VLLM_VOCABULARY = 64  # what it is padded to a multiple of


def train_layout(
    config: Any, mesh: Mesh, *, dtype: torch.dtype, fsdp: str | None = None, tp: str | None = None
) -> Layout:
    """How a transformers model lies after tensor parallelism by the family's own plan and then FSDP2.

    Tensor parallelism cuts the projections by outputs or by inputs, and the head, with an embedding that it is tied to.
    FSDP2 then cuts what each rank has left along its first dimension, with shorter or empty parts last. A mesh
    dimension that is named by neither holds copies: with `fsdp`, that is hybrid sharding.

    Args:
        config: a transformers config, or the mapping that its `config.json` holds.
        mesh: the ranks.
        dtype: of every parameter.
        fsdp: the mesh dimension to shard over; None: no sharding.
        tp: the mesh dimension of tensor parallelism; None: none.

    Returns:
        parameters with the names of the transformers module. Of a mixture of experts they are
        `experts.gate_up_proj` `[experts, 2 intermediate, hidden]` and `experts.down_proj`, sharded by expert.

    Raises:
        ValueError: a family that is not known, a mesh dimension that is not there, or sizes that tensor parallelism
            cannot divide.
    """
    model = Model.of(config)
    named = [name for name in (fsdp, tp) if name is not None]
    if len(set(named)) < len(named) or not dict(mesh.dims).keys() >= set(named):
        raise ValueError(
            f"fsdp={fsdp!r}, tp={tp!r}: name two of this mesh's dimensions {[dim for dim, _ in mesh.dims]}"
        )
    if tp is not None:
        _check_division(model, mesh.extent(tp), vocabulary=model.size("vocab_size"))
    shard = (Split(over=fsdp, dim=0),) if fsdp is not None else ()

    def splits(spec: TensorSpec) -> tuple[Split, ...]:
        dim = _cut(spec)
        if _module(spec.name) == "embed_tokens" and (model.tied or model.rules.splits_embedding):
            dim = 0  # a head that is the embedding is cut, and the embedding with it
        parallel = (Split(over=tp, dim=dim),) if tp is not None and dim is not None else ()
        # Stacked experts are sharded by expert.
        return parallel if _EXPERT.match(spec.name) else (*parallel, *shard)

    def place(name: str) -> tuple[str, int | None]:
        if found := _EXPERT.match(name):
            at, expert, projection = found.groups()
            return f"{at}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}", int(expert)
        return name, None

    return _layout(model, mesh, dtype, place, splits, experts=shard[0] if shard else None)


def vllm_layout(
    config: Any, *, tp: int = 1, replicas: int = 1, dtype: torch.dtype, expert_parallel: bool = False
) -> Layout:
    """How vLLM (0.24 and newer) holds a model that is not quantised.

    vLLM fuses projections (`qkv_proj`, `gate_up_proj`, experts as `w13_weight` and `w2_weight`), pads the vocabulary to
    a multiple of 64 and cuts it over ranks; key-value heads that are fewer than ranks are held by neighbours. This is
    what its `load_weights` fills. What some of its kernels then do to it (the CPU's packed matrices, mixtures of
    experts that are shuffled or padded for a backend) is not in the layout: compare names and shapes with the
    engine's before you write into its memory.

    Args:
        config: a transformers config, or the mapping that its `config.json` holds.
        tp: tensor-parallel size of an engine.
        replicas: how many engines hold the model.
        dtype: of every parameter.
        expert_parallel: whether the ranks of an engine share the experts out whole (vLLM's
            `enable_expert_parallel`), rather than cut each.

    Returns:
        a layout over the mesh `(("replica", replicas), ("tp", tp))`.

    Raises:
        ValueError: a family that is not known, or sizes that vLLM cannot divide.
    """
    model, mesh = Model.of(config), Mesh((("replica", replicas), ("tp", tp)))
    if model.family.startswith("qwen3") and model.settings.get("attention_bias"):
        raise ValueError(
            f"attention_bias is set, and vLLM's {model.family} has no o_proj.bias: use a config without it"
        )
    if model.family == "qwen2" and model.heads * model.head_dim != model.hidden:
        raise ValueError(f"head_dim is {model.head_dim}, and vLLM's qwen2 has {model.hidden} / {model.heads}: use that")
    rows = -(-model.size("vocab_size") // _VLLM_VOCABULARY) * _VLLM_VOCABULARY
    _check_division(model, tp, vocabulary=rows, kv_copies=True, expert_parallel=expert_parallel)

    def splits(spec: TensorSpec) -> tuple[Split, ...]:
        module, dim = _module(spec.name), _cut(spec)
        if module in ("embed_tokens", "lm_head"):
            return (Split(over="tp", dim=0, padded=rows),)
        if dim is None or (expert_parallel and _EXPERT.match(spec.name)):
            return ()
        parts = model.kv_heads if module in ("k_proj", "v_proj") and model.kv_heads < tp else None
        return (Split(over="tp", dim=dim, parts=parts),)

    def place(name: str) -> tuple[str, int | None]:
        if found := _EXPERT.match(name):
            at, expert, projection = found.groups()
            return f"{at}.routed_experts.{'w2' if projection == 'down_proj' else 'w13'}_weight", int(expert)
        module = _module(name)
        return name.replace(f".{module}.", f".{_VLLM_FUSED.get(module, module)}."), None

    return _layout(model, mesh, dtype, place, splits, experts=Split(over="tp", dim=0) if expert_parallel else None)


def _layout(
    model: Model,
    mesh: Mesh,
    dtype: torch.dtype,
    place: Callable[[str], tuple[str, int | None]],
    splits: Callable[[TensorSpec], tuple[Split, ...]],
    *,
    experts: Split | None,
) -> Layout:
    """Puts each tensor into the parameter (and expert) that `place` names, cut as `splits` says."""
    tensors = model.tensors(dtype)

    def cuts(split: Split | None) -> bool:
        return split is not None and (mesh.extent(split.over) > 1 or split.padded is not None)

    experts = experts if cuts(experts) else None
    parts: dict[str, list[Part]] = {}
    for spec in tensors:
        parameter, expert = place(spec.name)
        held = tuple(filter(cuts, splits(spec)))
        parts.setdefault(parameter, []).append(Part(tensor=spec.name, splits=held, expert=expert))
    parameters = tuple(
        Parameter(name=name, parts=tuple(fused), experts=experts if fused[0].expert is not None else None)
        for name, fused in parts.items()
    )
    return Layout(mesh=mesh, tensors=tensors, parameters=parameters, ties=model.ties)


def _check_division(
    model: Model, ranks: int, *, vocabulary: int, kv_copies: bool = False, expert_parallel: bool = False
) -> None:
    """Tensor parallelism can cut every size evenly; with `kv_copies`, several ranks may hold one key-value head."""
    sizes = {
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size (padded)" if vocabulary != model.size("vocab_size") else "vocab_size": vocabulary,
    }
    experts = {model.has_experts(layer) for layer in range(model.size("num_hidden_layers"))}
    if False in experts:
        sizes["intermediate_size"] = model.size("intermediate_size")
    if True in experts:
        cut = "num_experts" if expert_parallel else "moe_intermediate_size"
        sizes[cut] = model.size(cut)
    if kv_copies and ranks % model.kv_heads == 0:
        del sizes["num_key_value_heads"]
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % ranks]:
        raise ValueError(f"{ranks} tensor-parallel ranks do not divide {', '.join(wrong)}: use a number that does")


def _module(name: str) -> str:
    """The module that a tensor belongs to, without where it stands: `q_proj`."""
    return name.split(".")[-2]


def _cut(spec: TensorSpec) -> int | None:
    """The dimension that tensor parallelism cuts; none of a bias that is added to a sum over ranks."""
    dim = _CUT.get(_module(spec.name))
    return dim if dim is not None and dim < len(spec.shape) else None
