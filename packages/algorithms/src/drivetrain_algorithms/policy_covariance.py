"""Policy losses that keep the entropy up by holding back the few tokens that spend it: those of high covariance.

The choice of those tokens rests on means and ranks over a whole optimizer step. So it is not made in the losses: make
it once per step, for all its tokens on all ranks, before the step is cut into micro-batches,

    covariances = token_covariances(old_logprobs, advantages, mask, reduce=reduce)
    selected = select_kl_cov(covariances, mask, fraction=2e-3, reduce=reduce)

and hand each micro-batch its part of `selected`, as of any other tensor per token. Then neither the loss nor its
gradient depends on how the step was split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._moments import Reduce, deviations, means
from drivetrain_algorithms._ratio import (
    PolicyLoss,
    check_clip_range,
    clipped_surrogate,
    compare,
    policy_loss,
    surrogate_slope,
)
from drivetrain_algorithms._slots import check_coefficient, check_fraction, check_slots, masked


def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Each token's share of the covariance between log-probability and advantage.

        Cₜ = (log π(yₜ) - mean log π(y)) (Âₜ - mean Â)

    Where the means run over the unmasked tokens of all ranks. The mean of C is the rate at which a policy-gradient step
    lowers the entropy: likely tokens of high advantage make the policy surer of what it was sure of.

    See Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025),
    https://arxiv.org/abs/2505.22617

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape, of all tokens of this rank in the optimizer step. Before
            the first update on a batch they are the `old_logprobs`; for a later one, use these still, or run the policy
            again. Masked slots may hold anything, also NaN and inf.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape.
        reduce: sums a tensor over all ranks and returns the sum; called once, on every rank. None: there is one rank.

    Returns:
        `C`, of the same shape, in float32 (float64 for float64 input), without gradient; 0 at masked slots.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: equal advantages, or equal log-probabilities, give zeros, as does a batch without an unmasked
    slot; a NaN in an unmasked slot makes all of C NaN, of which `select_clip_cov` and `select_kl_cov` select nothing.
    """
    check_slots(mask, logprobs=logprobs, advantages=advantages)
    logprobs, advantages = masked(logprobs, mask).detach(), masked(advantages, mask).detach()
    both = torch.stack((logprobs, advantages))
    deviation = deviations(both, means(both, mask, reduce).mean, mask)
    return deviation.prod(0).to(both.dtype)


def select_clip_cov(
    covariances: Tensor,
    uniforms: Tensor,
    mask: Tensor,
    *,
    lower: float,
    upper: float,
    fraction: float,
    reduce: Reduce | None = None,
) -> Tensor:
    """Draw the tokens that `clip_cov` leaves out: a few, at random, of those with a covariance between two bounds.

        candidates = {t : lower < Cₜ < upper}
        selected = the k candidates with the largest uₜ, all if there are fewer,  k = max(1, ⌊fraction n⌋)

    Where n is the number of unmasked tokens, and both n and the k run over all ranks. With uₜ uniform that is a draw
    without replacement. The draw is the caller's, so that it can be repeated, and does not depend on how the batch lies
    in memory. The search for the border takes 32 passes over the tensor, and 32 reductions of one number.

    The bounds are `clip_cov_lb` and `clip_cov_ub` of verl and SkyRL (1 and 5 there), the fraction their
    `clip_cov_ratio` and `clip_ratio` (2e-4). They draw from those tokens only that `ppo_clip` does not clip; to select
    one of the others too changes its loss, not its gradient, which is 0 either way.

    See Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025),
    https://arxiv.org/abs/2505.22617

    Args:
        covariances: `C`, `[B, T]`, `[N]` or any shape, of all tokens of this rank in the optimizer step, as
            `token_covariances` gives them. Masked slots of any argument may hold anything, also NaN.
        uniforms: `u`, of the same shape, drawn by the caller (`torch.rand`), on each rank its own; compared in float32.
        mask: bool, of the same shape.
        lower: the lower bound of the covariance.
        upper: the upper bound, above `lower`; `math.inf` for none.
        fraction: how many to select, as a fraction of all unmasked tokens, in [0, 1].
        reduce: sums a tensor over all ranks and returns the sum; called 33 times, on every rank. None: there is one
            rank.

    Returns:
        bool, of the same shape; False at masked slots.

    Raises:
        ValueError: a shape, dtype or number that does not fit.

    Degenerate cases: `fraction=0` selects nothing, as does an empty set of candidates; equal numbers u at the border
    are all left out.
    """
    check_slots(mask, covariances=covariances, uniforms=uniforms)
    if not lower < upper:
        raise ValueError(f"lower={lower} must be below upper={upper}; candidates lie between them")
    check_fraction("fraction", fraction)
    candidates = mask & (covariances > lower) & (covariances < upper)
    return _largest(uniforms, candidates, _fraction_of(mask, fraction, reduce), reduce)


