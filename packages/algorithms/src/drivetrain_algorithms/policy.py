"""Policy losses, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import bounded
from drivetrain_algorithms._slots import check_slots, masked


class PolicyLoss(NamedTuple):
    """A loss per token and what it was made of. Only `loss` carries a gradient."""

    loss: Tensor
    """What to minimise, of the mask's shape; 0 at masked slots. `aggregate` makes a scalar of it."""
    ratio: Tensor
    """`π / π_old`; 1 at masked slots."""
    log_ratio: Tensor
    """`log π - log π_old`; 0 at masked slots."""
    clipped: Tensor
    """bool: clipping holds this token's loss constant, so that it has no gradient; False at masked slots."""
    approx_kl: Tensor
    """`ratio - 1 - log_ratio`, whose mean over tokens of π_old estimates KL(π_old || π); 0 at masked slots."""


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate loss of proximal policy optimisation.

        rₜ = exp(log π(yₜ) - log π_old(yₜ))
        Lₜ = -min(rₜ Âₜ, clip(rₜ, 1 - ε_low, 1 + ε_high) Âₜ)
        Lₜ = min(Lₜ, -c Âₜ)     where Âₜ < 0, with a dual clip c

    Where yₜ is the token in slot t, π the policy that is trained, π_old the one before the first update on the batch,
    and Âₜ the advantage, taken as it is: nothing is whitened here. The dual clip bounds the loss of a token that was
    bad and has since become many times more likely.

    See Schulman et al., "Proximal Policy Optimization Algorithms" (2017), https://arxiv.org/abs/1707.06347; for
    ε_low != ε_high, Yu et al., "DAPO" (2025), https://arxiv.org/abs/2503.14476; for the dual clip, Ye et al.,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (2019), https://arxiv.org/abs/1912.09729

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: ε_low, in [0, 1].
        clip_high: ε_high, at least 0; `math.inf` leaves the ratio unclipped from above.
        dual_clip: c, above 1, or None for no dual clip.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update the ratio is 1, the loss -Â and the gradient -Â, that of REINFORCE; a
    masked slot has a loss and a gradient of exactly 0; a ratio beyond e²⁰ counts as e²⁰, without gradient; a
    log-probability that is not finite in an unmasked slot makes that token's loss and gradient NaN.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low={clip_low} must lie between 0 and 1; the ratio is held above 1 - clip_low")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high={clip_high} must be at least 0; the ratio is held below 1 + clip_high")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1; pass None to leave it out")

    log_ratio = masked(logprobs, mask) - masked(old_logprobs, mask).detach()
    advantages = masked(advantages, mask).detach()
    bounded_log_ratio = bounded(log_ratio)
    ratio = bounded_log_ratio.exp()

    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        clipped = clipped | above
    approx_kl = torch.expm1(bounded_log_ratio) - bounded_log_ratio
    return PolicyLoss(loss, ratio.detach(), log_ratio.detach(), clipped, approx_kl.detach())
