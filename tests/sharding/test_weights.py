"""Named tensors of plain modules and, on two ranks of gloo, of sharded ones. The ranks run this file as a program."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drivetrain_sharding import (
    ShardedDigest,
    TensorSpec,
    digest,
    load_named_tensors,
    local_parameters,
    manifest,
    named_tensors,
    read_layout,
    shard_model,
)
from drivetrain_sharding._experts import MODEL_TYPES
from gloo_ranks import be_a_rank, run_ranks
from safetensors.torch import load_file
from tiny_models import MODELS, save, tiny_config, tiny_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

WORLD = 2
EXPERTS = "model.layers.0.mlp.experts"


class Tied(nn.Module):
    """An embedding tied to a head, with a block, a persistent and a passing buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return cast(Tensor, self.head(hidden) * self.scale)


NAMES = ["scale", "counts", "embed.weight", "blocks.0.weight", "blocks.0.bias"]


def test_every_tensor_once_in_order() -> None:
    model = Tied()
    tensors = dict(named_tensors(model))
    assert list(tensors) == NAMES
    assert torch.equal(tensors["embed.weight"], model.head.weight)
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_manifest_tells_what_will_come() -> None:
    for dtype in (None, torch.bfloat16):
        specs = manifest(Tied(), dtype=dtype)
        assert specs == tuple(
            TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in named_tensors(Tied(), dtype=dtype)
        )
    assert specs[1].dtype == torch.int64
    assert specs[2] == TensorSpec(name="embed.weight", dtype=torch.bfloat16, shape=(7, 3))


def test_names_do_not_tell_of_wrappers() -> None:
    model = Tied()
    expected = digest(named_tensors(model))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    compiled = torch.compile(model, backend="eager")
    assert digest(named_tensors(cast(nn.Module, compiled))) == expected
    other = Tied(seed=1)
    load_named_tensors(other, named_tensors(cast(nn.Module, compiled)))
    assert digest(named_tensors(other)) == expected
    load_named_tensors(cast(nn.Module, compiled), named_tensors(other))


def test_loading_makes_the_models_equal_and_keeps_the_tie() -> None:
    source, target = Tied(seed=0), Tied(seed=1)
    ids = torch.tensor([0, 6, 3])
    for step in range(3):
        with torch.no_grad():
            source.embed.weight.add_(step)
        load_named_tensors(target, named_tensors(source))
        assert torch.equal(target(ids), source(ids))
        assert target.head.weight is target.embed.weight
    assert target.embed.weight.requires_grad


def test_a_tied_tensor_may_come_under_any_of_its_names() -> None:
    source, target = Tied(seed=0), Tied(seed=1)
    tensors = dict(named_tensors(source))
    both = tensors | {"head.weight": tensors["embed.weight"].clone()}
    load_named_tensors(target, both)
    assert torch.equal(target.embed.weight, source.embed.weight)
    alone = dict(both)
    del alone["embed.weight"]
    target = Tied(seed=1)
    load_named_tensors(target, alone)
    assert torch.equal(target.embed.weight, source.embed.weight)
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(ValueError, match=r"head\.weight differs from embed\.weight, to which it is tied"):
        load_named_tensors(target, both)


