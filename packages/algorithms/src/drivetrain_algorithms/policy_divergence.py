"""Policy losses whose trust region is a divergence of the policies, not their ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import (
    Comparison,
    PolicyLoss,
    check_bounds,
    check_largest_weight,
    compare,
    policy_loss,
)
from drivetrain_algorithms._slots import check_slots, masked

_LEAST_PROBABILITY = 1e-8


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_clamp: float | None = None,
) -> PolicyLoss:
    """Divergence proximal policy optimisation, with the total variation of "this token or another".

        Dₜ = |π(yₜ) - π_old(yₜ)|
        Lₜ = 0                                if Âₜ > 0, π(yₜ) > π_old(yₜ) and Dₜ > δ_high
        Lₜ = 0                                if Âₜ < 0, π(yₜ) < π_old(yₜ) and Dₜ > δ_low
        Lₜ = -sg[min(rₜ, c)] Âₜ log π(yₜ)     else, with rₜ = π(yₜ) / π_old(yₜ)

    Where yₜ is the token in slot t, π the policy that is trained, π_old the one that sampled yₜ, and sg[] a constant. A
    token outside the trust region that would move still further has no gradient; one that comes back has. A ratio is no
    measure of how far a policy has moved: a token of probability 1e-5 may become ten times as likely, and one of 0.9
    must not lose a third. The value of the loss says nothing, its gradient does.

    It is verl's `dppo_tv` (δ is its `clip_ratio_low` and `clip_ratio_high`, c its `clip_ratio_c`), SkyRL's `dppo` with
    `dppo_type="binary_tv"`.

    See Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026), https://arxiv.org/abs/2602.04879

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: δ_low, a probability, at least 0; 0.2 is usual. A bound of 1 never holds.
        clip_high: δ_high, likewise.
        ratio_clamp: c, the largest importance weight, above 0; None for no truncation. The paper advises a large one.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is True outside the trust region; a
        truncated weight alone is not clipped.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update it is `reinforce`; a masked slot has a loss and a gradient of exactly 0; a
    weight beyond e²⁰ counts as e²⁰; a log-probability that is not finite in an unmasked slot makes that token's loss
    and gradient NaN.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    check_largest_weight(ratio_clamp=ratio_clamp)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    variation = (tokens.logprobs.detach().exp() - masked(old_logprobs, mask).detach().exp()).abs()
    return _within_trust_region(tokens, variation, clip_low=clip_low, clip_high=clip_high, ratio_clamp=ratio_clamp)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_clamp: float | None = None,
) -> PolicyLoss:
    """Divergence proximal policy optimisation, with the KL divergence of "this token or another".

        p = π_old(yₜ),  q = π(yₜ)
        Dₜ = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    And the loss of `dppo_tv` with this D. It is KL(π_old || π) after all other tokens are taken together, and so never
    above the divergence of the whole distributions.

    It is verl's `dppo_kl`, and SkyRL's `dppo` with `dppo_type="binary_kl"`.

    See Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026), https://arxiv.org/abs/2602.04879

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: δ_low, in nats, at least 0; 0.05 is usual; `math.inf` for no bound.
        clip_high: δ_high, likewise.
        ratio_clamp: c, the largest importance weight, above 0; None for no truncation.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is True outside the trust region; a
        truncated weight alone is not clipped.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: those of `dppo_tv`; where the token is certain under a policy, all others together count as 1e-8,
    which keeps the divergence finite.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    check_largest_weight(ratio_clamp=ratio_clamp)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    old = masked(old_logprobs, mask).detach()
    rest, old_rest = ((-torch.expm1(x)).clamp(min=_LEAST_PROBABILITY) for x in (tokens.logprobs.detach(), old))
    divergence = old_rest * (old_rest / rest).log() - old.exp() * tokens.log_ratio
    return _within_trust_region(tokens, divergence, clip_low=clip_low, clip_high=clip_high, ratio_clamp=ratio_clamp)


def _within_trust_region(
    tokens: Comparison, divergence: Tensor, *, clip_low: float, clip_high: float, ratio_clamp: float | None
) -> PolicyLoss:
    """REINFORCE with importance weights, without the tokens that are outside and would move further out."""
    outside = ((tokens.advantages > 0) & (tokens.log_ratio > 0) & (divergence > clip_high)) | (
        (tokens.advantages < 0) & (tokens.log_ratio < 0) & (divergence > clip_low)
    )
    weight = tokens.ratio if ratio_clamp is None else tokens.ratio.clamp(max=ratio_clamp)
    slope = -weight * tokens.advantages * ~outside  # a product, so that NaN stays NaN
    return policy_loss(slope * tokens.logprobs.detach(), slope, outside, tokens)
