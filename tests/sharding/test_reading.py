"""Four ranks on gloo. This file is also the program that each rank runs; it leaves what it found as JSON."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain_sharding import Mesh, Split, local_parameters, read_layout, train_layout
from gloo_ranks import be_a_rank, run_ranks
from layouts import wrong_pieces
from tiny_models import MODELS, save, tiny_config, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

WORLD = 4
MESHES = {
    "fsdp": Mesh((("dp", 4),)),
    "hsdp": Mesh((("replica", 2), ("dp", 2))),
    "tp": Mesh((("dp", 2), ("tp", 2))),
    "fsdp and tp": Mesh((("dp", 2), ("tp", 2))),
}
# How each model is laid out: every family with both, the plainer ways with some.
SETUPS = [(name, "fsdp and tp") for name in MODELS]
SETUPS += [(name, setup) for name in ("qwen2 tied", "qwen3 moe") for setup in ("fsdp", "hsdp", "tp")]
# Other ways of lying over `dp` and `tp`.
PLACEMENTS = {
    "rows, then rows": (Shard(0), Shard(0)),
    "rows as FSDP2 leaves them": (_StridedShard(0, split_factor=2), Shard(0)),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "columns alone": (Replicate(), Shard(-1)),
    "rows alone": (Shard(0), Replicate()),
    "copies": (Replicate(), Replicate()),
}


def device_mesh(mesh: Mesh) -> DeviceMesh:
    names, sizes = zip(*mesh.dims, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def lay_out(model: Any, mesh: DeviceMesh, fsdp: str | None, tp: str | None) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if tp is not None:
        apply_tensor_parallelism(model, mesh[tp])
        model.tie_weights()
    if fsdp is not None:
        over = mesh[fsdp] if tp is not None else mesh
        for block in model.model.layers:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)


def lies_well(module: nn.Module, mesh: DeviceMesh, whole: dict[str, Tensor]) -> list[str]:
    return wrong_pieces(read_layout(module, mesh), torch.distributed.get_rank(), local_parameters(module), whole)


def look_at_families(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    found = {}
    for name, setup in SETUPS:
        mesh, at = MESHES[setup], f"{folder}/{name}"
        fsdp, tp = "dp" if setup != "tp" else None, "tp" if "tp" in setup.split() else None
        model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
        ranks = device_mesh(mesh)
        lay_out(model, ranks, fsdp, tp)
        found[f"{name}, {setup}"] = {
            "as planned": read_layout(model, ranks)
            == train_layout(model.config, mesh, dtype=torch.float32, fsdp=fsdp, tp=tp),
            "wrong": lies_well(model, ranks, load_file(f"{at}/model.safetensors")),
        }
    return found


def look_at_placements(mesh: DeviceMesh) -> dict[str, Any]:
    found = {}
    for name, placements in PLACEMENTS.items():
        # An even tensor for the strided shards: FSDP2 cuts what is left, distribute_tensor the whole.
        shape = (8, 5) if "FSDP2" in name else (7, 5)
        module = nn.Module()
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        module.weight = nn.Parameter(distribute_tensor(whole, mesh, placements))
        module.register_buffer("offset", torch.arange(3))
        found[name] = lies_well(module, mesh, {"weight": whole, "offset": torch.arange(3)})
    return found


def look_at_wrappers(mesh: DeviceMesh) -> dict[str, Any]:
    """Uneven FSDP2 over all ranks of one dimension, with names of wrappers, a tie and another sharded dimension."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(3)
    module = nn.Module()
    module.block = checkpoint_wrapper(nn.Linear(5, 3))
    module.head = nn.Linear(5, 2, bias=False)
    module.same = module.head
    module.wide = nn.Linear(8, 3, bias=False)
    whole = {
        "block.weight": module.block.weight.detach().clone(),
        "block.bias": module.block.bias.detach().clone(),
        "head.weight": module.head.weight.detach().clone(),
        "wide.weight": module.wide.weight.detach().clone(),
    }
    fully_shard(
        module, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1) if parameter is module.wide.weight else None
    )
    layout = read_layout(module)
    return {
        "ties": dict(layout.ties),
        "mesh": layout.mesh.dims,
        "rows": [layout.parameter_shapes(rank).get("head.weight") for rank in range(WORLD)],
        "wide": layout.parameters[-1].parts[0].splits == (Split(over="dp", dim=1),),
        "wrong": lies_well(module, mesh, whole),
    }


def look_at_a_holder(mesh: DeviceMesh) -> dict[str, Any]:
    """FSDP2 on a module around the model; its parameters are whole after a forward pass."""

    class Holder(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids).logits  # type: ignore[no-any-return]

    config = tiny_config("qwen2 tied")
    holder = Holder(tiny_model(config))
    whole = {name: value.detach().clone() for name, value in holder.model.named_parameters()}
    fully_shard(holder, mesh=mesh)
    with torch.no_grad():
        holder(torch.tensor([[1, 2, 3]]))
    return {
        "as planned": read_layout(holder) == train_layout(config, MESHES["fsdp"], dtype=torch.float32, fsdp="dp"),
        "wrong": lies_well(holder, mesh, whole),
    }


