"""The layout of a module that is there: read from its DTensors.

This needs no knowledge of the model, so that it serves for models whose family `drivetrain_sharding.families` does not
know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from drivetrain_sharding import _experts
from drivetrain_sharding.layout import Layout, Mesh, Parameter, Part, Split, TensorSpec
from drivetrain_sharding.weights import _aliases, _entries, _model_type, _specs, _stacks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def read_layout(module: nn.Module, mesh: DeviceMesh | None = None) -> Layout:
    """How a module's parameters and persistent buffers lie: whole, or sharded by FSDP2, tensor parallelism or both.

    Reading communicates nothing, and every rank reads the same. Rank r of the layout is the r-th of the device mesh.
    Whole tensors have the names that `named_tensors` gives them: without the prefixes of wrappers, of tied tensors the
    first (the others are the layout's ties), and the checkpoint's, `experts.0.gate_proj.weight` and so on, of experts
    that transformers stacks. But for stacks, parameters have the names of their tensors.

    Args:
        module: plain, or sharded. A module that does nothing but hold a transformers model is looked through: names
            are those of the model.
        mesh: the device mesh that the layout is to span. None: the one of the module's DTensors that has most
            dimensions; for a module without DTensors, one rank. Dimensions without names are called `dim0`, `dim1`, ...

    Raises:
        ValueError: DTensors on meshes that are no part of one mesh, or that lie as no layout can say (partial sums,
            a stack of experts cut across the boundary of gate and up). All of them are in one error.
    """
    module = _model(module)
    entries = _entries(module)
    mesh = _whole_mesh(entries, mesh)
    span = _sizes(mesh) if mesh is not None else {"rank": 1}
    stacks = _stacks(module, entries)
    specs: list[TensorSpec] = []
    parameters: list[Parameter] = []
    problems: list[str] = []
    for name, tensor in entries.items():
        try:
            cuts = _cuts(tensor, span)
            parameters.append((_stack if name in stacks else _single)(name, tensor, cuts))
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        specs += _specs(name, tensor, name in stacks)
    if problems:
        raise ValueError(f"this module lies as no layout can say: {'; '.join(problems)}")
    ties = {other: name for other, name in _aliases(module).items() if other != name}
    layout = Layout(mesh=Mesh(tuple(span.items())), tensors=tuple(specs), parameters=tuple(parameters), ties=ties)
    _check(layout, entries, mesh)
    return layout


def local_parameters(module: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of a module, under the names of `read_layout`: detached, sharing the module's memory."""
    from torch.distributed.tensor import DTensor

    held = {name: tensor.detach() for name, tensor in _entries(_model(module)).items()}
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in held.items()}


def _model(module: nn.Module) -> nn.Module:
    """The transformers model that a module does nothing but hold, or the module itself."""
    inner = module
    while _model_type(inner) is None:
        children = list(inner.children())
        if len(children) != 1 or any(True for _ in (*inner.parameters(False), *inner.buffers(False))):
            return module
        inner = children[0]
    return inner


@dataclass(frozen=True, slots=True)
class _Cut:
    """One dimension of a parameter cut over a mesh dimension."""

    over: str
    dim: int
    packed: int
    """How many tensors lie behind one another along `dim`, each cut by itself; 1: it is one tensor."""

    def split(self, dim: int) -> Split:
        return Split(over=self.over, dim=dim)


def _cuts(tensor: Tensor, span: Mapping[str, int]) -> list[_Cut]:
    """How a tensor is cut, in the order in which the cuts are applied.

    DTensors shard along the dimensions of their mesh from left to right, except with a `_StridedShard`: its split
    factor says into how many parts dimensions further to the right have cut the tensor's dimension before (FSDP2 over
    tensor parallelism). What is left of the factor says of how many tensors a packed parameter consists.
    """
    from torch.distributed.tensor import DTensor

    order: list[_Cut] = []
    if not isinstance(tensor, DTensor):
        return order
    names = _names(tensor.device_mesh)
    for name, placement in reversed(list(zip(names, tensor.placements, strict=True))):
        if placement.is_partial():
            raise ValueError(f"{placement} over {name}: it holds sums that are not complete; redistribute it first")
        if placement.is_replicate() or span[name] == 1:
            continue
        dim: int = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        same = [index for index, cut in enumerate(order) if cut.dim == dim]
        before = math.prod(span[order[index].over] for index in same)
        factor = int(getattr(placement, "split_factor", 1))
        if factor == 1:
            order.insert(same[0] if same else len(order), _Cut(name, dim, 1))
        elif factor % before == 0:
            order.append(_Cut(name, dim, factor // before))
        else:
            raise ValueError(f"{placement} over {name}, with {before} parts to the right of it: use FSDP2's sharding")
    return order


def _single(name: str, _: Tensor, cuts: list[_Cut]) -> Parameter:
    """A parameter that is one whole tensor."""
    if any(cut.packed > 1 for cut in cuts):
        raise ValueError("it packs several tensors, which only the experts of known families can be taken apart into")
    return Parameter(name=name, parts=(Part(tensor=name, splits=tuple(cut.split(cut.dim) for cut in cuts)),))


def _stack(name: str, tensor: Tensor, cuts: list[_Cut]) -> Parameter:
    """A parameter of stacked experts: `[experts, outputs, inputs]`; gate and up behind one another as outputs."""
    experts = [cut for cut in cuts if cut.dim == 0]
    if len(experts) > 1:
        raise ValueError(f"experts are cut over {[cut.over for cut in experts]}: use one mesh dimension")
    within = [cut for cut in cuts if cut.dim != 0]
    for cut in within:
        if cut.packed != (len(_experts.projections(name)) if cut.dim == 1 else 1):
            raise ValueError(f"dimension {cut.dim} is cut over {cut.over} across the boundary of gate and up")
    splits = tuple(cut.split(cut.dim - 1) for cut in within)
    parts = tuple(
        Part(tensor=member.tensor, splits=splits, expert=member.expert)
        for member in _experts.members(name, tensor.shape)
    )
    return Parameter(name=name, parts=parts, experts=experts[0].split(0) if experts else None)


def _whole_mesh(entries: Mapping[str, Tensor], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh that all DTensors are on, or on a part of; None: there are none."""
    from torch.distributed.tensor import DTensor

    meshes = {name: tensor.device_mesh for name, tensor in entries.items() if isinstance(tensor, DTensor)}
    if mesh is None:
        if not meshes:
            return None
        mesh = max(meshes.values(), key=lambda each: each.ndim)
    span = _sizes(mesh)
    foreign = {name: sizes for name, each in meshes.items() if not (sizes := _sizes(each)).items() <= span.items()}
    if foreign:
        said = "; ".join(f"{name} on {sizes}" for name, sizes in foreign.items())
        raise ValueError(f"these parameters lie on no part of the mesh {span}: {said}. Pass the mesh that holds all")
    return mesh


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(_names(mesh), mesh.shape, strict=True))


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(mesh.ndim))


def _check(layout: Layout, entries: Mapping[str, Tensor], mesh: DeviceMesh | None) -> None:
    """What the layout says of this rank is what it holds: placements mean what is thought here that they mean."""
    from torch.distributed.tensor import DTensor

    where = mesh.get_coordinate() if mesh is not None else [0]
    if where is None:
        return
    rank = 0
    for index, (_, size) in zip(where, layout.mesh.dims, strict=True):
        rank = rank * size + index
    for name, shape in layout.parameter_shapes(rank).items():
        tensor = entries[name]
        held = tuple((tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape)
        if held != shape:
            raise ValueError(f"{name} lies as no layout can say: rank {rank} holds {held}; a layout has {shape}")
