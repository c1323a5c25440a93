"""A model's weights as a stream of named, whole tensors, however the model is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from drivetrain_sharding.layout import TensorSpec

# Parts of a parameter's name that torch.compile and activation checkpointing put there.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def named_tensors(module: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter and persistent buffer with its name, whole, one at a time.

    The names are those of the plain module: prefixes of wrappers are left out. Tied tensors come once, under the first
    of their names. The order is that of the module's `state_dict`.

    For a sharded module this is a collective: every rank iterates to the end, in step with the others. Then each
    tensor exists for as long as the caller holds it; at most one is whole at a time.

    Args:
        module: plain, or sharded by FSDP2 or as DTensors.
        dtype: what floating-point tensors are cast to, each once; None leaves them as they are.

    Yields:
        name and tensor, detached, on the module's device. A tensor of a plain module shares its memory when no cast was
        needed.
    """
    for name, tensor in _entries(module).items():
        whole = _whole(tensor.detach())
        yield name, whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole


def manifest(module: nn.Module, *, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
    """What `named_tensors` would yield, without moving any data."""
    return tuple(
        TensorSpec(
            name=name,
            dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            shape=tuple(tensor.shape),
        )
        for name, tensor in _entries(module).items()
    )


def load_named_tensors(module: nn.Module, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
    """Copies whole named tensors into a module, plain or sharded; every rank brings all of them.

    All names are checked before anything is changed. Values are cast to the module's dtypes. A tied tensor may come
    under any of its names, or under several if the values are equal.

    Raises:
        ValueError: names that the module does not have, or that are missing, given twice, or of another shape: one
            error with all of them. The module is as it was.
    """
    given, problems = _collect(tensors)
    own = _entries(module)
    alias = _aliases(module)
    values: dict[str, Tensor] = {}
    for name, value in given.items():
        canonical = alias.get(name)
        if canonical is None:
            problems.append(f"unknown {name}")
        elif tuple(value.shape) != tuple(own[canonical].shape):
            problems.append(f"{name} is {tuple(value.shape)}, here {tuple(own[canonical].shape)}")
        elif canonical in values and not torch.equal(values[canonical], value):
            problems.append(f"{name} differs from {canonical}, to which it is tied")
        else:
            values[canonical] = value
    arrived = {alias.get(name) for name in given}
    problems += [f"missing {name}" for name in own if name not in arrived]
    if problems:
        raise ValueError(f"the tensors do not fit the module: {'; '.join(problems)}")
    for name, value in values.items():
        _assign(own[name], value)


def _collect(tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    given: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in given:
            problems.append(f"{name} came twice")
        given[name] = tensor
    return given, problems


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


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _assign(target: Tensor, value: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        value = value.to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            # Each rank cuts its own part out of the whole tensor that it was given: nothing is communicated.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)
