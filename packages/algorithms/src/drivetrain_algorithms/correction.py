"""Correcting for the engine that sampled: its policy is not quite the one the learner computes.

The engine has other kernels, another precision, and in an asynchronous run older weights. Three policies are told
apart: the one that sampled (`rollout_logprobs`, as the engine reported them), the one before the first update on the
batch, as the learner computes it (`old_logprobs`), and the one that is trained (`logprobs`). A policy loss weighs the
third against the second, `importance_weights` the second against the first; multiply the loss per token by the weights:

    corrected = importance_weights(old_logprobs, rollout_logprobs, mask, level="token", clamp=(0.0, 2.0))
    policy = ppo_clip(logprobs, old_logprobs, advantages, corrected.keep, clip_low=0.2, clip_high=0.2)
    loss = aggregate(policy.loss * corrected.weights, corrected.keep, mode=mode, denominator=denominator)

With the denominator counted over `corrected.keep` too, a rejected token leaves the mean; with `mask` in place of `keep`
in `aggregate` and `loss_denominator`, it stays in it as a zero. Two calls in a row combine: the `keep` of the first is
the `mask` of the second. Reject by sequence first.

    what it is called                               what to call; C is the upper bound
    TIS; verl decoupled_token_is, TRL               importance_weights, level="token", clamp=(0, C)
      token_truncate, AReaL token clamp
    open-instruct rho_clamp, OpenRLHF               level="token", clamp=(low, high)
      is_correction_level token
    IcePop; verl decoupled_token_icepop,            level="token", reject=(low, high)
      open-instruct rho_mask
    TRL token_mask, AReaL token mask                level="token", reject=(0, C)
    sequence TIS; verl decoupled_seq_is, TRL        level="sequence", clamp=(0, C)
      sequence_truncate
    MIS; TRL sequence_mask                          level="sequence", reject=(0, C)
    verl decoupled_seq_is_rs, "low_high"            level="sequence", clamp=(0, C), reject=(1/high, 1/low)
    verl decoupled_geo_rs, "low_high"               level="geometric", clamp=(1, 1), reject=(1/high, 1/low)
    OpenRLHF is_correction_level seq; verl          level="geometric", reject=...; then, over its `keep`,
      decoupled_geo_rs_token_tis                    level="token", clamp=(0, C)
    verl decoupled_k3_rs                            reject_divergent, kind="k3", level="sequence_mean"
    KPop; verl binary_kl                            reject_divergent, kind="binary_kl", level="token"
    verl rollout_is_batch_normalize                 weights / aggregate(weights, mask, ...) over the whole step: their
                                                    mean, with mode="token_mean" or "seq_mean_token_mean"
    verl bypass_mode, open-instruct                 none: old_logprobs = rollout_logprobs, so every weight is 1
      policy_ratio_denominator="rollout_policy"

What other frameworks reject stays in their divisor, as with `mask` here; but in verl with `trainer.use_v1=False`, where
what `rollout_rs` rejects leaves it, as with `keep`. verl bounds the inverse ratio, π_rollout / π_old, in its rejections
by k1: hence 1/high and 1/low.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._ratio import bounded
from drivetrain_algorithms._slots import (
    check_batch,
    check_choice,
    check_slots,
    masked,
    per_token,
    sequence_sums,
    token_counts,
)

CorrectionLevel = Literal["token", "sequence", "geometric"]
"""What a ratio of two policies is taken of; see `importance_weights`."""
DivergenceKind = Literal["k2", "k3", "binary_kl"]
"""How far apart two policies are at a token; see `reject_divergent`."""
DivergenceLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
"""Over what a divergence is taken; see `reject_divergent`."""


class ImportanceWeights(NamedTuple):
    """What to multiply a loss by, and over which tokens to take it. Nothing carries a gradient."""

    weights: Tensor
    """`w`, clamped, of the mask's shape; 0 at masked and at rejected slots."""
    keep: Tensor
    """bool: the mask without the rejected slots."""
    ratio: Tensor
    """`w` before it is clamped or rejected; 1 at masked slots."""
    clamped: Tensor
    """bool: a kept token whose weight the clamp changed."""


