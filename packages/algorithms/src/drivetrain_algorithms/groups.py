"""Advantages within groups: what a response was worth, next to its siblings from the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._groups import Groups, check_groups, check_not_negative, lay_out
from drivetrain_algorithms._scan import discounted_sums
from drivetrain_algorithms._slots import (
    as_float,
    check_batch,
    check_choice,
    check_coefficient,
    check_per_sequence,
    masked,
    per_token,
)

GroupBaseline = Literal["mean", "leave_one_out", "optimal", "none"]
"""What is taken off a score; see `group_advantages`."""

GroupScale = Literal["std", "none", "mean"]
"""What a score is divided by; see `group_advantages`."""

_EPSILON = 1e-6


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    baseline: GroupBaseline,
    scale: GroupScale,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compare each response's score with those of its group.

        Âᵢ = (sᵢ - bᵢ) / c

        baseline        b
        mean            μ = Σⱼ sⱼ / n
        leave_one_out   Σⱼ₌ᵢ̸ sⱼ / (n - 1), the mean of the others
        optimal         Σⱼ lⱼ sⱼ / Σⱼ lⱼ, which has the least variance where the gradient's square grows with the length
        none            0

        scale           c
        std             σ + 10⁻⁶, with σ² = Σⱼ (sⱼ - μ)² / (n - 1)
        none            1
        mean            μ

    Where the sums run over the n responses of the group that i belongs to, and lⱼ is the length of response j. By name:

        GRPO      baseline="mean",           scale="std"
        Dr. GRPO  baseline="mean",           scale="none"
        RLOO      baseline="leave_one_out",  scale="none"
        OPO       baseline="optimal",        scale="none"
        MaxRL     baseline="mean",           scale="mean"

    A group is whole: all its responses are in this call, on this rank. Its numbers depend on no other group, so a batch
    may be split between groups. Nothing is whitened; `whiten` does that for whoever asks.

    See Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300, for GRPO; Liu et al., "Understanding
    R1-Zero-Like Training" (2025), https://arxiv.org/abs/2503.20783, for Dr. GRPO; Ahmadian et al., "Back to Basics"
    (2024), https://arxiv.org/abs/2402.14740, for RLOO; Hao et al., "On-Policy RL with Optimal Reward Baseline" (2025),
    https://arxiv.org/abs/2505.23585, for OPO; Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026),
    https://arxiv.org/abs/2602.02710, for MaxRL.

    Args:
        scores: `s`, `[B]`, one per response. With `scale="mean"` at least 0.
        group_ids: `[B]` int64 in [0, B), equal for the responses of one group; in any order, with any gaps, and groups
            may differ in size. `torch.unique(keys, return_inverse=True)[1]` makes ids of any keys.
        baseline: what is taken off.
        scale: what the rest is divided by.
        lengths: `l`, `[B]` int, at least 0, in tokens; for `baseline="optimal"` only.

    Returns:
        `Â`, `[B]`, in float32 (float64 for float64 scores), without gradient; `spread_over_tokens` gives it to the
        tokens. A permuted batch gives the same bits, permuted. A score that is not finite makes what depends on it so,
        in its own group and in no other.

    Raises:
        ValueError: a shape, dtype, baseline or scale that does not fit; `lengths` that are missing or have no use; an
            id out of range, a negative length, or a negative score with `scale="mean"`. On an accelerator the last
            three are only seen under `value_checks`; without, such an id names a group like any other, and such a score
            makes its group NaN.

    Degenerate cases: equal scores give exactly 0, whatever the scale, unless the baseline is none; with `scale="std"`
    then too. A group of one has nothing to be compared with and gives 0: also with `leave_one_out`, where the raw score
    (verl gives that) would be on another scale than what its neighbours get. With `baseline="none", scale="none"` it
    gives the score. With `scale="mean"` a group whose scores are all 0 gives 0; with `optimal` one whose lengths are
    all 0 does.
    """
    check_groups(group_ids, scores=scores)
    check_choice("baseline", baseline, get_args(GroupBaseline))
    check_choice("scale", scale, get_args(GroupScale))
    if (baseline == "optimal") != (lengths is not None):
        given = "None" if lengths is None else "a tensor"
        raise ValueError(
            f"lengths is {given} with baseline={baseline!r}; optimal takes lengths, no other baseline does"
        )
    if lengths is not None:
        check_groups(group_ids, lengths=lengths)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
            raise ValueError(f"lengths has dtype {lengths.dtype}; pass whole numbers of tokens, for instance int64")
        check_not_negative("lengths", lengths)
    if scale == "mean":
        check_not_negative("scores", scores)
    if scores.numel() == 0:
        return as_float(scores).detach()

    scores = as_float(scores).detach()
    groups = lay_out(group_ids, *(() if lengths is None else (lengths,)), scores)
    weights = None if lengths is None else lengths[groups.order].double()
    advantages = _compared(scores[groups.order].double(), groups, baseline, scale, weights)
    return groups.in_batch_order(advantages).to(scores.dtype)


