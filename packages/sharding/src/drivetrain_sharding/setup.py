"""Laying a model over devices."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def shard_model(
    module: Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> Module:
    """Shards a model's parameters over a mesh with FSDP2: each transformer block by itself, then what is left.

    The blocks are the members of the outermost `nn.ModuleList`s. Each block's parameters are gathered when it runs and
    let go afterwards; those outside the blocks (embeddings, norm, head) stay whole from a forward to its backward pass.
    A call to the module itself gathers the latter, so shard the module that is called (a `PolicyModel`, say, rather
    than the transformers model within).

    Args:
        module: equal on all ranks; it is changed in place. Parameters become DTensors split along their first
            dimension, evenly or not; tied parameters stay tied.
        mesh: one dimension: the ranks to shard over. Two: replicated over the first, sharded over the second.
        param_dtype: what blocks are gathered and computed in; the shards keep their dtype. None: the same.
        reduce_dtype: what gradients are summed over ranks in.

    Returns:
        the same module.

    Raises:
        ValueError: the mesh has more than two dimensions.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mesh.ndim > 2:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions; give (shard,) or (replicate, shard)")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost module lists, in order."""
    found: list[nn.Module] = []
    for child in module.children():
        found.extend(child if isinstance(child, nn.ModuleList) else _blocks(child))
    return found
