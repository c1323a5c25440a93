"""The checks that read a result back to the host: they name the sample that holds a NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from drivetrain_algorithms._slots import check_batch, read_values, require_finite


def check_finite(name: str, x: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> None:
    """Require finite numbers in the unmasked slots.

    It waits for the device, once per call. The other functions do not, unless `value_checks` are on: what is not finite
    in an unmasked slot goes through them into a loss that is not finite either.

    Args:
        name: what the tensor is called in the error.
        x: `[B, T]`, or packed `[N]`. Masked slots may hold anything.
        mask: bool, of the same shape.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Raises:
        ValueError: an unmasked slot holds NaN or inf; the message names the first one by sequence and position, and
            says how many there are. Or a shape or dtype does not fit.
    """
    check_batch(mask, cu_seqlens, **{name: x})
    require_finite(name, x, mask, cu_seqlens)


@contextmanager
def value_checks() -> Iterator[None]:
    """Switch on, in this thread or task, the checks that have to read a tensor's values.

    Inside, every function of this library requires finite numbers in the unmasked slots of all its arguments, group ids
    in range, and `cu_seqlens` that fit also where they lie on an accelerator. Each check waits for the device, which is
    why they are off by default: switch them on for a first step, or for the step that gave a NaN. What
    `torch.compile` has compiled does not check.

    Raises:
        ValueError: from the functions called inside; it names the argument, the place and the value.

    Example:
        >>> import torch
        >>> from drivetrain_algorithms import sft_loss, value_checks
        >>> with value_checks():
        ...     sft_loss(torch.tensor([[-0.5, torch.nan]]), torch.tensor([[True, True]]))
        Traceback (most recent call last):
        ValueError: logprobs is nan at token 1 of sequence 0; 1 of 2 unmasked slots are not finite
    """
    token = read_values.set(True)
    try:
        yield
    finally:
        read_values.reset(token)