def test_one_error_with_all_that_does_not_fit_and_nothing_changed() -> None:
    target = Tied(seed=1)
    before = digest(named_tensors(target))
    tensors = dict(named_tensors(Tied(seed=0)))
    del tensors["blocks.0.bias"]
    tensors["blocks.0.weight"] = torch.zeros(3, 4)
    tensors["base_layer.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="do not fit") as error:
        load_named_tensors(target, tensors)
    for problem in ("unknown base_layer.weight", "missing blocks.0.bias", "blocks.0.weight is (3, 4), here (3, 3)"):
        assert problem in str(error.value)
    with pytest.raises(ValueError, match="scale came twice"):
        load_named_tensors(target, [*named_tensors(target), ("scale", torch.ones(1))])
    assert digest(named_tensors(target)) == before


def test_values_are_cast_to_what_the_module_holds() -> None:
    source, target = Tied(seed=0).bfloat16(), Tied(seed=1)
    load_named_tensors(target, named_tensors(source))
    assert target.embed.weight.dtype == torch.float32
    assert torch.equal(target.embed.weight, source.embed.weight.float())
    assert digest(named_tensors(target, dtype=torch.bfloat16)) == digest(named_tensors(source))


def test_digest_follows_training() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = digest(named_tensors(model))
    for lr, same in ((0.0, True), (1e-3, False)):
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert (digest(named_tensors(model)) == before) == same


@pytest.mark.parametrize("name", MODELS)
def test_names_and_values_are_the_checkpoints(name: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(named_tensors(model))
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    assert {spec.name: spec.shape for spec in manifest(model)} == {key: tuple(t.shape) for key, t in saved.items()}
    layout = read_layout(model)
    assert tuple(spec.name for spec in layout.tensors) == tuple(found)
    hashes = ShardedDigest(layout).hashes(0, local_parameters(model))
    assert ShardedDigest(layout).combine({0: hashes}).hex == digest(named_tensors(model)) == digest(saved)
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    load_named_tensors(other, saved)
    assert digest(named_tensors(other)) == digest(named_tensors(model, dtype=torch.bfloat16))


def test_stacked_experts_are_taken_apart_without_copies() -> None:
    model = tiny_model(tiny_config("qwen3 moe"))
    held = model.model.layers[0].mlp.experts
    memory = {stack.untyped_storage().data_ptr() for stack in (held.gate_up_proj, held.down_proj)}
    found = {name: tensor for name, tensor in named_tensors(model) if name.startswith(EXPERTS)}
    assert len(found) == 9
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} == memory
    assert torch.equal(found[f"{EXPERTS}.2.up_proj.weight"], held.gate_up_proj[2, 26:])


def test_experts_that_do_not_fit_are_named_and_nothing_changes() -> None:
    model = tiny_model(tiny_config("qwen3 moe"))
    before = digest(named_tensors(model))
    tensors = {name: tensor + 1 for name, tensor in named_tensors(model)}
    del tensors[f"{EXPERTS}.1.gate_proj.weight"]
    tensors[f"{EXPERTS}.2.down_proj.weight"] = torch.zeros(36, 27)
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.zeros(3, 36, 52)
    with pytest.raises(ValueError, match="do not fit") as error:
        load_named_tensors(model, tensors)
    for problem in (
        f"unknown {EXPERTS}.gate_up_proj",
        f"missing {EXPERTS}.1.gate_proj.weight",
        f"{EXPERTS}.2.down_proj.weight is (36, 27), here (36, 26)",
    ):
        assert problem in str(error.value)
    assert digest(named_tensors(model)) == before


def test_a_stack_may_come_under_its_parameters_name() -> None:
    source, target = (tiny_model(tiny_config("qwen3 moe")) for _ in range(2))
    state = {name: tensor + 1 for name, tensor in source.state_dict().items()}
    load_named_tensors(target, state)
    assert digest(target.state_dict()) == digest(state)
    assert f"{EXPERTS}.gate_up_proj" in state
    name = f"{EXPERTS}.2.up_proj.weight"
    with pytest.raises(ValueError, match=r"2\.up_proj\.weight came twice"):
        load_named_tensors(target, state | {name: dict(named_tensors(source))[name]})


def test_experts_are_found_where_a_model_is() -> None:
    model = tiny_model(tiny_config("qwen3 moe"))
    names = [name for name, _ in named_tensors(model)]
    two = nn.ModuleDict({"policy": model, "value": nn.Linear(36, 1)})
    assert [name for name, _ in named_tensors(two)][:-2] == [f"policy.{name}" for name in names]
    compiled = torch.compile(model, backend="eager")
    assert [name for name, _ in named_tensors(cast(nn.Module, compiled))] == names
    bare = nn.ModuleDict({"experts": nn.ParameterDict({"gate_up_proj": torch.zeros(3, 4, 2)})})
    assert list(dict(named_tensors(bare))) == ["experts.gate_up_proj"]


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_which_families_stack_experts_is_as_transformers_has_it(model_type: str) -> None:
    sources = {s for each in get_checkpoint_conversion_mapping(model_type) or () for s in each.source_patterns}
    assert {f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down")} <= sources


def test_another_family_with_experts(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "olmoe", vocab_size=32, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    assert digest(named_tensors(model)) == digest(load_file(tmp_path / "model.safetensors"))


def look(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}
    for name in MODELS:
        saved = load_file(f"{folder}/{name}/model.safetensors")
        model = shard_model(tiny_model(tiny_config(name)), mesh)
        layout = read_layout(model)
        hashes: list[Any] = [None] * WORLD
        torch.distributed.all_gather_object(
            hashes, ShardedDigest(layout).hashes(mesh.get_rank(), local_parameters(model))
        )
        same = all(torch.equal(tensor, saved[key]) for key, tensor in named_tensors(model))
        digests = {
            ShardedDigest(layout).combine(dict(enumerate(cast(list[Any], hashes)))).hex,
            digest(named_tensors(model)),
            digest(saved),
        }
        load_named_tensors(model, {key: tensor + 1 for key, tensor in saved.items()})
        loaded = digest(named_tensors(model)) == digest({key: tensor + 1 for key, tensor in saved.items()})
        found[name] = {"same": same, "digests": len(digests), "loaded": loaded}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for name in MODELS:
        save(tiny_config(name), folder / name)
    return run_ranks(__file__, folder, world=WORLD)


@pytest.mark.parametrize("name", MODELS)
def test_sharded_models_give_and_take_what_checkpoints_hold(found: list[dict[str, Any]], name: str) -> None:
    assert [rank[name] for rank in found] == [{"same": True, "digests": 1, "loaded": True}] * WORLD


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], lambda: look(sys.argv[2]), world=WORLD)
