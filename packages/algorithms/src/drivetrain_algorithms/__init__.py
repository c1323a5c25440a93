"""The mathematics of reinforcement learning for language models, as pure functions of tensors.

Every per-token tensor is `[B, T]`, or packed `[N]` with `cu_seqlens`, and comes with a bool mask of its shape. Masked
slots may hold anything, NaN included: they give exactly zero. What is not finite in an unmasked slot is never hidden.
Losses are per token; `aggregate` makes a scalar of them over a denominator that its caller states. Arithmetic runs in
float32, or in float64 for float64 input. Nothing waits for the device but `check_finite`, and all that runs under
`value_checks`, which names the sample that holds a NaN.
"""

from drivetrain_algorithms._moments import Reduce
from drivetrain_algorithms.aggregation import AggregationMode, aggregate, loss_denominator
from drivetrain_algorithms.checks import check_finite, value_checks
from drivetrain_algorithms.kl import AdaptiveKL, FixedKL, KLKind, kl_estimate
from drivetrain_algorithms.policy import PolicyLoss, ppo_clip
from drivetrain_algorithms.returns import Advantages, gae, returns_to_go
from drivetrain_algorithms.rewards import token_rewards
from drivetrain_algorithms.supervised import sft_loss
from drivetrain_algorithms.value import ValueLoss, clipped_value_loss, explained_variance
from drivetrain_algorithms.whitening import whiten

__all__ = [
    "AdaptiveKL",
    "Advantages",
    "AggregationMode",
    "FixedKL",
    "KLKind",
    "PolicyLoss",
    "Reduce",
    "ValueLoss",
    "aggregate",
    "check_finite",
    "clipped_value_loss",
    "explained_variance",
    "gae",
    "kl_estimate",
    "loss_denominator",
    "ppo_clip",
    "returns_to_go",
    "sft_loss",
    "token_rewards",
    "value_checks",
    "whiten",
]
