"""How the slots of a batch form sequences, and what every function checks of them first.

A slot is one position of a tensor. A padded batch is `[B, T]`, one row per sequence; a packed batch is `[N]`, its
sequences one after another, with sequence `s` in the slots `cu_seqlens[s] : cu_seqlens[s + 1]`. Nothing here waits
for a device: a `cu_seqlens` that lies on the CPU is checked whole, one on an accelerator by its shape and dtype.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_slots(mask: Tensor, **tensors: Tensor) -> None:
    """Require a bool mask, and tensors of exactly its shape."""
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool mask, for instance mask.bool()")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(mask.shape)}; "
                "every per-token tensor has the shape of the mask"
            )


def check_sequences(mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Require `[B, T]` without `cu_seqlens`, or `[N]` with a `cu_seqlens` that covers it."""
    if cu_seqlens is None:
        if mask.dim() != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; pass [B, T], or packed [N] together with cu_seqlens")
        return
    if mask.dim() != 1:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; with cu_seqlens every per-token tensor is packed, [N]")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "pass [S + 1] int32 or int64, from 0 up to the number of slots"
        )
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != len(mask) or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(
                f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; "
                f"it must rise from 0 to the number of slots, {len(mask)}"
            )


def check_fraction(name: str, value: float) -> None:
    """Require a number from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} must lie between 0 and 1")


def as_float(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64: what all arithmetic here runs in."""
    return x if x.dtype is torch.float64 else x.float()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in float, zero (and without gradient) where the mask is 0, whatever those slots hold."""
    return torch.where(mask, as_float(x), 0.0)


def sequence_ids(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The index of the sequence each slot belongs to, of the mask's shape."""
    if cu_seqlens is None:
        return torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1).expand(mask.shape)
    lengths = cu_seqlens.to(mask.device).diff()
    return torch.repeat_interleave(lengths, output_size=len(mask))


def sequence_ends(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """True at the last slot of each sequence of a packed batch, masked or not."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.bool, device=mask.device)
    starts.index_fill_(0, cu_seqlens.to(mask.device, torch.int64), True)
    return starts[1:]


def token_counts(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The number of unmasked slots of each sequence: `[B]` or `[S]`, int64."""
    if cu_seqlens is None:
        return mask.sum(-1)
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[cu_seqlens.to(mask.device, torch.int64)].diff()


def last_tokens(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """True at the last unmasked slot of each sequence that has one."""
    if cu_seqlens is None:
        seen = mask.cumsum(-1)
        return mask & (seen == seen[..., -1:])
    seen = mask.cumsum(0)
    total = token_counts(mask, cu_seqlens).cumsum(0)
    return mask & (seen == total[sequence_ids(mask, cu_seqlens)])
