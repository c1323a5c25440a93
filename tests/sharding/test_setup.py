"""Four ranks on gloo, and one process. This file is also the program that each rank runs."""

import copy
import dataclasses
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from drivetrain_sharding import (
    Layout,
    Mesh,
    Split,
    checkpoint_activations,
    device_mesh,
    digest,
    manifest,
    named_tensors,
    read_layout,
    shard_model,
    train_layout,
    vllm_layout,
)
from gloo_ranks import be_a_rank, run_ranks
from tiny_models import MODELS, tiny_config, tiny_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

WORLD = 4
TWO = Mesh((("dp", 2), ("tp", 2)))
SETUPS: dict[str, tuple[Mesh, dict[str, str]]] = {
    "fsdp": (Mesh((("dp", 4),)), {"fsdp": "dp"}),
    "hsdp": (Mesh((("replica", 2), ("dp", 2))), {"fsdp": "dp"}),
    "tp": (TWO, {"tp": "tp"}),
    "fsdp and tp": (TWO, {"fsdp": "dp", "tp": "tp"}),
    "tp and copies": (Mesh((("replica", 2), ("dp", 1), ("tp", 2))), {"tp": "tp"}),
}
# Every family with both, the plainer ways with some.
CASES = [(name, "fsdp and tp") for name in MODELS]
CASES += [(name, setup) for name in ("qwen2 tied", "qwen3 moe") for setup in SETUPS if setup != "fsdp and tp"]


def model_of(name: str, **settings: Any) -> Any:
    config = tiny_config(name, **settings)
    config._experts_implementation = "eager"  # grouped products want sizes that are multiples of 16 bytes
    model = tiny_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def full(tensor: Tensor) -> Tensor:
    module = nn.Module()
    module.register_buffer("tensor", tensor)
    return dict(named_tensors(module))["tensor"]


def loss_of(model: Any) -> Tensor:
    ids = torch.randint(0, 130, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids.to(next(model.parameters()).device)).logits.float()
    return -torch.log_softmax(logits, -1).gather(-1, ids.to(logits.device)[..., None]).mean()


def gradients_of(model: Any) -> dict[str, Tensor]:
    loss_of(model).backward()
    return {name: full(parameter.grad).cpu() for name, parameter in model.named_parameters()}


def furthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of two gradients, relative to the parameter's largest element."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted)


def look_at_families() -> dict[str, Any]:
    found = {}
    for name, setup in CASES:
        mesh, dims = SETUPS[setup]
        model = model_of(name)
        plain = copy.deepcopy(model)
        layout = train_layout(model.config, mesh, dtype=torch.float32, **dims)
        ranks = device_mesh(mesh, "cpu")
        shard_model(model, ranks, layout)
        with torch.no_grad():
            without = loss_of(model).item()
        found[f"{name}, {setup}"] = {
            "layout": read_layout(model, ranks) == layout,
            "names": manifest(model) == manifest(plain),
            "digest": digest(named_tensors(model)) == digest(named_tensors(plain)),
            "loss": without - loss_of(plain).item(),
            "gradients": furthest(gradients_of(model), gradients_of(plain)),
        }
    return found


def look_at_options() -> dict[str, Any]:
    """Mixed precision, offload and activation checkpointing, with FSDP2 and tensor parallelism."""
    mesh, dims = SETUPS["fsdp and tp"]
    ranks = device_mesh(mesh, "cpu")
    plain = model_of("qwen3")
    layout = train_layout(plain.config, mesh, dtype=torch.float32, **dims)
    wanted = gradients_of(copy.deepcopy(plain))

    def gradients(**settings: Any) -> tuple[Any, dict[str, Tensor]]:
        model = shard_model(copy.deepcopy(plain), ranks, layout, **settings)
        return model, gradients_of(model)

    before = checkpoint_activations(copy.deepcopy(plain))
    shard_model(before, ranks, layout)
    after = checkpoint_activations(shard_model(copy.deepcopy(plain), ranks, layout), every=2)
    _, whole = gradients()
    mixed, rounded = gradients(param_dtype=torch.bfloat16)
    computed = []
    mixed.model.layers[0].register_forward_hook(lambda *seen: computed.append(str(seen[-1].dtype)))
    with torch.no_grad():
        loss_of(mixed)
    offloaded, same = gradients(cpu_offload=True)
    weight = mixed.model.layers[0].mlp.up_proj.weight
    return {
        "mixed": [*computed, str(weight.dtype), str(weight.grad.dtype)],
        "rounded": furthest(rounded, wanted),
        "layouts": [read_layout(model, ranks) == layout for model in (mixed, before, after, offloaded)],
        "names": [name for name, _ in after.named_parameters()] == [name for name, _ in plain.named_parameters()],
        "checkpointed": [furthest(gradients_of(model), whole) for model in (before, after)],
        "offloaded": furthest(same, whole),
    }