def look_at_errors(mesh: DeviceMesh) -> dict[str, str]:
    def said(name: str, tensor: Tensor, placements: Any, *, config: Any = None, over: DeviceMesh = mesh) -> str:
        at, _, last = name.rpartition(".")
        module = nn.Module()
        module.config = config
        inner = module
        for part in at.split("."):
            inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, nn.Parameter(distribute_tensor(tensor, mesh, placements)))
        try:
            return str(read_layout(module, over))
        except ValueError as error:
            return str(error)

    stack, moe = torch.zeros(4, 8, 6), SimpleNamespace(model_type="qwen3_moe")
    packed = (Replicate(), _StridedShard(1, split_factor=2))
    return {
        "partial": said("mlp.weight", torch.zeros(4, 4), (Replicate(), Partial())),
        "packed": said("mlp.weight", torch.zeros(4, 8), packed),
        "across": said("mlp.experts.gate_up_proj", stack, (Replicate(), Shard(1)), config=moe),
        "twice": said("mlp.experts.gate_up_proj", stack, (Shard(0), Shard(0)), config=moe),
        "foreign": said("mlp.weight", torch.zeros(4, 4), (Shard(0), Replicate()), over=device_mesh(MESHES["hsdp"])),
        # Of a family that is not known a stack is one tensor, whatever its name.
        "unknown": said("mlp.experts.gate_up_proj", stack, (Shard(0), Replicate()), config=None),
    }


def look() -> dict[str, Any]:
    mesh = device_mesh(MESHES["tp"])
    return {
        "families": look_at_families(sys.argv[2]),
        "placements": look_at_placements(mesh),
        "wrappers": look_at_wrappers(device_mesh(MESHES["fsdp"])),
        "holder": look_at_a_holder(device_mesh(MESHES["fsdp"])),
        "errors": look_at_errors(mesh),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for name in MODELS:
        save(tiny_config(name), Path(folder, name))
    return run_ranks(__file__, folder, world=WORLD)


@pytest.mark.parametrize(("name", "setup"), SETUPS)
def test_what_is_read_is_what_was_planned_and_holds_the_checkpoint(
    found: list[dict[str, Any]], name: str, setup: str
) -> None:
    for rank in found:
        assert rank["families"][f"{name}, {setup}"] == {"as planned": True, "wrong": []}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_are_read_as_they_lie(found: list[dict[str, Any]], name: str) -> None:
    assert [rank["placements"][name] for rank in found] == [[]] * WORLD


def test_uneven_shards_ties_and_wrappers(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["wrappers"] == {
            "ties": {"same.weight": "head.weight"},
            "mesh": [["dp", 4]],
            "rows": [[1, 5], [1, 5], [0, 5], [0, 5]],
            "wide": True,
            "wrong": [],
        }


def test_a_module_around_the_model_is_looked_through(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["holder"] == {"as planned": True, "wrong": []}


def test_what_no_layout_can_say_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["errors"]
        assert "over tp: it holds sums that are not complete" in said["partial"]
        assert "mlp.weight: it packs several tensors" in said["packed"]
        assert "dimension 1 is cut over tp across the boundary of gate and up" in said["across"]
        assert "experts are cut over ['dp', 'tp']: use one mesh dimension" in said["twice"]
        assert "no part of the mesh {'replica': 2, 'dp': 2}: mlp.weight on {'dp': 2, 'tp': 2}" in said["foreign"]
        assert said["unknown"].count("mlp.experts.gate_up_proj") >= 2


def test_a_module_without_dtensors_lies_on_one_rank() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = read_layout(module)
    assert layout.mesh.size == 1
    assert layout.parameter_shapes(0)["0.weight"] == (3, 2)
    assert layout.spec("1.num_batches_tracked").dtype == torch.int64
    whole = dict(module.state_dict())
    assert wrong_pieces(layout, 0, local_parameters(module), whole) == []
    assert local_parameters(module)["0.weight"].data_ptr() == module[0].weight.data_ptr()


def test_experts_are_taken_apart_only_with_their_config() -> None:
    config = tiny_config("qwen3 moe")
    model = tiny_model(config)
    stack = "model.layers.0.mlp.experts"
    assert read_layout(model) == train_layout(config, Mesh((("rank", 1),)), dtype=torch.float32)
    assert read_layout(model.model).spec("layers.0.mlp.experts.2.up_proj.weight").shape == (26, 36)
    assert read_layout(nn.Sequential(model)) == read_layout(model)
    two = nn.ModuleDict({"policy": model, "value": nn.Linear(36, 1)})
    assert read_layout(two).spec(f"policy.{stack}.2.up_proj.weight").shape == (26, 36)
    bare = nn.Module()
    bare.experts = nn.ParameterDict({"gate_up_proj": torch.zeros(3, 4, 2)})
    assert read_layout(bare).spec("experts.gate_up_proj").shape == (3, 4, 2)


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
