"""Returns and advantages: what each token was worth, given what came after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._scan import discounted_sums
from drivetrain_algorithms._slots import (
    as_float,
    check_batch,
    check_fraction,
    check_per_sequence,
    last_tokens,
    per_token,
)


class Advantages(NamedTuple):
    """What `gae` returns."""

    advantages: Tensor
    """`Â`, of the mask's shape; 0 at masked slots. Not whitened."""
    returns: Tensor
    """`R = Â + V`, the target of the value function, of the mask's shape; 0 at masked slots."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Advantages:
    """Generalized advantage estimation.

        δₜ = rₜ + γ Vₜ₊₁ - Vₜ
        Âₜ = Σₖ (γλ)ᵏ δₜ₊ₖ = δₜ + γλ Âₜ₊₁
        Rₜ = Âₜ + Vₜ

    Where t counts the unmasked slots of one sequence, rₜ is the reward for the token in slot t, Vₜ the value of the
    state in which that token was chosen, Â = 0 after the last one, and V there is 0 where the sequence ended, or the
    bootstrap value where it was cut off. A masked slot (a tool's answer, padding) is not a step: it takes no discount,
    its reward and value are not read, and the token before it is followed by the next unmasked one.

    See Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015),
    https://arxiv.org/abs/1506.02438

    The sum is taken by a parallel scan over all sequences at once. What is scanned is the λ-return seen from the token
    before, `Yₜ = Vₜ + λ Âₜ = (1 - λ) Vₜ + λ rₜ + γλ Yₜ₊₁`, since then `Rₜ = rₜ + γ Yₜ₊₁` without a look-ahead for V.

    Args:
        rewards: `r`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN.
        values: `V`, of the same shape, aligned with the rewards.
        mask: bool, of the same shape; True at the tokens that are steps.
        gamma: γ, the discount per token, in [0, 1].
        lam: λ, in [0, 1].
        bootstrap_values: `[B]`, or `[S]` for a packed batch: V of the state after the last unmasked token, for a
            sequence that was cut off before its end (by a limit on tokens or on time), and 0 for one that ended. None:
            all of them ended.
        cu_seqlens: `[S + 1]` int, where each sequence of a packed batch begins and the last one ends.

    Returns:
        `Advantages(advantages, returns)` in float32 (float64 for float64 input), 0 at masked slots. Both are linear in
        rewards, values and bootstrap values, and differentiable. A NaN or inf in an unmasked slot spreads to the tokens
        before it in its own sequence, and to no other sequence.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: `lam=1` gives `returns_to_go` minus the value; `lam=0` gives the TD error δ; `gamma=0` gives
    `r - V`, whatever was cut off; a sequence without an unmasked slot gives zeros, whatever its bootstrap value.
    Bootstrapped with `V + λ Â` of the token at which it was cut, the first part of a sequence gets the advantages that
    it has in the whole.
    """
    check_batch(mask, cu_seqlens, rewards=rewards, values=values)
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    dtype = torch.promote_types(as_float(rewards).dtype, as_float(values).dtype)
    rewards, values, skipped = rewards.to(dtype), values.to(dtype), _skipped(mask)
    if bootstrap_values is not None:
        rewards = _with_what_follows(rewards, bootstrap_values, mask, gamma, cu_seqlens)
    traces = discounted_sums(
        _cleared(torch.lerp(values, rewards, lam), skipped), skipped, discount=gamma * lam, cu_seqlens=cu_seqlens
    )
    if cu_seqlens is not None and len(traces):  # what begins a sequence follows nothing
        traces.index_fill_(0, cu_seqlens[:-1].to(traces.device, torch.int64) % len(traces), 0.0)
    returns = rewards.clone()
    returns[..., :-1].add_(traces[..., 1:], alpha=gamma)
    del traces  # so that its memory serves for the advantages
    returns = _cleared(returns, skipped)
    return Advantages(_cleared(returns - values, skipped), returns)


def returns_to_go(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The discounted sum of rewards from each token on.

        Gₜ = Σₖ γᵏ rₜ₊ₖ = rₜ + γ Gₜ₊₁

    Where t counts the unmasked slots of one sequence, and G after the last one is 0, or the bootstrap value of a
    sequence that was cut off. Masked slots are no steps, as in `gae`.

    See Sutton and Barto, "Reinforcement Learning: An Introduction" (2018), equation 3.8,
    http://incompleteideas.net/book/the-book-2nd.html

    Args:
        rewards: `r`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN.
        mask: bool, of the same shape; True at the tokens that are steps.
        gamma: γ, the discount per token, in [0, 1].
        bootstrap_values: `[B]`, or `[S]` for a packed batch: what is expected after the last unmasked token of a
            sequence that was cut off, and 0 for one that ended. None: all of them ended.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `G`, of the mask's shape, in float32 (float64 for float64 input); 0 at masked slots. It is linear in rewards and
        bootstrap values, and differentiable: rewards that carry a gradient (a KL penalty does) pass one on, so detach
        them where that is not meant.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: `gamma=0` gives the rewards; `gamma=1` the plain sum; a sequence without an unmasked slot gives
    zeros, whatever its bootstrap value.
    """
    check_batch(mask, cu_seqlens, rewards=rewards)
    check_fraction("gamma", gamma)
    rewards, skipped = as_float(rewards), _skipped(mask)
    if bootstrap_values is None:
        rewards = rewards.clone()
    else:
        rewards = _with_what_follows(rewards, bootstrap_values, mask, gamma, cu_seqlens)
    rewards = _cleared(rewards, skipped)
    return _cleared(discounted_sums(rewards, skipped, discount=gamma, cu_seqlens=cu_seqlens), skipped)


def _with_what_follows(
    rewards: Tensor, bootstrap_values: Tensor, mask: Tensor, gamma: float, cu_seqlens: Tensor | None
) -> Tensor:
    """A copy of the rewards, with γ V of the state after a sequence paid at its last unmasked token."""
    check_per_sequence(mask, cu_seqlens, bootstrap_values=bootstrap_values)
    if gamma == 0.0:  # what is discounted by 0 does not count, also where it is inf or NaN
        return rewards.clone()
    following = per_token(gamma * bootstrap_values.to(rewards.dtype), mask, cu_seqlens)
    return rewards + torch.where(last_tokens(mask, cu_seqlens), following, 0.0)


def _skipped(mask: Tensor) -> Tensor | None:
    """The slots that are no steps. None if it costs nothing to see that there are none; that saves half of the work."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and mask.numel():
        return None if mask.view(torch.uint8).amin() else ~mask
    return ~mask


def _cleared(x: Tensor, skipped: Tensor | None) -> Tensor:
    """`x`, which is overwritten, with 0 at skipped slots."""
    return x if skipped is None else x.masked_fill_(skipped, 0.0)
