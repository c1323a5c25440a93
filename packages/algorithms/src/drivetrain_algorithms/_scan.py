"""The linear recurrence behind discounted sums, solved for all blocks of a few slots at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def later_sums(x: Tensor, skipped: Tensor, *, discount: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """What follows each slot: `yₜ₊₁` of `yₜ = xₜ + dₜ yₜ₊₁`, with `y = 0` after the end of a sequence.

    `dₜ` is 1 at skipped slots, which pass on what follows them, and `discount` at all others.

    Time is cut into blocks. The first slots of all blocks are one row of memory, the second slots the next one, and so
    on. So a step from slot to slot is one vector operation over all blocks of all sequences. The blocks are walked
    through twice: as if nothing came after them, which makes each one step of a problem as many times shorter, and
    again with the solution of that. No value is read back to the host.

    See Blelloch, "Prefix Sums and Their Applications" (1990), https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf

    Args:
        x: `[B, T]`, or packed `[N]`; 0 at skipped slots.
        skipped: bool, of the same shape.
        discount: in [0, 1]. What is discounted by 0 is gone, also inf and NaN.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        Of the shape and dtype of `x`; anything at skipped slots.
    """
    if x.numel() == 0:
        return x
    shape = x.shape
    size = min(_block_size(x), shape[-1])
    steps = _to_rows(skipped, size).contiguous()
    y = _with_row_after(_to_rows(x, size))
    del x  # its memory serves for the decay
    decay = steps.view(torch.uint8).to(y.dtype).clamp_min_(discount)
    if cu_seqlens is None:
        _solve(decay, y, shape[:-1], resets=discount == 0.0)
    else:
        # Empty sequences at the start end in slot -1: the last one there is, and an end too, or padding.
        last = cu_seqlens[1:].to(y.device, torch.int64) - 1
        ends, nothing = (last % size, last.div(size, rounding_mode="floor")), y.new_zeros(())
        decay.index_put_(ends, nothing)
        _solve(decay, y, shape[:-1], resets=True)
        y[1:].index_put_(ends, nothing)
    del decay
    return _from_rows(y[1:], shape)


def _block_size(x: Tensor) -> int:
    """Long rows for the CPU's vector units, few operations where each costs the launch of a kernel."""
    return 64 if x.device.type == "cpu" else 8


def _solve(decay: Tensor, y: Tensor, batch: torch.Size, *, resets: bool) -> None:
    """Turn `y` from `[x₀, ..., xₖ₋₁, anything]` into `[x₀, y₁, ..., yₖ]`: row `t` holds slot `t` of every block.

    Args:
        decay: `[k, M]`, no gradient flows to it.
        y: `[k + 1, M]`, the `M` blocks ordered as in `[*batch, M / B]`.
        batch: the shape of a batch of sequences; their blocks follow one another.
        resets: `decay` has zeros, over which nothing gets, not even as `0 * inf`.
    """
    size, num_blocks = decay.shape
    length = num_blocks // batch.numel()
    if length == 1:
        y[size] = 0.0
    else:
        total = y[size - 1]
        for t in reversed(range(size - 1)):
            total = torch.addcmul(y[t], decay[t], _passed(total, decay[t]) if resets else total)
        product = decay.prod(0)
        if resets:  # a product too small for its dtype is no reset
            product = _passed(product.clamp_min_(torch.finfo(product.dtype).tiny), decay.amin(0))
        shape = torch.Size((*batch, length))
        next_size = min(_block_size(y), length)
        next_y = _with_row_after(_to_rows(total.view(shape), next_size))
        _solve(_to_rows(product.view(shape), next_size).contiguous(), next_y, batch, resets=resets)
        y[size] = _from_rows(next_y[1:], shape).flatten()
    for t in reversed(range(1, size)):
        y[t].addcmul_(decay[t], _passed(y[t + 1], decay[t]) if resets else y[t + 1])


def _passed(x: Tensor, decay: Tensor) -> Tensor:
    """`x`, and 0 where `decay` is 0: `torch.where`, but vectorised on the CPU."""
    passed: Tensor = torch.ops.aten.threshold_backward(x, decay, 0.0)
    return passed


def _to_rows(x: Tensor, size: int) -> Tensor:
    """`[..., T]` in blocks of `size`, `[size, M]` without a copy; a last, shorter block is padded with zeros."""
    padding = -x.shape[-1] % size
    return (pad(x, (0, padding)) if padding else x).reshape(-1, size).t()


def _from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_to_rows`, a copy."""
    return rows.t().reshape(*shape[:-1], -1)[..., : shape[-1]]


def _with_row_after(rows: Tensor) -> Tensor:
    """A contiguous copy with one more row, to be written."""
    size, num_blocks = rows.shape
    copy = rows.new_empty(size + 1, num_blocks)
    copy[:size] = rows
    return copy
