"""The mathematics of reinforcement learning for language models, as pure functions of tensors.

Every per-token tensor is `[B, T]`, or packed `[N]` with `cu_seqlens`, and comes with a bool mask of its shape. Masked
slots may hold anything, NaN included: they give exactly zero. What is not finite in an unmasked slot is never hidden.
Losses are per token; `aggregate` makes a scalar of them over a denominator that its caller states. Arithmetic runs in
float32, or in float64 for float64 input. Nothing waits for the device but `check_finite`, and all that runs under
`value_checks`, which names the sample that holds a NaN.
"""

from drivetrain_algorithms._moments import Reduce
from drivetrain_algorithms._ratio import PolicyLoss
from drivetrain_algorithms.advantages import Advantages, gae, returns_to_go
from drivetrain_algorithms.aggregation import AggregationMode, aggregate, loss_denominator
from drivetrain_algorithms.checks import check_finite, value_checks
from drivetrain_algorithms.correction import (
    CorrectionLevel,
    DivergenceKind,
    DivergenceLevel,
    ImportanceWeights,
    Rejection,
    importance_weights,
    reject_divergent,
)
from drivetrain_algorithms.full_kl import KLDirection, full_vocabulary_kl
from drivetrain_algorithms.groups import (
    GroupBaseline,
    GroupScale,
    decoupled_group_advantages,
    group_advantages,
    pass_at_k_advantages,
    spread_over_tokens,
)
from drivetrain_algorithms.kl import AdaptiveKL, FixedKL, KLKind, kl_estimate
from drivetrain_algorithms.logprobs import logprobs_from_hidden, token_entropy, token_logprobs
from drivetrain_algorithms.mismatch import Mismatch, effective_sample_size, mismatch_metrics
from drivetrain_algorithms.policy import decoupled_ppo, entropy_bonus, ppo_clip, reinforce
from drivetrain_algorithms.policy_covariance import (
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from drivetrain_algorithms.policy_divergence import dppo_kl, dppo_tv
from drivetrain_algorithms.policy_sequence import gmpo, gspo
from drivetrain_algorithms.policy_soft import cispo, sapo
from drivetrain_algorithms.preference import (
    DPOKind,
    PreferenceLoss,
    dpo_loss,
    ipo_loss,
    reward_model_loss,
    sequence_logprobs,
)
from drivetrain_algorithms.reinforcement import (
    gpg_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from drivetrain_algorithms.rewards import token_rewards
from drivetrain_algorithms.shaping import RewardNormalizer, filter_groups, overlong_penalty
from drivetrain_algorithms.supervised import sft_loss
from drivetrain_algorithms.value import ValueLoss, ValueLossKind, clipped_value_loss, explained_variance, value_loss
from drivetrain_algorithms.whitening import whiten

__all__ = [
    "AdaptiveKL",
    "Advantages",
    "AggregationMode",
    "CorrectionLevel",
    "DPOKind",
    "DivergenceKind",
    "DivergenceLevel",
    "FixedKL",
    "GroupBaseline",
    "GroupScale",
    "ImportanceWeights",
    "KLDirection",
    "KLKind",
    "Mismatch",
    "PolicyLoss",
    "PreferenceLoss",
    "Reduce",
    "Rejection",
    "RewardNormalizer",
    "ValueLoss",
    "ValueLossKind",
    "aggregate",
    "check_finite",
    "cispo",
    "clip_cov",
    "clipped_value_loss",
    "decoupled_group_advantages",
    "decoupled_ppo",
    "dpo_loss",
    "dppo_kl",
    "dppo_tv",
    "effective_sample_size",
    "entropy_bonus",
    "explained_variance",
    "filter_groups",
    "full_vocabulary_kl",
    "gae",
    "gmpo",
    "gpg_advantages",
    "group_advantages",
    "gspo",
    "importance_weights",
    "ipo_loss",
    "kl_cov",
    "kl_estimate",
    "logprobs_from_hidden",
    "loss_denominator",
    "mismatch_metrics",
    "overlong_penalty",
    "pass_at_k_advantages",
    "ppo_clip",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reject_divergent",
    "remax",
    "returns_to_go",
    "reward_model_loss",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "sequence_logprobs",
    "sft_loss",
    "spread_over_tokens",
    "token_covariances",
    "token_entropy",
    "token_logprobs",
    "token_rewards",
    "value_checks",
    "value_loss",
    "whiten",
]
