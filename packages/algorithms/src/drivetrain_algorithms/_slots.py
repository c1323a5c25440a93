"""How the slots of a batch form sequences, and what every function checks of them first.

A slot is one position of a tensor. A padded batch is `[B, T]`, one row per sequence; a packed batch is `[N]`, its
sequences one after another, with sequence `s` in the slots `cu_seqlens[s] : cu_seqlens[s + 1]`. Nothing here waits
for a device, unless `value_checks` are on: a `cu_seqlens` that lies on the CPU is checked whole, one on an accelerator
by its shape and dtype.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from itertools import pairwise

import torch
from torch import Tensor

read_values: ContextVar[bool] = ContextVar("read_values", default=False)
"""Whether checks may wait for a device; `value_checks` switches it."""


def values_are_read() -> bool:
    """Whether checks may wait for a device. Compiled code never does."""
    return not torch.compiler.is_compiling() and read_values.get()


def check_slots(mask: Tensor, /, **tensors: Tensor) -> None:
    """Require a bool mask, and tensors of exactly its shape; for functions to which sequences are nothing."""
    _check_shapes(mask, tensors)
    if values_are_read():
        for name, tensor in tensors.items():
            require_finite(name, tensor, mask, None)


def check_batch(mask: Tensor, cu_seqlens: Tensor | None, /, **tensors: Tensor) -> None:
    """Require a bool mask, tensors of exactly its shape, and sequences that cover it."""
    _check_shapes(mask, tensors)
    _check_sequences(mask, cu_seqlens)
    if values_are_read():
        for name, tensor in tensors.items():
            require_finite(name, tensor, mask, cu_seqlens)


def check_per_sequence(mask: Tensor, cu_seqlens: Tensor | None, /, **tensors: Tensor) -> None:
    """Require tensors with one number per sequence of a batch that is checked already."""
    num_sequences = count_sequences(mask, cu_seqlens)
    for name, tensor in tensors.items():
        if tensor.shape != (num_sequences,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; pass one per sequence, [{num_sequences}]")
    if values_are_read():  # the number of a sequence without an unmasked slot counts for nothing
        counted = token_counts(mask, cu_seqlens) > 0
        check_finite_values(**{name: tensor.masked_fill(~counted, 0.0) for name, tensor in tensors.items()})


def check_finite_values(**tensors: Tensor) -> None:
    """With `value_checks` on, require finite numbers in all of each tensor."""
    if values_are_read():
        for name, tensor in tensors.items():
            bad = (~torch.isfinite(tensor)).flatten().nonzero().flatten()
            if len(bad):
                first = int(bad[0])
                raise ValueError(
                    f"{name} is {tensor.flatten()[first].item()} at index {first}; "
                    f"{len(bad)} of {tensor.numel()} numbers are not finite"
                )


def require_finite(name: str, x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise an error that names the first unmasked slot that is not finite, if any. Reads from the device."""
    slots = (mask & ~torch.isfinite(x)).flatten().nonzero().flatten()
    if len(slots) == 0:
        return
    first = int(slots[0])
    if cu_seqlens is not None:
        sequence = int(sequence_ids(mask, cu_seqlens)[first])
        place = f"token {first - int(cu_seqlens[sequence])} of sequence {sequence}"
    elif mask.dim() == 2:
        place = f"token {first % mask.shape[1]} of sequence {first // mask.shape[1]}"
    else:
        place = f"slot {first}"
    raise ValueError(
        f"{name} is {x.flatten()[first].item()} at {place}; "
        f"{len(slots)} of {int(mask.sum())} unmasked slots are not finite"
    )


def _check_shapes(mask: Tensor, tensors: dict[str, Tensor]) -> None:
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask is a {type(mask).__name__}; pass a torch tensor of bool")
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool mask, for instance mask.bool()")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(mask.shape)}; "
                "every per-token tensor has the shape of the mask"
            )
        if not (tensor.is_floating_point() or tensor.dtype is torch.bool):
            raise ValueError(f"{name} has dtype {tensor.dtype}; pass floating-point numbers, for instance x.float()")


def _check_sequences(mask: Tensor, cu_seqlens: Tensor | None) -> None:
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
    if values_are_read() or (cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()):
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


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Require one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose from {', '.join(choices)}")


def check_coefficient(name: str, value: float) -> None:
    """Require a finite number that is at least 0."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be a finite number, at least 0")


def as_float(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64: what all arithmetic here runs in."""
    return x if x.dtype is torch.float64 else x.float()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in float, zero (and without gradient) where the mask is 0, whatever those slots hold."""
    return torch.where(mask, as_float(x), 0.0)


def count_sequences(mask: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of sequences, with or without unmasked slots."""
    return mask.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def sequence_ids(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The index of the sequence each slot belongs to, of the mask's shape."""
    if cu_seqlens is None:
        return torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1).expand(mask.shape)
    lengths = cu_seqlens.to(mask.device, non_blocking=True).diff()
    return torch.repeat_interleave(lengths, output_size=len(mask))


def token_counts(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The number of unmasked slots of each sequence: `[B]` or `[S]`, int64."""
    if cu_seqlens is None:
        return mask.sum(-1)
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[cu_seqlens.to(mask.device, torch.int64, non_blocking=True)].diff()


def sequence_sums(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sum over the slots of each sequence, `[B]` or `[S]`, in the dtype of `x`; 0 for an empty one.

    The order of summation is fixed, and no sequence sees a NaN of another. Sums run in float64, since `segment_reduce`
    adds one number after the other: in float32, 30,000 log-probabilities would lose their fourth digit.
    """
    if cu_seqlens is None:
        return x.sum(-1, dtype=torch.float64).to(x.dtype)
    lengths = cu_seqlens.to(x.device, non_blocking=True).diff()
    return torch.segment_reduce(x.double(), "sum", lengths=lengths, axis=0, unsafe=True, initial=0).to(x.dtype)


def per_token(x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A number per sequence, `[B]` or `[S]`, at each slot of the sequence, masked or not: `[B, T]` or `[N]`."""
    return x.unsqueeze(-1).expand(mask.shape) if cu_seqlens is None else x[sequence_ids(mask, cu_seqlens)]


def last_tokens(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """True at the last unmasked slot of each sequence that has one."""
    if cu_seqlens is None:
        seen = mask.cumsum(-1)
        return mask & (seen == seen[..., -1:])
    seen = mask.cumsum(0)
    total = token_counts(mask, cu_seqlens).cumsum(0)
    return mask & (seen == total[sequence_ids(mask, cu_seqlens)])
