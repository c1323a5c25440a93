"""Two policies compared at each token, where their ratio may be beyond what a float holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._slots import masked

MAX_LOG_RATIO = 20.0
"""A ratio above e²⁰ (4.9e8) counts as this, as a constant. It keeps `0 * exp(1000)` a number, in the gradient too."""


class PolicyLoss(NamedTuple):
    """A loss per token and what it was made of. Only `loss` carries a gradient."""

    loss: Tensor
    """What to minimise, of the mask's shape; 0 at masked slots. `aggregate` makes a scalar of it."""
    ratio: Tensor
    """`π / π_old` of the token, in every loss; 1 at masked slots."""
    log_ratio: Tensor
    """`log π - log π_old` of the token, in every loss; 0 at masked slots."""
    clipped: Tensor
    """bool: the loss held this token back (in most losses, `ppo_clip` among them, it is constant there, without
    gradient; the others say what they do); False at masked slots."""
    approx_kl: Tensor
    """`ratio - 1 - log_ratio`, with a log-ratio of at most 20; 0 at masked slots. Its mean over tokens of π_old
    estimates KL(π_old || π)."""


class Comparison(NamedTuple):
    """What a policy loss reads of a batch, cleared of what masked slots hold. Only `logprobs` carries a gradient."""

    logprobs: Tensor
    """`log π`; 0 at masked slots."""
    advantages: Tensor
    """`Â`; 0 at masked slots."""
    log_ratio: Tensor
    """`log π - log π_old`; 0 at masked slots."""
    bounded_log_ratio: Tensor
    """The same, `bounded`."""
    ratio: Tensor
    """Its exponential; 1 at masked slots."""


def bounded(log_ratio: Tensor) -> Tensor:
    """`min(log_ratio, 20)`, without gradient beyond; NaN, in value and gradient, where it is not finite."""
    # The clamp alone would turn an infinite log-ratio, which is an error, into a harmless number.
    return log_ratio.clamp(max=MAX_LOG_RATIO) + 0.0 * log_ratio


def compare(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Comparison:
    """Mask first, then exponentiate."""
    logprobs = masked(logprobs, mask)
    log_ratio = logprobs.detach() - masked(old_logprobs, mask).detach()
    bounded_log_ratio = bounded(log_ratio)
    advantages = masked(advantages, mask).detach()
    return Comparison(logprobs, advantages, log_ratio, bounded_log_ratio, bounded_log_ratio.exp())


def policy_loss(value: Tensor, slope: Tensor, clipped: Tensor, tokens: Comparison) -> PolicyLoss:
    """A loss per token from its value and its derivative, with the metrics that every policy loss reports.

    A policy-gradient loss *is* its derivative; its value is often a mere device to get that one. So both are said, side
    by side, and of everything that was computed the backward pass keeps one tensor, the slope.

    Args:
        value: the loss of each token, a constant.
        slope: its derivative by the `log π` of the same token, a constant. 0 at masked slots.
        clipped: bool, see `PolicyLoss`.
        tokens: what the loss was computed from.
    """
    loss = value + slope * (tokens.logprobs - tokens.logprobs.detach())
    approx_kl = torch.expm1(tokens.bounded_log_ratio) - tokens.bounded_log_ratio
    return PolicyLoss(loss, tokens.ratio, tokens.log_ratio, clipped, approx_kl)


def surrogate_slope(ratio: Tensor, advantages: Tensor, clipped: Tensor, log_ratio: Tensor) -> Tensor:
    """The derivative of `-r Â` by log π: `-r Â` too, and 0 where clipping, or the bound on r, holds r constant."""
    return -ratio * advantages * ~(clipped | (log_ratio > MAX_LOG_RATIO))  # a product, so that NaN stays NaN


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """`-min(r Â, clip(r, 1 - ε_low, 1 + ε_high) Â)`, at most `-c Â` where Â < 0; and where clipping makes it so."""
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if dual_clip is not None:
        ceiling, bad = -dual_clip * advantages, advantages < 0
        clipped = clipped | (bad & (loss > ceiling))
        loss = torch.where(bad, torch.minimum(loss, ceiling), loss)
    return loss, clipped


def check_clip_range(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Require bounds between which a ratio can be held."""
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low={clip_low} must lie between 0 and 1; the ratio is held above 1 - clip_low")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high={clip_high} must be at least 0; the ratio is held below 1 + clip_high")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1; pass None to leave it out")


def check_bounds(**bounds: float) -> None:
    """Require bounds that are at least 0; infinity is a bound that never holds."""
    for name, bound in bounds.items():
        if not bound >= 0.0:
            raise ValueError(f"{name}={bound} must be at least 0; pass math.inf for no bound on that side")


def check_largest_weight(**weights: float | None) -> None:
    """Require largest weights that leave a weight to give, or None."""
    for name, weight in weights.items():
        if weight is not None and not weight > 0.0:
            raise ValueError(f"{name}={weight} must be above 0; pass None to leave it out")
