"""The loss of the value function, and how much of the returns it explains."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_algorithms._moments import Reduce, centred_squares, means
from drivetrain_algorithms._slots import check_slots, masked


class ValueLoss(NamedTuple):
    """A loss per token and what it was made of. Only `loss` carries a gradient."""

    loss: Tensor
    """What to minimise, of the mask's shape; 0 at masked slots. `aggregate` makes a scalar of it."""
    clipped: Tensor
    """bool: clipping holds this token's loss constant, so that it has no gradient; False at masked slots."""


def clipped_value_loss(new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> ValueLoss:
    """The squared error of the value function, with a step that is clipped like the policy's.

        Lₜ = ½ max((V(sₜ) - Rₜ)², (clip(V(sₜ), V_old(sₜ) - ε, V_old(sₜ) + ε) - Rₜ)²)

    Where V is the value function that is trained, V_old what it said when the advantages were made, and Rₜ the return.

    See Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015), section 5,
    https://arxiv.org/abs/1506.02438, for the trust region; in this form it is that of OpenAI Baselines' ppo2,
    https://github.com/openai/baselines/blob/master/baselines/ppo2/model.py

    Args:
        new_values: `V`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        values: `V_old`, of the same shape.
        returns: `R`, of the same shape, as `gae` gives them.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip: ε, above 0, in the unit of the values; `math.inf` gives the plain squared error.

    Returns:
        `ValueLoss`, per token, in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update `V = V_old`, the loss is ½ (V - R)² and the gradient V - R; a masked slot
    has a loss and a gradient of exactly 0.
    """
    check_slots(mask, new_values=new_values, values=values, returns=returns)
    if not clip > 0.0:
        raise ValueError(f"clip={clip} must be above 0; pass math.inf for the plain squared error")
    new_values = masked(new_values, mask)
    values, returns = masked(values, mask).detach(), masked(returns, mask).detach()
    unclipped = (new_values - returns).square()
    clipped = (values + (new_values - values).clamp(-clip, clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(unclipped, clipped), clipped > unclipped)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """How much of the variance of the returns the value function accounts for.

        EV = 1 - Var(R - V) / Var(R)

    Where the variances run over the unmasked slots of all ranks. 1 is a perfect value function, 0 one no better than a
    constant, below 0 one that is worse.

    Args:
        values: `V`, `[B, T]`, `[N]` or any shape.
        returns: `R`, of the same shape.
        mask: bool, of the same shape.
        reduce: sums a tensor over all ranks and returns the sum; called twice, on every rank. None: there is one rank.

    Returns:
        A scalar, float64, without gradient.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: NaN, "undefined", where all returns are equal or no slot is unmasked.
    """
    check_slots(mask, values=values, returns=returns)
    values, returns = masked(values, mask).detach().double(), masked(returns, mask).detach().double()
    both = torch.stack((returns - values, returns))
    residual, total = centred_squares(both, means(both, mask, reduce).mean, mask, reduce)
    return torch.where(total > 0, 1.0 - residual / total, torch.nan)
