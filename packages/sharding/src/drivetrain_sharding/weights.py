"""A model's weights as a stream of named, whole tensors, however the model is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_sharding import _experts
from drivetrain_sharding.layout import TensorSpec

# Parts of a parameter's name that torch.compile and activation checkpointing put there.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def named_tensors(module: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter and persistent buffer with its name, whole, one at a time.

    The names are those of the plain module: prefixes of wrappers are left out. Tied tensors come once, under the first
    of their names. The order is that of the module's `state_dict`. The experts that transformers stacks in
    `experts.gate_up_proj` and `experts.down_proj` come one by one, as in the model's checkpoint:
    `experts.0.gate_proj.weight`, `experts.0.up_proj.weight` and so on. (Of a module that wraps a model in a way of its
    own, names begin with where the model is: call this with the model.)

    For a sharded module this is a collective: every rank iterates to the end, in step with the others. Then each
    parameter is whole for as long as the caller holds a tensor of it; at most one is whole at a time.

    Args:
        module: plain, or sharded by FSDP2 or as DTensors.
        dtype: what floating-point tensors are cast to, each once; None leaves them as they are.

    Yields:
        name and tensor, detached, on the module's device. A tensor of a plain module shares its memory when no cast was
        needed, and experts of one stack share that of the stack.
    """
    entries = _entries(module)
    stacks = _stacks(module, entries)
    for name, tensor in entries.items():
        whole = _whole(tensor.detach())
        whole = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
        yield from _apart(name, whole) if name in stacks else ((name, whole),)


