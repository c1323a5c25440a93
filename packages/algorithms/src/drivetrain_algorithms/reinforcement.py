"""Advantages without a value function, whose baseline is the batch, the group or a greedy rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain_algorithms._groups import check_groups, lay_out
from drivetrain_algorithms._moments import Reduce
from drivetrain_algorithms._slots import as_float, check_batch, check_per_sequence
from drivetrain_algorithms.advantages import returns_to_go
from drivetrain_algorithms.groups import group_advantages, spread_over_tokens
from drivetrain_algorithms.whitening import whiten


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    reduce: Reduce | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """REINFORCE++: returns, whitened over all tokens of the step.

        Âₜ = (Gₜ - μ) / √(σ² + 10⁻⁸),  Gₜ = rₜ + γ Gₜ₊₁

    Where rₜ is the reward for token t, which has the KL penalty in it (`token_rewards`), and μ and σ² are the mean and
    variance of G over the unmasked tokens of all sequences of all ranks. So the call takes everything that the rank
    brings to the optimizer step, before that is split into micro-batches.

    See Hu et al., "REINFORCE++" (2025), https://arxiv.org/abs/2501.03262

    Args:
        rewards: `r`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN.
        mask: bool, of the same shape; True at the tokens that are steps. A masked slot inside a sequence is passed
            over, as in `returns_to_go`: later rewards reach the tokens before it.
        gamma: γ, the discount per token, in [0, 1].
        reduce: sums a tensor over all ranks and returns the sum; called twice, on every rank. None: there is one rank.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `Â`, of the mask's shape, in float32 (float64 for float64 input), without gradient; 0 at masked slots.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: equal returns at all tokens, a single unmasked token, and none give 0.
    """
    returns = returns_to_go(rewards.detach(), mask, gamma=gamma, cu_seqlens=cu_seqlens)
    return whiten(returns, mask, reduce=reduce)


def reinforce_plus_plus_baseline(
    scores: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    reduce: Reduce | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """REINFORCE++ with a baseline: scores less their group's mean, whitened over all tokens of the step.

        Âᵢₜ = (dᵢ - m) / √(v + 10⁻⁸),  dᵢ = sᵢ - μᵢ

    Where μᵢ is the mean score of i's group, and m and v are the mean and variance of d over the unmasked tokens of all
    responses of all ranks, so that a long response weighs more than a short one. The scale is one for all groups:
    unlike with GRPO, a group in which nearly all responses agree is not blown up. The call takes everything that the
    rank brings to the optimizer step; groups are whole.

    See Hu et al., "REINFORCE++" (2025), https://arxiv.org/abs/2501.03262

    Args:
        scores: `s`, `[B]`, or `[S]` for a packed batch, one per response.
        group_ids: of the same shape, int64 in [0, B), as for `group_advantages`.
        mask: bool, `[B, T]`, or packed `[N]`; True at the tokens that enter the loss.
        reduce: sums a tensor over all ranks and returns the sum; called twice, on every rank. None: there is one rank.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `Â`, of the mask's shape, in float32 (float64 for float64 scores), without gradient; 0 at masked slots.

    Raises:
        ValueError: a shape, dtype or `cu_seqlens` that does not fit; or an id out of range, as for `group_advantages`.

    Degenerate cases: where all groups are of equal scores or of one response, everything is 0. A response without an
    unmasked token counts in the mean of its group, and in no other number.
    """
    check_batch(mask, cu_seqlens)
    check_per_sequence(mask, cu_seqlens, scores=scores)
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    return whiten(spread_over_tokens(centred, mask, cu_seqlens=cu_seqlens), mask, reduce=reduce)


def remax(rewards: Tensor, greedy_scores: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """ReMax: what a response earned from each token on, less what the greedy response to its prompt earned.

        Âₜ = Σₖ rₜ₊ₖ - b

    Where rₜ is the reward for token t, not discounted, and b the score of the response that takes the likeliest token
    throughout. The baseline does not depend on what was sampled, so the gradient stays unbiased.

    See Li et al., "ReMax" (2023), https://arxiv.org/abs/2310.10505

    Args:
        rewards: `r`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN, and are no steps.
        greedy_scores: `b`, `[B]`, or `[S]` for a packed batch: the greedy score of each response's prompt.
        mask: bool, of the shape of the rewards; True at the tokens that are steps.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `Â`, of the mask's shape, in float32 (float64 for float64 input), without gradient; 0 at masked slots.

    Raises:
        ValueError: a shape, dtype or `cu_seqlens` that does not fit.

    Degenerate cases: a response that earned at its last token just what the greedy one did gives 0 throughout; the
    greedy score of a sequence without an unmasked slot counts for nothing.
    """
    returns = returns_to_go(rewards.detach(), mask, gamma=1.0, cu_seqlens=cu_seqlens)
    check_per_sequence(mask, cu_seqlens, greedy_scores=greedy_scores)
    return returns - spread_over_tokens(greedy_scores.detach(), mask, cu_seqlens=cu_seqlens)


def gpg_advantages(scores: Tensor, group_ids: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """GPG: scores less their group's mean, scaled up for the groups that say nothing.

        Âᵢ = α (sᵢ - μᵢ),  α = B / (B - M)

    Where μᵢ is the mean score of i's group, B the number of responses of all ranks, and M that of the responses whose
    group has equal scores. Those have no gradient, yet a mean over the batch counts them: α makes it the mean over the
    others. The paper's further divisor F_norm is 1. Where all groups have one size, α is the number of groups over the
    number of groups that say something. verl takes for B - M the number of responses with a score other than 0.

    The call takes everything that the rank brings to the optimizer step; groups are whole.

    See Chu et al., "GPG" (2025), https://arxiv.org/abs/2504.02546

    Args:
        scores: `s`, `[B]`, one per response.
        group_ids: `[B]` int64 in [0, B), as for `group_advantages`.
        reduce: sums a tensor over all ranks and returns the sum; called once, on every rank. None: there is one rank.

    Returns:
        `Â`, `[B]`, in float32 (float64 for float64 scores), without gradient; `spread_over_tokens` gives it to the
        tokens.

    Raises:
        ValueError: a shape or dtype that does not fit; or an id out of range, as for `group_advantages`.

    Degenerate cases: where no group says anything, a group of one among them, everything is 0.
    """
    check_groups(group_ids, scores=scores)
    scores = as_float(scores).detach()
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    speaking = torch.zeros_like(centred, dtype=torch.float64)
    if scores.numel():
        groups = lay_out(group_ids)
        speaking = (groups.sums((centred[groups.order] != 0).double()) > 0).double()
    counts = torch.stack((speaking.new_full((), scores.numel()), speaking.sum()))
    if reduce is not None:
        counts = reduce(counts)
    return centred * (counts[0] / counts[1].clamp(min=1.0)).to(centred.dtype)