def select_kl_cov(covariances: Tensor, mask: Tensor, *, fraction: float, reduce: Reduce | None = None) -> Tensor:
    """Select the tokens that `kl_cov` penalises: those of the largest covariance.

        selected = the k unmasked tokens with the largest Cₜ,  k = max(1, ⌊fraction n⌋)

    Where n is the number of unmasked tokens, and both n and the k run over all ranks. The search for the border takes
    32 passes over the tensor, and 32 reductions of one number; nothing is sorted, and no rank sees another's tokens.

    The fraction is `kl_cov_ratio` of verl and `kl_cov_frac` of SkyRL.

    See Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025),
    https://arxiv.org/abs/2505.22617

    Args:
        covariances: `C`, `[B, T]`, `[N]` or any shape, of all tokens of this rank in the optimizer step, as
            `token_covariances` gives them; compared in float32. Masked slots may hold anything, also NaN.
        mask: bool, of the same shape.
        fraction: how many to select, as a fraction of all unmasked tokens, in [0, 1].
        reduce: sums a tensor over all ranks and returns the sum; called 33 times, on every rank. None: there is one
            rank.

    Returns:
        bool, of the same shape; False at masked slots.

    Raises:
        ValueError: a shape, dtype or number that does not fit.

    Degenerate cases: `fraction=0` selects nothing, `fraction=1` all; equal covariances at the border are all left out,
    so that a batch of equal advantages has none selected; NaN is never selected.
    """
    check_slots(mask, covariances=covariances)
    check_fraction("fraction", fraction)
    numbers = mask & ~torch.isnan(covariances)
    return _largest(covariances, numbers, _fraction_of(mask, fraction, reduce), reduce)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clip-Cov: the clipped surrogate loss without a few tokens of high covariance.

        Lₜ = 0                       where t is selected
        Lₜ = the loss of `ppo_clip`  else

    It is verl's and SkyRL's `clip_cov`, with the tokens of `select_clip_cov`, chosen over the whole step and not in
    each micro-batch.

    See Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025),
    https://arxiv.org/abs/2505.22617

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        selected: bool, of the same shape: the tokens to leave out, as `select_clip_cov` gives them for the whole step.
        clip_low: ε_low, in [0, 1].
        clip_high: ε_high, at least 0; `math.inf` leaves the ratio unclipped from above.
        dual_clip: c of `ppo_clip`, above 1, or None for no dual clip.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is True at selected tokens too.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: with no token selected it is `ppo_clip`, whose degenerate cases it has.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, selected=selected)
    _check_selected(selected)
    check_clip_range(clip_low, clip_high, dual_clip)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    loss, clipped = clipped_surrogate(
        tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    slope = surrogate_slope(tokens.ratio, tokens.advantages, clipped, tokens.log_ratio)
    # Products, so that NaN stays NaN.
    return policy_loss(loss * ~selected, slope * ~selected, (clipped | selected) & mask, tokens)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    kl_coef: float,
) -> PolicyLoss:
    """KL-Cov: the unclipped surrogate loss, with a penalty on the tokens of highest covariance.

        Lₜ = -rₜ Âₜ + [t is selected] β |log π(yₜ) - log π_old(yₜ)|

    Where rₜ = π(yₜ) / π_old(yₜ). The penalty has no gradient while π is still π_old, and pulls with a constant force
    once it is not.

    It is verl's and SkyRL's `kl_cov` (β is `ppo_kl_coef`), with the tokens of `select_kl_cov`, chosen over the whole
    step and not in each micro-batch.

    See Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025),
    https://arxiv.org/abs/2505.22617

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        selected: bool, of the same shape: the tokens to penalise, as `select_kl_cov` gives them for the whole step.
        kl_coef: β, at least 0, in loss per nat.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is True at the tokens that are
        penalised; they have a gradient.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: with no token selected, or `kl_coef=0`, it is the plain surrogate -r Â, which is `ppo_clip` with
    `clip_low=1` and `clip_high=math.inf`; before the first update the loss is -Â and the gradient -Â; a masked slot has
    a loss and a gradient of exactly 0; a ratio beyond e²⁰ counts as e²⁰, without gradient; a log-probability that is
    not finite in an unmasked slot makes that token's loss and gradient NaN.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, selected=selected)
    _check_selected(selected)
    check_coefficient("kl_coef", kl_coef)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    penalised = selected & mask
    strength = kl_coef * penalised
    loss = -tokens.ratio * tokens.advantages + strength * tokens.log_ratio.abs()
    slope = surrogate_slope(tokens.ratio, tokens.advantages, torch.zeros_like(mask), tokens.log_ratio)
    return policy_loss(loss, slope + strength * tokens.log_ratio.sign(), penalised, tokens)


def _check_selected(selected: Tensor) -> None:
    if selected.dtype is not torch.bool:
        raise ValueError(f"selected has dtype {selected.dtype}; pass a bool tensor, True at the selected tokens")


def _fraction_of(mask: Tensor, fraction: float, reduce: Reduce | None) -> Tensor:
    """How many tokens a fraction of all unmasked ones of all ranks is, at least 1 if it is not 0: float64."""
    count = mask.sum(dtype=torch.float64)
    if reduce is not None:
        count = reduce(count)
    return (fraction * count).floor().clamp(min=1.0 if fraction > 0.0 else 0.0)


def _largest(x: Tensor, candidates: Tensor, count: Tensor, reduce: Reduce | None) -> Tensor:
    """The candidates of all ranks with the `count` largest x, in float32; equal ones at the border are left out.

    What is searched by bisection is the least border with at most `count` candidates above it. It runs over the bit
    patterns of float32, read as signed integers in the order of the numbers, so that 32 halvings find it exactly.
    """
    bits = x.detach().float().view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    low, high = (torch.full_like(count, bound, dtype=torch.int64) for bound in (-(2**31), 2**31))
    for _ in range(32):
        border = (low + high) >> 1
        above = (candidates & (keys > border)).sum(dtype=torch.float64)
        if reduce is not None:
            above = reduce(above)
        few = above <= count
        low, high = torch.where(few, low, border), torch.where(few, border, high)
    return candidates & (keys > high)