def manifest(module: nn.Module, *, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
    """What `named_tensors` would yield, without moving any data."""
    entries = _entries(module)
    stacks = _stacks(module, entries)
    specs = [spec for name, tensor in entries.items() for spec in _specs(name, tensor, name in stacks)]
    return tuple(
        replace(spec, dtype=dtype) if dtype is not None and spec.dtype.is_floating_point else spec for spec in specs
    )


def load_named_tensors(module: nn.Module, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
    """Copies whole named tensors into a module, plain or sharded; every rank brings all of them.

    Names are those of `named_tensors`. All are checked before anything is changed. Values are cast to the module's
    dtypes. A tied tensor may come under any of its names, or under several if the values are equal; stacked experts may
    come as a stack, under the parameter's name.

    Raises:
        ValueError: names that the module does not have, or that are missing, given twice, or of another shape: one
            error with all of them. The module is as it was.
    """
    entries = _entries(module)
    stacks = _stacks(module, entries)
    given, problems = _collect(tensors, {name: entries[name].shape for name in stacks})
    known = _known(module)
    values: dict[str, Tensor] = {}
    for name, value in given.items():
        spec = known.get(name)
        if spec is None:
            problems.append(f"unknown {name}")
        elif tuple(value.shape) != spec.shape:
            problems.append(f"{name} is {tuple(value.shape)}, here {spec.shape}")
        elif spec.name in values and not torch.equal(values[spec.name], value):
            problems.append(f"{name} differs from {spec.name}, to which it is tied")
        else:
            values[spec.name] = value
    arrived = {known[name].name for name in given if name in known}
    problems += [f"missing {name}" for name in dict.fromkeys(s.name for s in known.values()) if name not in arrived]
    if problems:
        raise ValueError(f"the tensors do not fit the module: {'; '.join(problems)}")
    for name, target in entries.items():
        if name in stacks:
            _assign_stack(name, target, values)
        else:
            _assign(target, values[name])


def _assign_stack(name: str, target: Tensor, values: Mapping[str, Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    # A plain stack is filled in place; of a sharded one, the whole is put together first.
    sharded = isinstance(target, DTensor)
    whole = torch.empty(target.shape, dtype=target.dtype, device=target.device) if sharded else target.detach()
    for member in _experts.members(name, target.shape):
        member.of(whole).copy_(values[member.tensor])
    if sharded:
        _assign(target, whole)


def _collect(
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor], stacks: Mapping[str, torch.Size]
) -> tuple[dict[str, Tensor], list[str]]:
    """What was given, by name, with stacks taken apart; and which names came twice."""
    given: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        for held, part in _apart(name, tensor) if stacks.get(name) == tensor.shape else ((name, tensor),):
            if held in given:
                problems.append(f"{held} came twice")
            given[held] = part
    return given, problems


def _apart(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The experts of a stack, as views."""
    for member in _experts.members(name, stack.shape):
        yield member.tensor, member.of(stack)


def _entries(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as they lie, each once, under clean names."""
    first_names = set(_aliases(module).values())
    return {name: tensor for name, tensor in _state(module).items() if name in first_names}


def _aliases(module: nn.Module) -> dict[str, str]:
    """From every name to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _state(module).items()}


def _state(module: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            # The root's parameters stay whole after a forward pass that no backward pass follows.
            child.reshard()
    return {
        _clean(name): tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)
    }


def _stacks(module: nn.Module, entries: Mapping[str, Tensor]) -> set[str]:
    """Which entries are experts that a checkpoint holds one by one."""
    models = tuple(_clean(at) for at, model_type in _models(module) if model_type in _experts.MODEL_TYPES)
    return {name for name, tensor in entries.items() if name.startswith(models) and _experts.is_stack(name, tensor)}


def _models(module: nn.Module, at: str = "") -> Iterator[tuple[str, str]]:
    """The outermost transformers models in a module: where they are, and their type."""
    model_type = _model_type(module)
    if model_type is not None:
        yield at, model_type
        return
    for name, child in module.named_children():
        yield from _models(child, f"{at}{name}.")


def _model_type(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def _specs(name: str, tensor: Tensor, stack: bool) -> list[TensorSpec]:
    """The whole tensors that an entry holds."""
    if not stack:
        return [TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))]
    held = _experts.members(name, tensor.shape)
    return [TensorSpec(name=member.tensor, dtype=tensor.dtype, shape=member.shape) for member in held]


def _known(module: nn.Module) -> dict[str, TensorSpec]:
    """From every name that a whole tensor may come under to how `named_tensors` gives it."""
    state, first = _state(module), _aliases(module)
    stacks = _stacks(module, state)
    return {
        alias.name: spec
        for name, tensor in state.items()
        for alias, spec in zip(
            _specs(name, tensor, name in stacks),
            _specs(first[name], tensor, first[name] in stacks),
            strict=True,
        )
    }


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    # What is offloaded to the CPU still belongs to the mesh of its device, where it can be gathered.
    there: Any = tensor.to(tensor.device_mesh.device_type)
    packed_dim, unpacked = _unpacked(there)
    whole: Tensor = unpacked.full_tensor()
    return whole if packed_dim is None else whole.flatten(packed_dim, packed_dim + 1)


def _unpacked(tensor: Any) -> tuple[int | None, Any]:
    """A DTensor of several tensors behind one another, each cut by itself, with them along a dimension of their own.

    Thus they are ordinary shards, which every version of torch gathers. Returns the new dimension too; None: the tensor
    is none of these, and as it was.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [index for index, each in enumerate(tensor.placements) if isinstance(each, _StridedShard)]
    dims = [each.dim for each in tensor.placements if isinstance(each, (Shard, _StridedShard))]
    if len(strided) != 1 or dims.count(dim := tensor.placements[strided[0]].dim) > 1:
        return None, tensor
    packed = tensor.placements[strided[0]].split_factor
    placements = [
        Shard(each.dim + (each.dim >= dim)) if isinstance(each, (Shard, _StridedShard)) else each
        for each in tensor.placements
    ]
    shape = (*tensor.shape[:dim], packed, tensor.shape[dim] // packed, *tensor.shape[dim + 1 :])
    held = tensor.to_local()
    held = held.unflatten(dim, (packed, held.shape[dim] // packed))
    stride = torch.empty(shape, device="meta").stride()
    return dim, DTensor.from_local(held, tensor.device_mesh, placements, shape=torch.Size(shape), stride=stride)


def _assign(target: Tensor, value: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        value = value.to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            # Each rank cuts its own part out of the whole tensor that it was given: nothing is communicated.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)
