"""Returns and advantages: what each token was worth, given what came after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._scan import discounted_sums
from drivetrain_algorithms._slots import as_float, check_batch, check_fraction


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
    cu_seqlens: Tensor | None = None,
) -> Advantages:
    """Generalized advantage estimation.

        δₜ = rₜ + γ Vₜ₊₁ - Vₜ
        Âₜ = Σₖ (γλ)ᵏ δₜ₊ₖ = δₜ + γλ Âₜ₊₁
        Rₜ = Âₜ + Vₜ

    Where t counts the unmasked slots of one sequence, rₜ is the reward for the token in slot t, Vₜ the value of the
    state in which that token was chosen, and V = Â = 0 after the last one: every sequence ends. A masked slot (a tool's
    answer, padding) is not a step: it takes no discount, its reward and value are not read, and the token before it is
    followed by the next unmasked one.

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
        cu_seqlens: `[S + 1]` int, where each sequence of a packed batch begins and the last one ends.

    Returns:
        `Advantages(advantages, returns)` in float32 (float64 for float64 input), 0 at masked slots. A NaN or inf in an
        unmasked slot spreads to the tokens before it in its own sequence, and to no other sequence.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: `lam=1` gives `returns_to_go` minus the value; `lam=0` gives the TD error δ; `gamma=0` gives
    `r - V`; a sequence without an unmasked slot gives zeros.
    """
    check_batch(mask, cu_seqlens, rewards=rewards, values=values)
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    rewards, values, skipped = as_float(rewards), as_float(values), _skipped(mask)
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


def returns_to_go(rewards: Tensor, mask: Tensor, *, gamma: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """The discounted sum of rewards from each token on.

        Gₜ = Σₖ γᵏ rₜ₊ₖ = rₜ + γ Gₜ₊₁

    Where t counts the unmasked slots of one sequence and G = 0 after the last one. Masked slots are no steps, as in
    `gae`.

    See Sutton and Barto, "Reinforcement Learning: An Introduction" (2018), equation 3.8,
    http://incompleteideas.net/book/the-book-2nd.html

    Args:
        rewards: `r`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN.
        mask: bool, of the same shape; True at the tokens that are steps.
        gamma: γ, the discount per token, in [0, 1].
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `G`, of the mask's shape, in float32 (float64 for float64 input); 0 at masked slots.

    Raises:
        ValueError: a shape, dtype, coefficient or `cu_seqlens` that does not fit.

    Degenerate cases: `gamma=0` gives the rewards; `gamma=1` the plain sum; a sequence without an unmasked slot zeros.
    """
    check_batch(mask, cu_seqlens, rewards=rewards)
    check_fraction("gamma", gamma)
    skipped = _skipped(mask)
    rewards = _cleared(as_float(rewards).clone(), skipped)
    return _cleared(discounted_sums(rewards, skipped, discount=gamma, cu_seqlens=cu_seqlens), skipped)


def _skipped(mask: Tensor) -> Tensor | None:
    """The slots that are no steps. None if it costs nothing to see that there are none; that saves half of the work."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and mask.numel():
        return None if mask.view(torch.uint8).amin() else ~mask
    return ~mask


def _cleared(x: Tensor, skipped: Tensor | None) -> Tensor:
    """`x`, which is overwritten, with 0 at skipped slots."""
    return x if skipped is None else x.masked_fill_(skipped, 0.0)
