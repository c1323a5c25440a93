"""Policy losses whose ratio is that of a whole sequence: the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import (
    PolicyLoss,
    bounded,
    check_bounds,
    check_clip_range,
    clipped_surrogate,
    compare,
    policy_loss,
    surrogate_slope,
)
from drivetrain_algorithms._slots import check_batch, per_token, sequence_sums, token_counts


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Group sequence policy optimisation: the clipped surrogate loss with the ratio of the sequence.

        s = exp(1/n Σₜ (log π(yₜ) - log π_old(yₜ)))
        sₜ = sg[s] π(yₜ) / sg[π(yₜ)]
        Lₜ = -min(sₜ Âₜ, clip(sₜ, 1 - ε_low, 1 + ε_high) Âₜ)

    Where the sum runs over the n unmasked tokens of the sequence that yₜ is in, and sg[] is a constant. So all tokens
    of a sequence have the same ratio, and are clipped together or not at all, while the gradient at token t flows
    through log π(yₜ) alone: it is the token form, GSPO-token, in which advantages may differ from token to token. With
    one advantage per sequence and `aggregate` in `"seq_mean_token_mean"`, value and gradient are those of the sequence
    form. ε is two or three orders of magnitude below that of `ppo_clip`, since averaging takes out most of the ratio's
    variance.

    It is verl's `gspo`, TRL's `importance_sampling_level="sequence"`, OpenRLHF's and SkyRL's `gspo`.

    See Zheng et al., "Group Sequence Policy Optimization" (2025), https://arxiv.org/abs/2507.18071

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, or packed `[N]`. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: ε_low, in [0, 1]; 3e-4 in the paper.
        clip_high: ε_high, at least 0; 4e-4 in the paper; `math.inf` leaves the ratio unclipped from above.
        dual_clip: c of `ppo_clip`, above 1, or None for no dual clip.
        cu_seqlens: `[S + 1]` int, for a packed batch. A sequence stays whole in one micro-batch.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is that of the sequence, at each of
        its tokens; the other metrics are of the token.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: in a sequence of one token it is `ppo_clip`; before the first update the loss is -Â and the
    gradient -Â; a masked slot, and a sequence of such, has a loss and a gradient of exactly 0; a sequence ratio beyond
    e²⁰ counts as e²⁰, without gradient; a log-probability that is not finite in an unmasked slot makes the loss and
    gradient of the whole sequence NaN, and of no other.
    """
    check_batch(mask, cu_seqlens, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_range(clip_low, clip_high, dual_clip)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    log_ratio = _sequence_means(tokens.log_ratio, mask, cu_seqlens)
    ratio = bounded(log_ratio).exp()
    loss, clipped = clipped_surrogate(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    slope = surrogate_slope(ratio, tokens.advantages, clipped, log_ratio)
    return policy_loss(torch.where(mask, loss, 0.0), torch.where(mask, slope, 0.0), clipped, tokens)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Geometric-mean policy optimisation: the tokens' ratios are clipped first, and then averaged.

        dₜ = log π(yₜ) - log π_old(yₜ)
        cₜ = min(dₜ, ε_high) where Âₜ > 0,  max(dₜ, -ε_low) where Âₜ < 0,  0 where Âₜ = 0
        g = exp(1/n Σₜ cₜ)
        Lₜ = -Âₜ sg[g] exp(cₜ - sg[cₜ])

    Where the sum runs over the n unmasked tokens of the sequence that yₜ is in, and sg[] is a constant. A token that is
    clipped has no gradient and leaves its neighbours theirs. The loss is in the token form of `gspo`: the gradient at
    token t flows through log π(yₜ) alone, and with one advantage per sequence and `aggregate` in
    `"seq_mean_token_mean"`, value and gradient are those of `-Â g`, averaged over sequences, as in the paper.

    It is verl's `geo_mean` and TRL's `GMPOTrainer`, for one advantage per sequence.

    See Zhao et al., "Geometric-Mean Policy Optimization" (2025), https://arxiv.org/abs/2507.20673

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, or packed `[N]`. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: ε_low, in nats, at least 0; 0.4 in the paper; `math.inf` for no bound.
        clip_high: ε_high, in nats, at least 0; 0.4 in the paper; `math.inf` for no bound.
        cu_seqlens: `[S + 1]` int, for a packed batch. A sequence stays whole in one micro-batch.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` and the other metrics are of the
        token.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: in a sequence of one token it is `ppo_clip` between `exp(-ε_low)` and `exp(ε_high)`; without
    bounds, and one sign of Â per sequence, `gspo` without clipping; before the first update the loss is -Â and the
    gradient -Â; a masked slot, and a sequence of such, has a loss and a gradient of exactly 0; a token's ratio beyond
    e²⁰ counts as e²⁰, without gradient; a log-probability that is not finite in an unmasked slot makes the loss of the
    whole sequence NaN, and of no other.
    """
    check_batch(mask, cu_seqlens, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    # In the direction the advantage pulls to, clipping only ever holds back.
    sign = tokens.advantages.sign()
    pulled = sign * tokens.bounded_log_ratio
    limit = sign * tokens.bounded_log_ratio.clamp(-clip_low, clip_high)
    clipped = limit < pulled
    ratio = _sequence_means(sign * torch.minimum(pulled, limit), mask, cu_seqlens).exp()
    slope = surrogate_slope(ratio, tokens.advantages, clipped, tokens.log_ratio)
    loss = torch.where(mask, -tokens.advantages * ratio, 0.0)
    return policy_loss(loss, torch.where(mask, slope, 0.0), clipped, tokens)


def _sequence_means(x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean over the unmasked tokens of each sequence, at each of its slots; `x` is 0 at masked ones."""
    counts = token_counts(mask, cu_seqlens).clamp(min=1)
    return per_token(sequence_sums(x, cu_seqlens) / counts, mask, cu_seqlens)