def cut(model: Any, mesh: Mesh, **dims: int) -> Layout:
    """A layout that cuts some modules, with all of their parameters, over `tp`."""
    layout = read_layout(model)

    def splits(name: str) -> tuple[Split, ...]:
        module = name.split(".")[-2]
        along = min(dims[module], len(layout.spec(name).shape) - 1) if module in dims else None
        return (Split(over="tp", dim=along),) if along is not None else ()

    parameters = tuple(
        dataclasses.replace(
            parameter, parts=tuple(dataclasses.replace(part, splits=splits(part.tensor)) for part in parameter.parts)
        )
        for parameter in layout.parameters
    )
    return dataclasses.replace(layout, mesh=mesh, parameters=parameters)


def look_at_errors() -> dict[str, Any]:
    four, hsdp = Mesh((("dp", 1), ("tp", 4))), SETUPS["hsdp"][0]
    qwen = model_of("qwen3")
    on = {"dtype": torch.float32}
    both = train_layout(qwen.config, TWO, fsdp="dp", tp="tp", **on)
    attention = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    found: dict[str, Any] = {}

    def said(case: str, layout: Layout, model: Any = qwen, mesh: Mesh | None = None, **settings: Any) -> None:
        before = digest(named_tensors(model))
        try:
            shard_model(model, device_mesh(mesh or layout.mesh, "cpu"), layout, **settings)
            found[case] = "nothing"
        except ValueError as error:
            found[case] = str(error)
        whole = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        found[f"{case}: as it was"] = whole and digest(named_tensors(model)) == before

    said("heads", cut(qwen, four, **attention))
    said("sizes", cut(qwen, four, gate_proj=0, up_proj=0, down_proj=1))
    said("bias", cut(biased := model_of("llama with biases"), TWO, down_proj=1), biased)
    said("norm", cut(qwen, TWO, input_layernorm=0))
    said("vllm", vllm_layout(qwen.config, tp=2, replicas=2, **on))
    said("padded", dataclasses.replace(both, parameters=padded(both)))
    said("mesh", both, mesh=hsdp)
    said("others", train_layout(tiny_config("qwen3", num_hidden_layers=1), TWO, fsdp="dp", **on))
    said("shapes", train_layout(tiny_config("qwen3", vocab_size=132), TWO, fsdp="dp", **on))
    said("dtype", train_layout(qwen.config, TWO, fsdp="dp", dtype=torch.bfloat16))
    said("ties", train_layout(tiny_config("qwen3", tie_word_embeddings=False), TWO, fsdp="dp", **on))
    said("no fsdp", train_layout(qwen.config, TWO, tp="tp", **on), param_dtype=torch.bfloat16)
    said("order", train_layout(qwen.config, Mesh((("dp", 2), ("replica", 2))), fsdp="dp", **on))
    said("many", train_layout(qwen.config, Mesh((("a", 2), ("b", 2), ("dp", 1))), fsdp="dp", **on))
    between = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    layout = cut(between, TWO, **{"0": 0, "2": 1})
    said("between", layout, between)
    sharded = shard_model(copy.deepcopy(qwen), device_mesh(TWO, "cpu"), both)
    try:
        shard_model(sharded, device_mesh(TWO, "cpu"), both)
    except ValueError as error:
        found["twice"] = str(error)
    return found


def padded(layout: Layout) -> tuple[Any, ...]:
    """The parameters, with the embedding padded before it is cut."""
    first = layout.parameters[0]
    splits = (Split(over="tp", dim=0, padded=256), *first.parts[0].splits[1:])
    part = dataclasses.replace(first.parts[0], splits=splits)
    return dataclasses.replace(first, parts=(part,)), *layout.parameters[1:]


def look() -> dict[str, Any]:
    # Our logits are a view, on which whoever changes them in place would lose a hook of FSDP2.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    return {"families": look_at_families(), "options": look_at_options(), "errors": look_at_errors()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


@pytest.mark.parametrize(("name", "setup"), CASES)
def test_a_model_is_laid_out_as_asked_and_computes_the_same(found: list[dict[str, Any]], name: str, setup: str) -> None:
    for rank in found:
        case = rank["families"][f"{name}, {setup}"]
        assert (case["layout"], case["names"], case["digest"]) == (True, True, True)
        assert case["loss"] == pytest.approx(0, abs=1e-5)
        assert case["gradients"] < 1e-5
    # What is not split has the same gradient on all ranks, to the last bit, or ranks would drift apart.
    assert len({rank["families"][f"{name}, {setup}"]["gradients"] for rank in found}) == 1


