"""The divergence from a reference policy: its estimators, and the controllers of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import bounded
from drivetrain_algorithms._slots import as_float, check_choice, check_coefficient, check_slots, masked

KLKind = Literal["k1", "abs", "k2", "k3"]
"""An estimator of the divergence; see `kl_estimate`."""


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: KLKind, straight_through: bool = False
) -> Tensor:
    """Estimate KL(π || π_ref) at each token, from the sampled token alone.

        dₜ = log π(yₜ) - log π_ref(yₜ)
        k1 = dₜ
        abs = |dₜ|
        k2 = ½ dₜ²
        k3 = exp(-dₜ) - 1 + dₜ

    Where yₜ is the token in slot t, sampled from π. As a *value*, k1 is unbiased and may be negative, k3 is unbiased
    and never negative, k2 is biased with little variance, and abs is a size without a sign.

    As a *loss* they differ from what they estimate, since the gradient of the sampling itself is not theirs. In
    expectation over yₜ ~ π,

        kind   its gradient is that of
        k1     nothing: it is 0
        abs    Σ |π - π_ref|, twice the total variation
        k2     KL(π || π_ref)
        k3     KL(π_ref || π)

    So k1 belongs in the rewards, which carry no gradient (`token_rewards`); as a loss it would restrain nothing, and
    is refused. `straight_through=True` keeps the value of `kind` and gives it the gradient of k2, which makes a loss of
    any kind whose expected gradient is that of KL(π || π_ref). For k1 that gradient is the score term dₜ ∇log π(yₜ).
    verl's `"k1+"` and `"k3+"` are these; TRL's default (`use_bias_correction_kl`) is the one of k3 times the ratio
    `π / π_old`.

    All of it is about one token, given those before it: as a loss, no kind counts what a token does to the divergence
    of the tokens after it. As a reward, with returns, it does.

    See Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html; for the gradients, Tang
    and Munos, "On a Few Pitfalls in KL Divergence Gradient Estimation for RL" (2025), https://arxiv.org/abs/2506.09477

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Gradients flow to this argument only. Masked slots of any
            argument may hold anything, also NaN and inf.
        ref_logprobs: `log π_ref(yₜ)`, of the same shape.
        mask: bool, of the same shape.
        kind: `"k1"`, `"abs"`, `"k2"` or `"k3"`.
        straight_through: whether the gradient is that of k2 instead of that of `kind`.

    Returns:
        Nats per token, of the same shape, in float32 (float64 for float64 input); 0 at masked slots.

    Raises:
        ValueError: a shape, dtype or kind that does not fit; or k1 of log-probabilities that carry a gradient, without
            `straight_through`.

    Degenerate cases: equal policies give exactly 0, and a gradient of 0 but for k1's; in k3 a `-d` beyond 20 counts as
    20, without gradient (straight through, with that of k2); a log-probability that is not finite in an unmasked slot
    gives a result that is not.
    """
    check_slots(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_choice("kind", kind, get_args(KLKind))
    if kind == "k1" and not straight_through and logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "kind='k1' of logprobs that carry a gradient is no loss: its expected gradient is 0; "
            "pass straight_through=True or kind='k2' for a loss, logprobs.detach() for a reward"
        )
    difference = masked(as_float(logprobs) - as_float(ref_logprobs).detach(), mask)
    match kind:
        case "k1":
            value = difference
        case "abs":
            value = difference.abs()
        case "k2":
            value = 0.5 * difference.square()
        case _:
            log_ratio = bounded(-difference)
            value = torch.expm1(log_ratio) - log_ratio
    if straight_through:
        squared = 0.5 * difference.square()
        return value.detach() + (squared - squared.detach())
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKL:
    """A coefficient of the divergence that stays what it is.

    Example:
        >>> FixedKL(kl_coef=0.05).update(observed_kl=3.0, num_samples=512).kl_coef
        0.05
    """

    kl_coef: float
    """β, at least 0, per nat."""

    def __post_init__(self) -> None:
        check_coefficient("kl_coef", self.kl_coef)

    def update(self, *, observed_kl: float, num_samples: int) -> FixedKL:
        """Return this controller: nothing observed changes it."""
        _check_observation(observed_kl, num_samples)
        return self

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: `{"kl_coef": β}`, which JSON holds exactly."""
        return {"kl_coef": self.kl_coef}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float]) -> FixedKL:
        """A controller with the coefficient of a `state_dict`.

        Raises:
            ValueError: other keys than those of a `state_dict`, or a coefficient out of range.
        """
        return cls(kl_coef=_saved_coefficient(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that steers the divergence towards a target.

        e = clip(KL / target - 1, -0.2, 0.2)
        β ← β (1 + e n / horizon)

    Where KL is the divergence observed over n samples. The whole state is `kl_coef`: target and horizon are settings. A
    controller made from the `state_dict` of another one goes on exactly where that one stood.

    See Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2,
    https://arxiv.org/abs/1909.08593

    Example:
        >>> controller = AdaptiveKL(kl_coef=0.1, target=6.0, horizon=10_000)
        >>> controller.update(observed_kl=60.0, num_samples=5_000).kl_coef
        0.11000000000000001
    """

    kl_coef: float
    """β, at least 0, per nat. From 0 it never moves, since each step multiplies it."""
    target: float
    """The divergence to steer to, above 0, in the unit of what `update` is told (nats per sequence, in the paper)."""
    horizon: int
    """The number of samples over which β can change by a fifth."""

    def __post_init__(self) -> None:
        check_coefficient("kl_coef", self.kl_coef)
        if not 0.0 < self.target < math.inf:
            raise ValueError(f"target={self.target} must be a finite number above 0")
        if self.horizon < 1:
            raise ValueError(f"horizon={self.horizon} must be at least 1 sample")

    def update(self, *, observed_kl: float, num_samples: int) -> AdaptiveKL:
        """Return the controller after a step; this one stays what it is, so assign the result.

        Args:
            observed_kl: the mean divergence of the step's samples, in the unit of `target`. To read a tensor waits for
                its device.
            num_samples: how many samples the step had, at most `horizon`.

        Raises:
            ValueError: a divergence that is not finite, or a number of samples out of range.
        """
        observed_kl = float(observed_kl)
        _check_observation(observed_kl, num_samples)
        if num_samples > self.horizon:
            raise ValueError(f"num_samples={num_samples} is more than horizon={self.horizon}; choose a longer horizon")
        error = min(max(observed_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1.0 + error * num_samples / self.horizon))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: `{"kl_coef": β}`, which JSON holds exactly."""
        return {"kl_coef": self.kl_coef}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float], *, target: float, horizon: int) -> AdaptiveKL:
        """A controller with the coefficient of a `state_dict`, and the settings given.

        Raises:
            ValueError: other keys than those of a `state_dict`, or a number out of range.
        """
        return cls(kl_coef=_saved_coefficient(state), target=target, horizon=horizon)


def _saved_coefficient(state: Mapping[str, float]) -> float:
    if set(state) != {"kl_coef"}:
        raise ValueError(f"state has the keys {sorted(state)}; pass what state_dict() returned, with the key 'kl_coef'")
    return state["kl_coef"]


def _check_observation(observed_kl: float, num_samples: int) -> None:
    if not math.isfinite(observed_kl):
        raise ValueError(f"observed_kl={observed_kl} must be a finite number; look for NaN in the log-probabilities")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
