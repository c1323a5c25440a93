"""From a loss per token to a scalar, over a denominator that is said aloud."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._moments import Reduce
from drivetrain_algorithms._slots import check_batch, check_choice, masked, per_token, token_counts, values_are_read

AggregationMode = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]
"""How tokens and sequences are weighed; see `aggregate`."""


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: AggregationMode,
    denominator: Tensor | float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Sum a loss over the unmasked tokens, weighed as the mode says, over an explicit denominator.

        L = Σₛ wₛ Σₜ Lₛₜ / D

        mode                       wₛ       D, over the whole optimizer step
        token_mean                 1        the number of tokens
        token_sum                  1        1
        seq_mean_token_sum         1        the number of sequences
        seq_mean_token_mean        1 / nₛ   the number of sequences
        seq_mean_token_sum_norm    1        the number of sequences times a constant length

    Where nₛ is the number of unmasked tokens of sequence s, tokens are unmasked tokens, and sequences those that have
    one. D counts all micro-batches and all ranks of the step, which `loss_denominator` does; then the sum of the
    results over micro-batches and ranks is the loss of the step, and neither it nor its gradient depends on how the
    step was split. A sequence stays whole in one micro-batch.

    See Yu et al., "DAPO" (2025), https://arxiv.org/abs/2503.14476, for `token_mean`; Shao et al., "DeepSeekMath"
    (2024), https://arxiv.org/abs/2402.03300, for `seq_mean_token_mean` (GRPO); Liu et al., "Understanding R1-Zero-Like
    Training" (2025), https://arxiv.org/abs/2503.20783, for `seq_mean_token_sum_norm` (Dr. GRPO).

    Args:
        loss: `[B, T]`, or packed `[N]`; also bool, to make a fraction of a flag such as `clipped`. Masked slots may
            hold anything, also NaN.
        mask: bool, of the same shape.
        mode: the weights, from the table.
        denominator: D, a number at least 0 or a scalar tensor.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        A scalar, in float32 (float64 for float64 input), with the gradient of `loss`.

    Raises:
        ValueError: a shape, dtype, mode or denominator that does not fit.

    Degenerate cases: a micro-batch without an unmasked token gives 0, with a gradient of 0, also where D is 0 because
    the whole step has none.
    """
    check_batch(mask, cu_seqlens, loss=loss)
    check_choice("mode", mode, get_args(AggregationMode))
    if isinstance(denominator, Tensor) and denominator.dim() != 0:
        raise ValueError(f"denominator has shape {tuple(denominator.shape)}; pass a number or a scalar tensor")
    if (not isinstance(denominator, Tensor) or values_are_read()) and not 0.0 <= float(denominator) < math.inf:
        raise ValueError(f"denominator={float(denominator)} must be a finite number, at least 0")
    if not isinstance(denominator, Tensor):
        denominator = torch.full((), denominator, dtype=torch.float64, device=mask.device)

    weighed = masked(loss, mask)
    if mode == "seq_mean_token_mean":
        counts = token_counts(mask, cu_seqlens).clamp(min=1)
        weighed = weighed / per_token(counts, mask, cu_seqlens)
    # Without an unmasked token the sum is 0, and 0 / 0 is not.
    divisor = torch.where(mask.any(), denominator.to(mask.device, non_blocking=True), 1.0)
    return weighed.sum() / divisor.to(weighed.dtype)


def loss_denominator(
    mask: Tensor,
    *,
    mode: AggregationMode,
    cu_seqlens: Tensor | None = None,
    norm_length: int | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Count what `aggregate` divides by, for the same mode.

    Args:
        mask: bool, `[B, T]`, or packed `[N]`: all tokens this rank trains on in one optimizer step. Take the very mask
            the loss is taken with, so that a token left out of the sum is left out of the divisor too.
        mode: see `aggregate`.
        cu_seqlens: `[S + 1]` int, for a packed batch.
        norm_length: the constant length of `seq_mean_token_sum_norm`, at least 1, such as the limit on response tokens;
            None for the other modes.
        reduce: sums a tensor over all ranks and returns the sum; called once, on every rank, but for `token_sum`, which
            has nothing to count. None: there is one rank.

    Returns:
        A scalar, float64. The counts of micro-batches add up, but for `token_sum`, whose divisor is 1.

    Raises:
        ValueError: a shape, dtype or mode that does not fit, or a `norm_length` that is missing or has no use.

    Degenerate cases: with no unmasked token on any rank it is 0 (1 for `token_sum`).
    """
    check_batch(mask, cu_seqlens)
    check_choice("mode", mode, get_args(AggregationMode))
    if (mode == "seq_mean_token_sum_norm") != (norm_length is not None):
        raise ValueError(
            f"norm_length={norm_length} with mode={mode!r}; seq_mean_token_sum_norm takes one, no other mode does"
        )
    if norm_length is not None and norm_length < 1:
        raise ValueError(f"norm_length={norm_length} must be at least 1 token")
    if mode == "token_sum":
        return torch.ones((), dtype=torch.float64, device=mask.device)
    counts = token_counts(mask, cu_seqlens)
    total = (counts if mode == "token_mean" else counts > 0).sum(dtype=torch.float64)
    if reduce is not None:
        total = reduce(total)
    return total * (norm_length or 1)
