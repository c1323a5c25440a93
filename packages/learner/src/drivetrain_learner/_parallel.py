"""Sums, norms and full tensors of parameters that may lie on several ranks.

A parameter is either an ordinary tensor, equal on all ranks, or a DTensor that FSDP2 (or its user) has sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Gradients are summed over ranks in flat buffers of at most this many elements (128 MiB in fp32).
_BUCKET = 2**25

# Parts of a parameter's name that wrappers of its module put there.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of `tensor`; a collective if it is sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assign(target: Tensor, value: Tensor) -> None:
    """Copies the full tensor `value`, equal on all ranks, into `target`, sharded or not. No communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        value = value.to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def by_layout(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups that one operation can take together: the ordinary ones, and those of each mesh."""
    from torch.distributed.tensor import DTensor

    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def fsdp_modules(module: nn.Module) -> list[Any]:
    """The modules within `module` that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule

    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as they lie, each once (under its first name), without wrappers' prefixes."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            named[name] = tensor
    return named


def sum_replicated(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums ordinary tensors over the ranks, in place."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(g.numel() for g in bucket) + gradient.numel() > _BUCKET:
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, the shards on other ranks included: fp32, the same on every rank."""
    norms = [full(nn.utils.get_total_norm(group)) for group in by_layout(tensors)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