def _compared(
    scores: Tensor, groups: Groups, baseline: GroupBaseline, scale: GroupScale, weights: Tensor | None
) -> Tensor:
    """`(s - b) / c` for scores in float64 that lie group after group."""
    if scale == "mean":
        scores = torch.where(scores < 0, torch.nan, scores)
    sizes = groups.sizes()
    others = (sizes - 1).clamp(min=1)
    # Relative to the group's least score, equal ones are 0 exactly, and a large mean costs no digits.
    least = scores[groups.bounds[groups.group]]
    above = scores - least
    mean_above = groups.sums(above) / sizes
    centred = above - mean_above
    if baseline == "mean":
        advantages = centred
    elif baseline == "leave_one_out":
        advantages = centred * (sizes / others)
    elif weights is not None:
        total = groups.sums(weights)
        advantages = above - groups.sums(weights * above) / total
        advantages = torch.where(total == 0, 0.0 * above, advantages)
    else:
        advantages = scores
    if scale == "std":
        std = (groups.sums(centred.square()) / others).sqrt()
        return torch.where(std == 0, 0.0, advantages / (std + _EPSILON))
    if scale == "mean":
        mean = least + mean_above
        return torch.where(mean == 0, 0.0, advantages / mean)
    return advantages


def pass_at_k_advantages(scores: Tensor, group_ids: Tensor, *, k: int) -> Tensor:
    """What a response adds to the best of k.

        Âᵢ = mean over S of [max(S) - max(S without i)]

    Where S runs over the subsets of k responses of i's group that contain i, and max is the highest score of a set,
    with 0 for the empty one. For scores of 0 and 1 the objective is pass@k, else it is max@k. Its gradient is k times
    the mean of `Â ∇ log π` over the responses of a group.

    With the group's scores in rising order, s₀ ≤ s₁ ≤ ..., the best of the others lies below s_l with probability
    C(l, k - 1) / C(n - 1, k - 1), so that

        Âᵢ = Σ_{l ≤ i} (s_l - s_{l-1}) C(l, k - 1) / C(n - 1, k - 1)     with s₋₁ = 0

    See Walder and Karkhanis, "Pass@K Policy Optimization" (2025), https://arxiv.org/abs/2505.15201, whose
    leave-one-out-minus-one estimator this is, but for the constant k / n.

    Args:
        scores: `s`, `[B]`, one per response.
        group_ids: `[B]` int64 in [0, B), as for `group_advantages`; groups are whole.
        k: the number of responses of which the best one counts, at least 1.

    Returns:
        `Â`, `[B]`, in float32 (float64 for float64 scores), without gradient; at least 0 for k above 1. A NaN makes its
        group NaN, and no other.

    Raises:
        ValueError: a shape, dtype or k that does not fit; or an id out of range, as for `group_advantages`.

    Degenerate cases: `k=1` gives the scores themselves, the estimator without a baseline (`group_advantages` with
    `leave_one_out` has the same mean and less variance). For k above 1 equal scores give exactly 0. With k the size of
    the group, the best response gets its lead over the second best and all others 0, which is verl's GRPO_PASSK without
    the division by the standard deviation. A group smaller than k has no such subset and gives 0.
    """
    check_groups(group_ids, scores=scores)
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k} must be a whole number, at least 1 response")
    scores = as_float(scores).detach()
    if scores.numel() == 0:
        return scores
    groups = lay_out(group_ids, -scores)
    falling = scores[groups.order].double()
    slots = torch.arange(len(falling), device=falling.device)
    worse = groups.bounds[groups.group + 1] - 1 - slots
    following = torch.where(worse > 0, falling.roll(-1), 0.0)
    below = (_log_choose(worse, k - 1) - _log_choose(groups.sizes() - 1, k - 1)).exp()
    steps = (falling - following) * torch.where(worse >= k - 1, below, 0.0)
    advantages = discounted_sums(steps, None, discount=1.0, cu_seqlens=groups.bounds)
    return groups.in_batch_order(advantages).to(scores.dtype)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """`log(n (n - 1) ... (n - k + 1))`, which is `log C(n, k)` but for a constant; for n of at least k."""
    n = n.double()
    return torch.lgamma(n + 1.0) - torch.lgamma((n - k).clamp(min=0.0) + 1.0)