class Rejection(NamedTuple):
    """Which tokens to train on. Nothing carries a gradient."""

    keep: Tensor
    """bool: the mask without the rejected slots."""
    divergence: Tensor
    """What was held against the limit, in nats, of the mask's shape; 0 at masked slots."""


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: CorrectionLevel,
    clamp: tuple[float, float] | None = None,
    reject: tuple[float, float] | None = None,
    cu_seqlens: Tensor | None = None,
) -> ImportanceWeights:
    """Weigh tokens by how much likelier the learner finds them than the engine that sampled them.

        dₜ = log π_old(yₜ) - log π_rollout(yₜ)

        token      wₜ = exp(dₜ)
        sequence   wₜ = exp(Σₖ dₖ)          the product of the sequence's ratios
        geometric  wₜ = exp(Σₖ dₖ / n)      their geometric mean

    Where the sums run over the n unmasked tokens of the token's sequence. `clamp=(low, high)` holds the weight between
    both, with some bias for a bounded variance; `reject=(low, high)` gives a token whose weight, before the clamp, lies
    outside both a weight of 0 and takes it out of the mask. The module's table says which of them are TIS, IcePop and
    MIS. By sequence the weights are unbiased but for their bounds, with a variance that grows with length; by token
    they take the states the engine visited as they are.

    See Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025),
    https://fengyao.notion.site/off-policy-rl, for TIS; Ling Team, "Every Step Evolves" (2025),
    https://arxiv.org/abs/2510.18855, for IcePop; Liu et al., "When Speed Kills Stability" (2025),
    https://richardli.xyz/rl-collapse, for MIS and the geometric mean

    Args:
        old_logprobs: `log π_old(yₜ)`, as the learner computes it, `[B, T]`, or packed `[N]`. Masked slots of any
            argument may hold anything, also NaN and inf. No gradient flows to any of them.
        rollout_logprobs: `log π_rollout(yₜ)`, as the engine reported it, of the same shape and temperature.
        mask: bool, of the same shape; True at the tokens that were sampled.
        level: `"token"`, `"sequence"` or `"geometric"`.
        clamp: the least and the largest weight, `0 <= low <= high`, `math.inf` for none; None leaves weights as they
            are. `(1, 1)` weighs all that is not rejected alike.
        reject: the least and the largest weight that are kept, likewise.
        cu_seqlens: `[S + 1]` int, for a packed batch; by token it makes no difference.

    Returns:
        `ImportanceWeights`, per token, in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, dtype, level or bound that does not fit.

    Degenerate cases: equal policies give a weight of exactly 1; for sequences of one token all levels are the same; a
    weight beyond e²⁰ counts as e²⁰; a log-probability that is not finite in an unmasked slot makes the weights of its
    token or sequence NaN, and rejects nothing, so that the loss shows it.
    """
    check_choice("level", level, get_args(CorrectionLevel))
    check_tokens(mask, cu_seqlens, level == "token", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    _check_bounds(clamp=clamp, reject=reject)
    log_ratio = log_ratio_of(old_logprobs, rollout_logprobs, mask)
    if level != "token":
        total = sequence_sums(log_ratio, cu_seqlens)
        if level == "geometric":
            total = total / token_counts(mask, cu_seqlens).clamp(min=1)
        log_ratio = masked(per_token(total, mask, cu_seqlens), mask)
    ratio = bounded(log_ratio).exp()
    keep = mask if reject is None else mask & ~((ratio < reject[0]) | (ratio > reject[1]))
    weights = ratio if clamp is None else ratio.clamp(*clamp)
    clamped = keep & (weights != ratio) & ~ratio.isnan()
    return ImportanceWeights(torch.where(keep, weights, 0.0), keep, ratio, clamped)


def reject_divergent(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: DivergenceKind,
    level: DivergenceLevel,
    limit: float,
    cu_seqlens: Tensor | None = None,
) -> Rejection:
    """Leave out tokens, or whole sequences, at which learner and engine differ too much.

        dₜ = log π_old(yₜ) - log π_rollout(yₜ)

        k2         cₜ = ½ dₜ²
        k3         cₜ = exp(dₜ) - 1 - dₜ
        binary_kl  cₜ = max(KL(a || b), KL(b || a)), of "this token or another", a = π_old(yₜ), b = π_rollout(yₜ)

    Where a token is rejected if cₜ, or the sum, mean or maximum of c over the unmasked tokens of its sequence, is above
    the limit. None of them says on which side the learner is; ratios with two bounds are `importance_weights`'.

    See Liu et al., "When Speed Kills Stability" (2025), https://richardli.xyz/rl-collapse; for `"binary_kl"`, Guo et
    al., "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions" (2026),
    https://ringtech.notion.site/kpop

    Args:
        old_logprobs: `log π_old(yₜ)`, at most 0, `[B, T]`, or packed `[N]`. Masked slots of any argument may hold
            anything, also NaN and inf.
        rollout_logprobs: `log π_rollout(yₜ)`, at most 0, of the same shape and temperature.
        mask: bool, of the same shape; True at the tokens that were sampled.
        kind: `"k2"`, `"k3"` or `"binary_kl"`.
        level: `"token"`, `"sequence_sum"`, `"sequence_mean"` or `"sequence_max"`.
        limit: the largest divergence that is kept, in nats, at least 0.
        cu_seqlens: `[S + 1]` int, for a packed batch; by token it makes no difference.

    Returns:
        `Rejection`, per token; the divergence in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, dtype, kind, level or limit that does not fit.

    Degenerate cases: equal policies give exactly 0 and reject nothing; a log-probability that is not finite in an
    unmasked slot gives a divergence of NaN, and rejects nothing.
    """
    check_choice("kind", kind, get_args(DivergenceKind))
    check_choice("level", level, get_args(DivergenceLevel))
    check_tokens(mask, cu_seqlens, level == "token", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    if not limit >= 0.0:
        raise ValueError(f"limit={limit} must be at least 0")
    log_ratio = log_ratio_of(old_logprobs, rollout_logprobs, mask)
    match kind:
        case "k2":
            divergence = 0.5 * log_ratio.square() + 0.0 * log_ratio
        case "k3":
            bounded_log_ratio = bounded(log_ratio)
            divergence = torch.expm1(bounded_log_ratio) - bounded_log_ratio
        case _:
            a, b = masked(old_logprobs, mask).detach(), masked(rollout_logprobs, mask).detach()
            divergence = torch.maximum(_binary_kl(a, b), _binary_kl(b, a)) + 0.0 * log_ratio
    if level != "token":
        if level == "sequence_max":
            total = _sequence_maxima(divergence, cu_seqlens)
        else:
            total = sequence_sums(divergence, cu_seqlens)
        if level == "sequence_mean":
            total = total / token_counts(mask, cu_seqlens).clamp(min=1)
        divergence = masked(per_token(total, mask, cu_seqlens), mask)
    return Rejection(mask & ~(divergence > limit), divergence)


def _sequence_maxima(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The largest of the slots of each sequence, all at least 0; 0 for an empty one."""
    if cu_seqlens is None:
        return torch.nn.functional.pad(x, (0, 1)).amax(-1)
    lengths = cu_seqlens.to(x.device).diff()
    return torch.segment_reduce(x, "max", lengths=lengths, axis=0, unsafe=True, initial=0)


def log_ratio_of(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`log π_old - log π_rollout`, without gradient; 0 at masked slots."""
    return (masked(old_logprobs, mask) - masked(rollout_logprobs, mask)).detach()


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of two coins, from the logarithm of their one side, which rounding may have brought above 0."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
    other = torch.where(other_p == 0, 0.0, other_p * (other_p.log() - other_q.log()))
    return log_p.exp() * (log_p - log_q) + other


def check_tokens(mask: Tensor, cu_seqlens: Tensor | None, by_token: bool, **tensors: Tensor) -> None:
    """Require tensors of the mask's shape; where only tokens count, any shape will do."""
    if by_token and cu_seqlens is None:
        check_slots(mask, **tensors)
    else:
        check_batch(mask, cu_seqlens, **tensors)


def _check_bounds(**bounds: tuple[float, float] | None) -> None:
    for name, pair in bounds.items():
        if pair is not None and (not isinstance(pair, tuple | list) or len(pair) != 2):
            raise ValueError(f"{name}={pair} must be (low, high), for instance (0.0, 2.0)")
        if pair is not None and not 0.0 <= pair[0] <= pair[1]:
            raise ValueError(f"{name}={pair} must be (low, high) with 0 <= low <= high; math.inf is no upper bound")
