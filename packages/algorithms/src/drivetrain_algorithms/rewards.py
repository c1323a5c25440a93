"""From a score per sequence to a reward per token."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from drivetrain_algorithms._slots import (
    as_float,
    check_batch,
    check_choice,
    check_coefficient,
    check_per_sequence,
    last_tokens,
    per_token,
)
from drivetrain_algorithms.kl import KLKind, kl_estimate


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    kl: KLKind = "k1",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Pay a sequence's score at its last token, and charge every token for leaving the reference.

        rₜ = -β KLₜ + [t = last] s

    Where s is the sequence's score, KLₜ the estimate of KL(π || π_ref) at token t, β its coefficient, and `last` the
    last unmasked slot of the sequence: a response that ends with a tool's answer is paid at the last token the policy
    chose. Rewards are constants: no gradient flows through them, and so the policy gradient of k1 is that of the
    divergence, which it would not be as a loss.

    See Stiennon et al., "Learning to Summarize from Human Feedback" (2020), https://arxiv.org/abs/2009.01325

    Args:
        scores: `s`, `[B]`, or `[S]` for a packed batch.
        logprobs: `log π(yₜ)` when the token was sampled, `[B, T]`, or packed `[N]`. Masked slots may hold anything,
            also NaN.
        ref_logprobs: `log π_ref(yₜ)`, of the same shape.
        mask: bool, of the same shape; True at the tokens the policy chose.
        kl_coef: β, at least 0, in score per nat.
        kl: the estimator; see `kl_estimate`.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `r`, of the mask's shape, in float32 (float64 for float64 log-probabilities), without gradient; 0 at masked
        slots.

    Raises:
        ValueError: a shape, dtype, coefficient or kind that does not fit.

    Degenerate cases: `kl_coef=0` gives the score at the last token and 0 elsewhere; a sequence without an unmasked slot
    has nowhere to be paid and gives zeros, whatever its score.
    """
    check_batch(mask, cu_seqlens, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_per_sequence(mask, cu_seqlens, scores=scores)
    check_coefficient("kl_coef", kl_coef)
    check_choice("kl", kl, get_args(KLKind))
    penalty = kl_coef * kl_estimate(logprobs.detach(), ref_logprobs.detach(), mask, kind=kl)
    payment = per_token(as_float(scores.detach()), mask, cu_seqlens).to(penalty.dtype)
    return torch.where(last_tokens(mask, cu_seqlens), payment, 0.0) - penalty
