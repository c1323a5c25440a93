"""Policy losses that weigh a token down where `ppo_clip` drops it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import PolicyLoss, check_clip_range, compare, policy_loss, surrogate_slope
from drivetrain_algorithms._slots import check_slots


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight: every token keeps a gradient.

        rₜ = π(yₜ) / π_old(yₜ)
        Lₜ = -sg[clip(rₜ, 1 - ε_low, 1 + ε_high)] Âₜ log π(yₜ)

    Where yₜ is the token in slot t, π the policy that is trained, π_old the one before the first update on the batch,
    Âₜ the advantage, and sg[] a constant. A rare token that has become likely, often the one at which an answer turns,
    goes on learning with a bounded weight. The value of the loss says nothing, its gradient does.

    It is verl's `cispo`, SkyRL's `cispo` (`cispo_eps_clip_low`, `cispo_eps_clip_high`), and with `clip_low=1` and
    `clip_high=epsilon_high - 1` TRL's `loss_type="cispo"`.

    See MiniMax, "MiniMax-M1" (2025), https://arxiv.org/abs/2506.13585

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: ε_low, in [0, 1]; 1, no lower bound, in the paper.
        clip_high: ε_high, at least 0; `math.inf` leaves the weight unclipped from above.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is True where the weight is, and the
        token has its gradient nevertheless.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update, and with both ε at 0, it is `reinforce`; a masked slot has a loss and a
    gradient of exactly 0; a weight beyond e²⁰ counts as e²⁰; a log-probability that is not finite in an unmasked slot
    makes that token's loss and gradient NaN.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_range(clip_low, clip_high)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    slope = -tokens.ratio.clamp(low, high) * tokens.advantages
    clipped = (tokens.ratio < low) | (tokens.ratio > high)
    return policy_loss(slope * tokens.logprobs.detach(), slope, clipped, tokens)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """Soft adaptive policy optimisation: a smooth gate on the ratio instead of a clip.

        rₜ = π(yₜ) / π_old(yₜ)
        Lₜ = -4/τ σ(τ (rₜ - 1)) Âₜ     with τ = τ_pos where Âₜ > 0, τ_neg elsewhere

    Where σ is the logistic function. The gradient with respect to log π is `-4 p (1 - p) rₜ Âₜ` with
    `p = σ(τ (rₜ - 1))`: at a ratio of 1 that of `ppo_clip`, and fading on both sides, the faster the larger τ. Bad
    tokens fade faster than good ones, because pushing one down raises all others of the vocabulary.

    It is verl's `sapo` (`tau_pos`, `tau_neg`), SkyRL's `sapo`, and TRL's `loss_type="sapo"`
    (`sapo_temperature_pos`, `sapo_temperature_neg`), whose values are the defaults here.

    See Gao et al., "Soft Adaptive Policy Optimization" (2025), https://arxiv.org/abs/2511.20347

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        tau_positive: τ_pos, above 0.
        tau_negative: τ_neg, above 0.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is False everywhere.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update the loss is `-2 Â / τ` and the gradient -Â; with τ going to 0 the gradient
    goes to that of the unclipped ratio; a masked slot has a loss and a gradient of exactly 0; a ratio beyond e²⁰ counts
    as e²⁰, without gradient; a log-probability that is not finite in an unmasked slot makes that token's loss and
    gradient NaN.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be a finite number above 0")
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(tokens.ratio, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0))
    never = torch.zeros_like(mask)
    slope = surrogate_slope(4.0 * gate * (1.0 - gate) * tokens.ratio, tokens.advantages, never, tokens.log_ratio)
    return policy_loss(-4.0 / tau * gate * tokens.advantages, slope, never, tokens)
