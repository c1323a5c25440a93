"""The one function that reads a result back to the host: it names the sample that holds a NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._slots import check_sequences, check_slots, sequence_ids


def check_finite(name: str, x: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> None:
    """Require finite numbers in the unmasked slots.

    It waits for the device, once per call. The other functions never do: what is not finite in an unmasked slot goes
    through them into a loss that is not finite either.

    Args:
        name: what the tensor is called in the error.
        x: `[B, T]`, or packed `[N]`. Masked slots may hold anything.
        mask: bool, of the same shape.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Raises:
        ValueError: an unmasked slot holds NaN or inf; the message names the first one by sequence and position, and
            says how many there are. Or a shape or dtype does not fit.
    """
    check_slots(mask, **{name: x})
    check_sequences(mask, cu_seqlens)
    bad = mask & ~torch.isfinite(x)
    slots = bad.flatten().nonzero().flatten()
    if len(slots) == 0:
        return
    first = int(slots[0])
    sequence = int(sequence_ids(mask, cu_seqlens).flatten()[first])
    start = sequence * mask.shape[-1] if cu_seqlens is None else int(cu_seqlens[sequence])
    raise ValueError(
        f"{name} is {x.flatten()[first].item()} at token {first - start} of sequence {sequence}; "
        f"{len(slots)} of {int(mask.sum())} unmasked slots are not finite"
    )
