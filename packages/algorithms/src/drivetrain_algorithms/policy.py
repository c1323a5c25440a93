"""Policy losses of single tokens: proximal policy optimisation, REINFORCE, and the bonus on entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import (
    PolicyLoss,
    check_clip_range,
    clipped_surrogate,
    compare,
    policy_loss,
    surrogate_slope,
)
from drivetrain_algorithms._slots import check_coefficient, check_slots, masked
from drivetrain_algorithms.correction import importance_weights


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

    It is the loss of GRPO and DAPO too, with their advantages and aggregation: verl's `vanilla` (c is `clip_ratio_c`),
    TRL's `epsilon` and `epsilon_high` (c is `delta`, where that is at least 1 + ε_high), OpenRLHF's `ppo` with
    `eps_clip_low_high`, SkyRL's `regular` and `dual_clip`.

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
    check_clip_range(clip_low, clip_high, dual_clip)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    loss, clipped = clipped_surrogate(
        tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    slope = surrogate_slope(tokens.ratio, tokens.advantages, clipped, tokens.log_ratio)
    return policy_loss(loss, slope, clipped, tokens)


def decoupled_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    clamp: tuple[float, float] | None = None,
    reject: tuple[float, float] | None = None,
) -> PolicyLoss:
    """The clipped surrogate loss for data of an older policy than the one to stay close to.

        wₜ = π_old(yₜ) / π_rollout(yₜ)
        rₜ = π(yₜ) / π_old(yₜ)
        Lₜ = -wₜ min(rₜ Âₜ, clip(rₜ, 1 - ε_low, 1 + ε_high) Âₜ)

    Where π_rollout is the policy that sampled yₜ (the behaviour policy), in asynchronous training one or more versions
    ago, and π_old the proximal policy, around which the ratio is clipped: usually that of the learner before the first
    update on the batch. The weight w is a constant. It corrects for where the data come from; the clip only limits the
    step.

    It is AReaL's `use_decoupled_loss`, with `reject=(0, behav_imp_weight_cap)`; its `c_clip` is `dual_clip`.
    With `clamp=(0, rollout_is_threshold)` it is verl's `vanilla` under `rollout_is="token"`.

    See Hilton et al., "Batch Size-Invariance for Policy Optimization" (2021), https://arxiv.org/abs/2110.00641; Fu et
    al., "AReaL" (2025), https://arxiv.org/abs/2505.24298

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape.
        rollout_logprobs: `log π_rollout(yₜ)`, of the same shape, as the sampler reported it.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip_low: ε_low, in [0, 1].
        clip_high: ε_high, at least 0; `math.inf` leaves the ratio unclipped from above.
        dual_clip: c of `ppo_clip`, above 1, or None for no dual clip.
        clamp: the least and the largest weight, as in `importance_weights` by token, or None.
        reject: likewise; a token with a weight outside has no loss. It stays in the denominator, since the mask stays
            what it is; to take it out, call `importance_weights` and pass its `keep` on.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input), where `clipped` is True at
        rejected tokens too.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: where π_old is π_rollout it is `ppo_clip`; where π_old is π, REINFORCE weighed by π / π_rollout; a
    masked slot has a loss and a gradient of exactly 0; a ratio or weight beyond e²⁰ counts as e²⁰; a log-probability
    that is not finite in an unmasked slot makes that token's loss and gradient NaN.
    """
    check_slots(
        mask,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
    )
    check_clip_range(clip_low, clip_high, dual_clip)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    loss, clipped = clipped_surrogate(
        tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    corrected = importance_weights(old_logprobs, rollout_logprobs, mask, level="token", clamp=clamp, reject=reject)
    slope = surrogate_slope(tokens.ratio, tokens.advantages, clipped, tokens.log_ratio)
    clipped = (clipped & mask) | (mask & ~corrected.keep)
    return policy_loss(corrected.weights * loss, corrected.weights * slope, clipped, tokens)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """The plain policy gradient.

        Lₜ = -Âₜ log π(yₜ)

    Where yₜ is the token in slot t, π the policy that is trained, and Âₜ the advantage. Nothing corrects for data of
    another policy than π: one update per batch. The value of the loss says nothing; its gradient is that of
    `ppo_clip` where the ratio is 1.

    With the advantages of `gpg_advantages` it is the loss of GPG, verl's `gpg`. verl's `bypass_mode` with
    `loss_type="reinforce"` is it, times importance weights.

    See Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning" (1992),
    https://doi.org/10.1007/BF00992696; Chu et al., "GPG" (2025), https://arxiv.org/abs/2504.02546

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        old_logprobs: `log π_old(yₜ)`, of the same shape; for the metrics alone.
        advantages: `Â`, of the same shape.
        mask: bool, of the same shape; True at the tokens that enter the loss.

    Returns:
        `PolicyLoss`, per token, in float32 (float64 for float64 input). `clipped` is False everywhere.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: a masked slot has a loss and a gradient of exactly 0; an advantage of 0 has a gradient of 0; an
    unmasked token of probability 0 has a loss that is not finite; an `old_logprobs` that is not finite in an unmasked
    slot shows in the metrics.
    """
    check_slots(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    tokens = compare(logprobs, old_logprobs, advantages, mask)
    slope = -tokens.advantages
    return policy_loss(slope * tokens.logprobs.detach(), slope, torch.zeros_like(mask), tokens)


def entropy_bonus(entropies: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """A reward for staying undecided, as a loss to add to a policy loss before `aggregate`.

        Lₜ = -β Hₜ

    Where Hₜ is the entropy of the distribution from which the token in slot t was drawn.

    It is `entropy_coeff` in verl, `entropy_loss_coef` in SkyRL, `actor.entropy_coef` in OpenRLHF.

    See Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning" (2016), https://arxiv.org/abs/1602.01783

    Args:
        entropies: `H`, in nats, `[B, T]`, `[N]` or any shape. Masked slots may hold anything, also NaN and inf.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        coef: β, at least 0, in loss per nat.

    Returns:
        The loss per token, of the same shape, in float32 (float64 for float64 input), with the gradient of `entropies`;
        0 at masked slots.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: `coef=0` gives 0, with a gradient of 0; a masked slot has a loss and a gradient of exactly 0.
    """
    check_slots(mask, entropies=entropies)
    check_coefficient("coef", coef)
    return -coef * masked(entropies, mask)
