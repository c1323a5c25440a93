"""The loss of the value function, and how much of the returns it explains."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._moments import Reduce, deviations, means, squares_of
from drivetrain_algorithms._slots import check_choice, check_slots, masked

ValueLossKind = Literal["squared", "huber"]
"""How an error of the value function counts; see `value_loss`."""


class ValueLoss(NamedTuple):
    """A loss per token and what it was made of. Only `loss` carries a gradient."""

    loss: Tensor
    """What to minimise, of the mask's shape; 0 at masked slots. `aggregate` makes a scalar of it."""
    clipped: Tensor
    """bool: clipping holds this token's loss constant, so that it has no gradient; False at masked slots."""


def value_loss(
    new_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    kind: ValueLossKind = "squared",
    delta: float | None = None,
) -> ValueLoss:
    """The error of the value function.

        eₜ = V(sₜ) - Rₜ
        squared:  Lₜ = ½ eₜ²
        huber:    Lₜ = ½ eₜ²             where |eₜ| <= δ
                  Lₜ = δ (|eₜ| - ½ δ)    elsewhere

    Where V is the value function that is trained and Rₜ the return. The Huber loss bounds the gradient by δ, so that no
    return that is far off takes over a step.

    See Huber, "Robust Estimation of a Location Parameter" (1964), https://doi.org/10.1214/aoms/1177703732

    Args:
        new_values: `V`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        returns: `R`, of the same shape, as `gae` gives them.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        kind: `"squared"` or `"huber"`.
        delta: δ, a finite number above 0, in the unit of the values, for `"huber"`; None for `"squared"`.

    Returns:
        `ValueLoss`, per token, in float32 (float64 for float64 input); nothing is clipped.

    Raises:
        ValueError: a shape, dtype or kind that does not fit, or a `delta` that is missing, out of range or of no use.

    Degenerate cases: `V = R` gives a loss and a gradient of 0; a δ beyond every error gives the squared one; a masked
    slot has a loss and a gradient of exactly 0.
    """
    check_slots(mask, new_values=new_values, returns=returns)
    _check_kind(kind, delta)
    loss = _penalty(masked(new_values, mask) - masked(returns, mask).detach(), delta)
    return ValueLoss(loss, torch.zeros_like(mask))


def clipped_value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float,
    kind: ValueLossKind = "squared",
    delta: float | None = None,
) -> ValueLoss:
    """The error of the value function, with a step that is clipped like the policy's.

        Lₜ = max(h(V(sₜ) - Rₜ), h(clip(V(sₜ), V_old(sₜ) - ε, V_old(sₜ) + ε) - Rₜ))

    Where V is the value function that is trained, V_old what it said when the advantages were made, Rₜ the return, and
    h the loss of an error as in `value_loss`: `h(e) = ½ e²`, or Huber's.

    See Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015), section 5,
    https://arxiv.org/abs/1506.02438, for the trust region; in this form it is that of OpenAI Baselines' ppo2,
    https://github.com/openai/baselines/blob/master/baselines/ppo2/model.py

    Args:
        new_values: `V`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        values: `V_old`, of the same shape.
        returns: `R`, of the same shape, as `gae` gives them.
        mask: bool, of the same shape; True at the tokens that enter the loss.
        clip: ε, above 0, in the unit of the values; `math.inf` gives `value_loss`.
        kind: `"squared"` or `"huber"`.
        delta: Huber's δ, a finite number above 0, in the unit of the values; None for `"squared"`.

    Returns:
        `ValueLoss`, per token, in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, dtype, kind or coefficient that does not fit.

    Degenerate cases: before the first update `V = V_old`, and loss and gradient are those of `value_loss`; a masked
    slot has a loss and a gradient of exactly 0.
    """
    check_slots(mask, new_values=new_values, values=values, returns=returns)
    if not clip > 0.0:
        raise ValueError(f"clip={clip} must be above 0; pass math.inf for the plain squared error")
    _check_kind(kind, delta)
    new_values = masked(new_values, mask)
    values, returns = masked(values, mask).detach(), masked(returns, mask).detach()
    unclipped = _penalty(new_values - returns, delta)
    clipped = _penalty(new_values.clamp(values - clip, values + clip) - returns, delta)
    return ValueLoss(torch.maximum(unclipped, clipped), clipped > unclipped)


def _check_kind(kind: str, delta: float | None) -> None:
    check_choice("kind", kind, get_args(ValueLossKind))
    if (kind == "huber") != (delta is not None):
        raise ValueError(f"delta={delta} with kind={kind!r}; huber takes one, squared does not")
    if delta is not None and not 0.0 < delta < math.inf:
        raise ValueError(f"delta={delta} must be a finite number above 0; kind='squared' is without a limit")


def _penalty(error: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return 0.5 * error.square()
    size = error.abs()
    near = size.clamp(max=delta)
    return near * (size - 0.5 * near)


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
    residual, total = squares_of(deviations(both, means(both, mask, reduce).mean, mask), reduce)
    return torch.where(total > 0, 1.0 - residual / total, torch.nan)
