"""Sums, norms and full tensors of parameters that may lie on several ranks.

A parameter is either an ordinary tensor, equal on all ranks, or a DTensor that FSDP2, tensor parallelism or its user
has sharded.
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


def device_of(tensor: Tensor) -> torch.device:
    """Where a module computes that has `tensor` as a parameter: offloaded or not."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or tensor.device.type == tensor.device_mesh.device_type:
        return tensor.device
    return torch.device(tensor.device_mesh.device_type, torch.accelerator.current_device_index())


def is_summed(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether FSDP2 sums this parameter's gradient over the ranks of the group: they share the parameter's mesh."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return False
    return set(dist.get_process_group_ranks(group)) <= set(tensor.device_mesh.mesh.flatten().tolist())


def goes_with(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the ranks of the group share all of this parameter's mesh, or it belongs to each of them alone."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or is_summed(tensor, group):
        return True
    ranks = set(dist.get_process_group_ranks(group))
    return ranks & set(tensor.device_mesh.mesh.flatten().tolist()) == {dist.get_rank()}


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
    """Sums what each rank holds of these over the ranks, in place."""
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
    """The 2-norm of all tensors together, the shards on other ranks included: float64, the same on every rank.

    Squares are added in float64, and their sum over all shards has its root taken once: however the tensors are
    sharded, norms agree to the last digits of float64, and so do the fp32 gradients that are clipped by them.
    """
    shards: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        shards.setdefault(_sharded_over(tensor), []).append(local(tensor))
    total: Tensor | None = None
    for over, parts in shards.items():
        square = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square().sum()
        if over is not None:
            mesh, dims = over
            square = square.to(mesh.device_type)
            for dim in dims:
                dist.all_reduce(square, group=mesh.get_group(dim))
        total = square if total is None else total.to(square.device) + square
    assert total is not None, "there are no tensors"
    return total.sqrt()


def _sharded_over(tensor: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a DTensor, and those of its dimensions over which it lies in parts; None: an ordinary tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return None
    for placement in tensor.placements:
        assert not placement.is_partial(), "a gradient whose sum over ranks is not complete"
    return tensor.device_mesh, tuple(dim for dim, each in enumerate(tensor.placements) if not each.is_replicate())