def test_mixed_precision_offload_and_checkpointing_go_with_a_layout(found: list[dict[str, Any]]) -> None:
    for rank in found:
        options = rank["options"]
        assert options["mixed"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        assert 1e-4 < options["rounded"] < 0.2
        assert options["layouts"] == [True] * 4
        assert options["names"]
        assert options["checkpointed"] == [0, 0]
        assert options["offloaded"] == 0


@pytest.mark.parametrize(
    ("case", "says"),
    {
        "heads": "model.layers.0.self_attn.k_proj: it has 2 heads of 10: use a number of ranks that divides the heads",
        "sizes": "model.layers.0.mlp.up_proj.weight has 90 in dimension 0: use a number of ranks that divides it",
        "bias": "model.layers.0.mlp.down_proj: a Linear cannot be cut as {'weight': [1], 'bias': [0]}",
        "norm": "model.layers.0.input_layernorm: a Qwen3RMSNorm cannot be cut as {'weight': [0]}",
        "vllm": "its parameters are others: ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.gate_up_proj",
        "padded": "model.embed_tokens.weight is padded, or held by neighbours",
        "mesh": "the mesh has dimensions (('replica', 2), ('dp', 2)), the layout (('dp', 2), ('tp', 2))",
        "others": "model.layers.1.self_attn.q_proj.weight is not in the layout",
        "shapes": "model.embed_tokens.weight is torch.float32 (130, 36), in the layout torch.float32 (132, 36)",
        "dtype": "model.norm.weight is torch.float32 (36,), in the layout torch.bfloat16 (36,)",
        "ties": "lm_head.weight is tied to model.embed_tokens.weight, in the layout to None",
        "no fsdp": "param_dtype=torch.bfloat16 and cpu_offload=False need FSDP2, and this layout has none",
        "order": "the mesh has copies ('replica') behind shards ('dp'): exchange them",
        "many": "holds copies over ['a', 'b']",
        "between": "1: a LayerNorm stands between layers that are cut",
    }.items(),
)
def test_what_cannot_be_set_up_is_refused_before_anything_changes(
    found: list[dict[str, Any]], case: str, says: str
) -> None:
    for rank in found:
        assert says in rank["errors"][case]
        assert rank["errors"][f"{case}: as it was"]


def test_a_module_is_sharded_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "model.embed_tokens.weight is a DTensor" in rank["errors"]["twice"]


def saved_bytes(model: Any) -> int:
    """What a forward pass keeps for the backward pass, besides parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)  # alive until all is counted
    del loss
    return sum(held.values())


def test_checkpointing_keeps_inputs_of_blocks_alone() -> None:
    block_input = 2 * 9 * 36 * 4  # fp32 [2, 9, 36]
    plain = model_of("llama", num_hidden_layers=8)
    bare = saved_bytes(model_of("llama", num_hidden_layers=0))
    each = (saved_bytes(plain) - bare) / 8
    every = saved_bytes(checkpoint_activations(copy.deepcopy(plain)))
    second = saved_bytes(checkpoint_activations(copy.deepcopy(plain), every=2))
    assert each > 15 * block_input
    assert every == pytest.approx(bare + 8 * block_input, abs=2 * block_input)
    assert second == pytest.approx(bare + 4 * block_input + 4 * each, rel=0.05)


def test_checkpointing_changes_neither_names_nor_gradients() -> None:
    plain = model_of("gemma3")
    checkpointed = checkpoint_activations(copy.deepcopy(plain))
    assert manifest(checkpointed) == manifest(plain)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    runs: list[bool] = []
    checkpointed.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(True))
    assert furthest(gradients_of(checkpointed), gradients_of(plain)) == 0
    assert len(runs) == 2
    # A copy checkpoints its own blocks, and not those of the module that it was copied from.
    other = copy.deepcopy(checkpointed)
    other.zero_grad()
    checkpointed.zero_grad()
    gradients_of(other)
    assert checkpointed.model.layers[0].mlp.up_proj.weight.grad is None


@pytest.mark.parametrize("every", [0, 3])
def test_blocks_that_are_not_there_cannot_be_checkpointed(every: int) -> None:
    with pytest.raises(ValueError, match=f"every={every}, and the module has 2 blocks"):
        checkpoint_activations(model_of("llama"), every=every)


def test_a_module_is_checkpointed_once() -> None:
    model = checkpoint_activations(model_of("llama"), every=2)
    with pytest.raises(RuntimeError, match="checkpointed already"):
        checkpoint_activations(model)


@pytest.mark.gpu
def test_checkpointing_lowers_the_peak_of_the_gpu() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 64}
    plain = model_of("llama", **sizes, max_position_embeddings=4096).cuda()
    ids = torch.zeros(4, 2048, dtype=torch.int64, device="cuda")

    def peak(model: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, use_cache=False).logits.mean().backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    peak(plain)  # warm
    none = peak(plain)
    every = peak(checkpoint_activations(copy.deepcopy(plain)))
    second = peak(checkpoint_activations(copy.deepcopy(plain), every=2))
    assert every < 0.35 * none
    assert every < second < 0.7 * none


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