def decoupled_group_advantages(scores: Tensor, group_ids: Tensor, *, weights: Sequence[float]) -> Tensor:
    """Normalise each of several rewards within its group on its own, then add them up.

        Âᵢ = Σ_r w_r (sᵢᵣ - μᵣ) / (σᵣ + 10⁻⁶)

    Where μᵣ and σᵣ are the mean and the standard deviation of reward r in i's group, as in `group_advantages` with
    `baseline="mean", scale="std"`. Added up before they are normalised, different combinations of rewards would fall
    together, and the reward with the largest spread would drown the others. This is GDPO up to its last step, which
    whitens over the batch: that is the caller's `whiten`, over responses (with a mask of one slot per response) or,
    after `spread_over_tokens`, over tokens.

    See Liu et al., "GDPO" (2026), https://arxiv.org/abs/2601.05242

    Args:
        scores: `s`, `[B, R]`, R scores for each response, one from each reward function.
        group_ids: `[B]` int64 in [0, B), as for `group_advantages`; groups are whole.
        weights: `w`, R finite numbers, at least 0.

    Returns:
        `Â`, `[B]`, in float32 (float64 for float64 scores), without gradient.

    Raises:
        ValueError: a shape, dtype or number of weights that does not fit, a negative weight; or an id out of range, as
            for `group_advantages`.

    Degenerate cases: one reward with weight 1 is GRPO; a reward that is equal throughout a group adds exactly 0 there,
    and so does any reward to a group of one.
    """
    if scores.dim() != 2 or scores.shape[1] == 0 or len(weights) != scores.shape[1]:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} with {len(weights)} weights; pass [B, R] and R weights"
        )
    for r, weight in enumerate(weights):
        check_coefficient(f"weights[{r}]", weight)
    advantages = (
        weight * group_advantages(column, group_ids, baseline="mean", scale="std")
        for weight, column in zip(weights, scores.unbind(1), strict=True)
    )
    return torch.stack(tuple(advantages)).sum(0)


def spread_over_tokens(x: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Give a number per sequence to each of its unmasked tokens.

    Args:
        x: `[B]`, or `[S]` for a packed batch, such as the advantage of each response.
        mask: bool, `[B, T]`, or packed `[N]`.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        Of the mask's shape, in float32 (float64 for float64 input, bool for bool), with the gradient of `x`; 0 at
        masked slots.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: the number of a sequence without an unmasked slot counts for nothing, also if it is NaN, and its
    gradient is 0.
    """
    check_batch(mask, cu_seqlens)
    check_per_sequence(mask, cu_seqlens, x=x)
    spread = per_token(x, mask, cu_seqlens)
    return mask & spread if x.dtype is torch.bool else masked(spread, mask)
