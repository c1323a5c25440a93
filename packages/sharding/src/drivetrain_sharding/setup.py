"""Laying a model over devices: FSDP2 and tensor parallelism as a layout has them, and activation checkpointing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain_sharding._tensor_parallel import cuttings, parallelize
from drivetrain_sharding.layout import Layout, Mesh
from drivetrain_sharding.reading import _model, read_layout
from drivetrain_sharding.weights import _entries

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The mesh of a layout over the ranks of this process group, with which all ranks call this together.

    Args:
        mesh: of as many ranks as the process group has.
        device_type: `"cuda"`, `"cpu"`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*mesh.dims, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def shard_model(
    module: Module,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
) -> Module:
    """Lays a module over the ranks of a mesh: tensor parallelism, then FSDP2 on each transformer block and the rest.

    The blocks are the members of the outermost `nn.ModuleList`s. FSDP2 gathers each block's parameters when it runs and
    lets them go afterwards; those outside the blocks (embeddings, norm, head) stay whole from a forward to its backward
    pass. A call to the module itself gathers the latter, so shard the module that is called (a `PolicyModel`, say,
    rather than the transformers model within).

    A layout says it all: a mesh dimension over which every parameter is cut along its first dimension is FSDP2's; one
    over which some are cut is tensor parallel; one over which none is holds copies. Copies and FSDP2 together are
    hybrid sharding. Tensor-parallel ranks are given the same batch, and have the same gradients afterwards. In copies
    that FSDP2 does not manage (a layout with tensor parallelism alone) each has its own gradient: sum them, as
    `drivetrain_learner.Learner` does.

    With fp32 parameters, `param_dtype=torch.bfloat16` makes what mixed precision is: fp32 masters, which the optimizer
    and `read_layout` see, bf16 computation, and sums of gradients in fp32.

    Args:
        module: plain, and equal on all ranks; it is changed in place. Parameters become DTensors, split evenly or not;
            tied parameters stay tied. Nothing is sent.
        mesh: with a layout: a mesh with its dimensions (`device_mesh`). Without: the ranks to shard over with FSDP2,
            one dimension, or two: copies over the first, shards over the second.
        layout: how the module is to lie, with the names that `read_layout` gives it: `train_layout` of its config, or
            one of your own. A module that does nothing but hold a transformers model goes by the model's names.
        param_dtype: what FSDP2 gathers blocks in and computes in; the shards keep their dtype. None: the same.
        reduce_dtype: what gradients are summed over ranks in.
        cpu_offload: whether FSDP2 keeps shards and gradients in host memory, from where it brings each block when it is
            to run; the optimizer then steps on the CPU. On a GPU the process group needs gloo besides
            (`init_process_group("cpu:gloo,cuda:nccl")`) for whatever communicates shards themselves.

    Returns:
        the same module. `read_layout(module, mesh)` is the layout.

    Raises:
        ValueError: the module is sharded already, does not have the layout's tensors, or cannot be laid out like this:
            sizes or heads that tensor-parallel ranks do not divide, modules that cannot be cut, a mesh that is not the
            layout's. It names the parameter, the size and the mend, and the module is as it was.
    """
    if layout is None:
        if mesh.ndim > 2:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions; give (shard,) or (replicate, shard), or a layout")
        _fully_shard(module, mesh, param_dtype, reduce_dtype, cpu_offload)
        return module
    _check(module, mesh, layout)
    roles = _Roles.of(module, layout)
    if roles.fsdp is None and (param_dtype is not None or cpu_offload):
        raise ValueError(
            f"param_dtype={param_dtype} and cpu_offload={cpu_offload} need FSDP2, and this layout has none: shard over "
            "a dimension of the mesh, which may have size 1"
        )
    if roles.tensor_parallel is not None:
        model = _model(module)
        parallelize(model, cuttings(model, layout, roles.tensor_parallel), mesh[roles.tensor_parallel])
    if roles.fsdp is not None:
        over = (roles.fsdp,) if roles.copies is None else (roles.copies, roles.fsdp)
        _fully_shard(module, mesh if len(over) == mesh.ndim else mesh[over], param_dtype, reduce_dtype, cpu_offload)
    _check_result(module, mesh, layout)
    return module


def checkpoint_activations(module: Module, *, every: int = 1) -> Module:
    """Has transformer blocks keep their inputs alone for the backward pass, in which they run forward once more.

    This is `torch.utils.checkpoint` with `use_reentrant=False` around the forward pass of a block: no names change, and
    without gradients nothing does. Call it before or after `shard_model`.

    Args:
        module: its blocks are the members of the outermost `nn.ModuleList`s; they are changed in place.
        every: 1: all blocks, 2: every second one, and so on. The others keep their activations: memory for time.

    Returns:
        the same module.

    Raises:
        ValueError: `every` is less than 1, or the module has no blocks, or fewer than `every`.
        RuntimeError: it was done before.
    """
    blocks = _blocks(module)
    if not 1 <= every <= len(blocks):
        raise ValueError(f"every={every}, and the module has {len(blocks)} blocks in module lists: use 1 up to that")
    if any(_is_checkpointed(block) for block in blocks):
        raise RuntimeError("activations of this module are checkpointed already")
    for block in blocks[every - 1 :: every]:
        setattr(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False))  # noqa: B010
    return module


@dataclass(frozen=True, slots=True)
class _Roles:
    """What each mesh dimension of a layout is for."""

    fsdp: str | None
    tensor_parallel: str | None
    copies: str | None

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> _Roles:
        trained = {name for name, tensor in _entries(_model(module)).items() if isinstance(tensor, nn.Parameter)}
        cuts: dict[str, dict[str, list[int]]] = {over: {} for over, _ in layout.mesh.dims}
        for parameter in layout.parameters:
            for split in (*([parameter.experts] if parameter.experts else []), *parameter.parts[0].splits):
                cuts[split.over].setdefault(parameter.name, []).append(split.dim)
        wide = [over for over, size in layout.mesh.dims if size > 1]
        fsdp = [o for o in wide if cuts[o].keys() == trained and all(dims == [0] for dims in cuts[o].values())]
        some = [over for over in wide if cuts[over] and over not in fsdp]
        none = [over for over in wide if not cuts[over]]
        if max(len(fsdp), len(some), len(none)) > 1:
            raise ValueError(
                f"this layout shards every parameter over {fsdp}, some over {some}, and holds copies over {none}: "
                "training is set up for one mesh dimension of each kind at most; join dimensions to one"
            )
        order = [over for over, _ in layout.mesh.dims]
        # FSDP2 over one rank changes no layout, and it can compute in another dtype and offload.
        alone = [over for over, size in layout.mesh.dims if size == 1]
        roles = cls(next(iter(fsdp or alone), None), next(iter(some), None), next(iter(none), None))
        if roles.fsdp and roles.copies and order.index(roles.copies) > order.index(roles.fsdp):
            if fsdp:
                raise ValueError(
                    f"the mesh has copies ({roles.copies!r}) behind shards ({roles.fsdp!r}): exchange them"
                )
            return replace(roles, fsdp=None)
        return roles


def _check(module: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """The mesh is the layout's, and the module has its tensors and parameters, whole."""
    from torch.distributed.tensor import DTensor

    span = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if span != layout.mesh.dims:
        raise ValueError(f"the mesh has dimensions {span}, the layout {layout.mesh.dims}: make it with device_mesh")
    if sharded := [name for name, tensor in _entries(module).items() if isinstance(tensor, DTensor)]:
        raise ValueError(f"the module is sharded already ({sharded[0]} is a DTensor): use a plain one")
    plain = read_layout(module)
    own, wanted = ({spec.name: spec for spec in each.tensors} for each in (plain, layout))
    problems = [f"{name} is not in the layout" for name in own if name not in wanted]
    problems += [f"{name} is not in the module" for name in wanted if name not in own]
    problems += [
        f"{name} is {own[name].dtype} {own[name].shape}, in the layout {wanted[name].dtype} {wanted[name].shape}"
        for name in own
        if name in wanted and own[name] != wanted[name]
    ]
    problems += [
        f"{other} is tied to {plain.ties.get(other)}, in the layout to {layout.ties.get(other)}"
        for other in sorted(plain.ties.keys() | layout.ties.keys())
        if plain.ties.get(other) != layout.ties.get(other)
    ]
    if not problems and plain.parameter_shapes(0) != _whole(layout).parameter_shapes(0):
        unlike = plain.parameter_shapes(0).items() ^ _whole(layout).parameter_shapes(0).items()
        problems.append(f"its parameters are others: {sorted(name for name, _ in unlike)}")
    if problems:
        raise ValueError(f"the module is not the layout's: {'; '.join(problems)}")


def _whole(layout: Layout) -> Layout:
    """The layout of the same parameters on one rank."""
    parameters = tuple(
        replace(parameter, experts=None, parts=tuple(replace(part, splits=()) for part in parameter.parts))
        for parameter in layout.parameters
    )
    return replace(layout, mesh=Mesh((("rank", 1),)), parameters=parameters)


def _check_result(module: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """The module lies as the layout says: everything that could keep it from that was to be found before."""
    found, rank = read_layout(module, mesh), 0
    for index, size in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
        rank = rank * size + index
    unlike = set(found.pieces(rank)) ^ set(layout.pieces(rank))
    assert not unlike, f"{sorted({piece.parameter for piece in unlike})} do not lie as in the layout"


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # Memory can be pinned for an accelerator alone.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for part in (*_blocks(module), module):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost module lists, in order."""
    found: list[nn.Module] = []
    for child in module.children():
        found.extend(child if isinstance(child, nn.ModuleList) else _blocks(child))
    return found


def _is_checkpointed(block: nn.Module) -> bool:
    forward = block.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is checkpoint
