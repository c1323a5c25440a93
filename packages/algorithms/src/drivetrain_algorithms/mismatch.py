"""How far the learner's policy is from the engine's that sampled, and what weighing for it costs."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._moments import Reduce, deviations, means
from drivetrain_algorithms._ratio import bounded
from drivetrain_algorithms._slots import check_batch, check_choice, masked, sequence_sums, token_counts
from drivetrain_algorithms.correction import CorrectionLevel, check_tokens, log_ratio_of


def effective_sample_size(
    weights: Tensor,
    mask: Tensor,
    *,
    level: CorrectionLevel,
    cu_seqlens: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """The share of the samples that equal weights would need for the same variance.

        ESS = (Σ w)² / (n Σ w²)

    Where the sums run over the n unmasked tokens, or sequences that have one, of all ranks. 1 means that all count
    alike, 1/n that one counts for all. Take it over the mask before rejection, and what is rejected counts as lost.

    See Kong, "A Note on Importance Sampling Using Standardized Weights" (1992),
    https://victorelvira.github.io/papers/kong92.pdf

    Args:
        weights: `w`, at least 0, as `importance_weights` gives them, `[B, T]`, or packed `[N]`. Masked slots may hold
            anything, also NaN.
        mask: bool, of the same shape.
        level: `"token"` counts tokens; `"sequence"` and `"geometric"` count sequences, each with the mean of its
            tokens' weights.
        cu_seqlens: `[S + 1]` int, for a packed batch; by token it makes no difference.
        reduce: sums a tensor over all ranks and returns the sum; called once, on every rank. None: there is one rank.

    Returns:
        A scalar from 0 to 1, float64, without gradient.

    Raises:
        ValueError: a shape, dtype or level that does not fit.

    Degenerate cases: 0 where all weights are 0; NaN, "undefined", where no slot is unmasked; scaling all weights
    changes nothing.
    """
    check_choice("level", level, get_args(CorrectionLevel))
    check_tokens(mask, cu_seqlens, level == "token", weights=weights)
    weights, counted = masked(weights, mask).detach().double(), mask
    if level != "token":
        counts = token_counts(mask, cu_seqlens)
        weights, counted = sequence_sums(weights, cu_seqlens) / counts.clamp(min=1), counts > 0
    sums = torch.stack((weights.sum(), weights.square().sum(), counted.sum(dtype=torch.float64)))
    total, squares, number = (sums if reduce is None else reduce(sums)).unbind()
    return torch.where(squares == 0, 0.0, total.square() / (number * squares)).where(number > 0, torch.nan)


class Mismatch(NamedTuple):
    """How far the learner's policy is from the engine's; scalars, float64, without gradient; 0 without a token."""

    k1: Tensor
    """The mean over tokens of `log π_rollout - log π_old`, which estimates KL(π_rollout || π_old), in nats."""
    k3: Tensor
    """The mean over tokens of `w - 1 - log w`, `w = π_old / π_rollout`: the same, and never negative."""
    chi_squared_token: Tensor
    """The mean over tokens of `w² - 1`: the variance of the weights by token."""
    chi_squared_sequence: Tensor
    """The mean over sequences of `Π w² - 1`: the variance of the weights by sequence."""
    abs_mean: Tensor
    """The mean over tokens of `|log π_old - log π_rollout|`, in nats."""
    abs_max: Tensor
    """The largest of them."""
    probability_abs_mean: Tensor
    """The mean over tokens of `|π_old - π_rollout|`."""
    probability_abs_max: Tensor
    """The largest of them."""
    correlation: Tensor
    """Of π_old and π_rollout over tokens, from -1 to 1; NaN, "undefined", where either is the same everywhere."""


def mismatch_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    reduce: Reduce | None = None,
    reduce_max: Reduce | None = None,
) -> Mismatch:
    """Measure how far the learner's policy is from the engine's that sampled.

        dₜ = log π_old(yₜ) - log π_rollout(yₜ),  wₜ = exp(dₜ)

        k1 = E[-dₜ]    k3 = E[wₜ - 1 - dₜ]    χ² = E[wₜ²] - 1, and E[exp(2 Σₜ dₜ)] - 1 by sequence

    Where E is the mean over the unmasked tokens of all ranks, or over the sequences that have one, as they were sampled
    by the engine. Right after a weight update with the same weights, all of it is rounding.

    See Liu et al., "When Speed Kills Stability" (2025), https://richardli.xyz/rl-collapse

    Args:
        old_logprobs: `log π_old(yₜ)`, as the learner computes it, `[B, T]`, or packed `[N]`. Masked slots of any
            argument may hold anything, also NaN and inf.
        rollout_logprobs: `log π_rollout(yₜ)`, as the engine reported it, of the same shape and temperature.
        mask: bool, of the same shape; True at the tokens that were sampled.
        cu_seqlens: `[S + 1]` int, for a packed batch.
        reduce: sums a tensor over all ranks and returns the sum; called three times, on every rank. None: there is one
            rank.
        reduce_max: likewise, with the element-wise maximum; called once. Give both or neither.

    Returns:
        `Mismatch`.

    Raises:
        ValueError: a shape or dtype that does not fit, or one of `reduce` and `reduce_max` without the other.

    Degenerate cases: equal policies give 0, and a correlation of 1; no unmasked slot gives 0, and a correlation of NaN;
    a weight beyond e²⁰ counts as e²⁰; a log-probability that is not finite in an unmasked slot gives NaN.
    """
    check_batch(mask, cu_seqlens, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    if (reduce is None) != (reduce_max is None):
        given, missing = ("reduce", "reduce_max") if reduce_max is None else ("reduce_max", "reduce")
        raise ValueError(f"{missing} is missing; with {given} over all ranks, give both")
    log_ratio = log_ratio_of(old_logprobs, rollout_logprobs, mask).double()
    log_weight = bounded(log_ratio)
    log_ratio = log_ratio + 0.0 * log_weight  # what is not finite is NaN here too
    old, rollout = (masked(x, mask).detach().double().exp() for x in (old_logprobs, rollout_logprobs))
    old, rollout = old + 0.0 * log_weight, rollout + 0.0 * log_weight
    probability_gap = (old - rollout).abs()
    per_token_terms = (
        -log_ratio,
        torch.expm1(log_weight) - log_weight,
        torch.expm1(2.0 * log_weight),
        log_ratio.abs(),
        probability_gap,
        mask.double(),
    )
    per_sequence = torch.expm1(2.0 * bounded(sequence_sums(log_ratio, cu_seqlens)))
    num_sequences = (token_counts(mask, cu_seqlens) > 0).sum(dtype=torch.float64)
    sums = torch.stack((*(term.sum() for term in per_token_terms), per_sequence.sum(), num_sequences))
    if reduce is not None:
        sums = reduce(sums)
    *terms, num_tokens, by_sequence, num_sequences = sums.unbind()
    k1, k3, chi_squared, abs_mean, probability_abs_mean = (term / num_tokens.clamp(min=1.0) for term in terms)

    largest = torch.stack([_maximum(x) for x in (log_ratio.abs(), probability_gap)])
    if reduce_max is not None:
        largest = reduce_max(largest)
    return Mismatch(
        k1=k1,
        k3=k3,
        chi_squared_token=chi_squared,
        chi_squared_sequence=by_sequence / num_sequences.clamp(min=1.0),
        abs_mean=abs_mean,
        abs_max=largest[0],
        probability_abs_mean=probability_abs_mean,
        probability_abs_max=largest[1],
        correlation=_correlation(masked(old, mask), masked(rollout, mask), mask, reduce),
    )


def _correlation(x: Tensor, y: Tensor, mask: Tensor, reduce: Reduce | None) -> Tensor:
    """Pearson's, of two float64 tensors over the unmasked slots of all ranks; NaN where one of them is constant."""
    both = torch.stack((x, y))
    x, y = deviations(both, means(both, mask, reduce).mean, mask)
    products = torch.stack(((x * y).sum(), x.square().sum(), y.square().sum()))
    if reduce is not None:
        products = reduce(products)
    return (products[0] / (products[1].sqrt() * products[2].sqrt())).clamp(-1.0, 1.0)


def _maximum(x: Tensor) -> Tensor:
    """The largest of numbers that are at least 0; 0 of none."""
    return torch.nn.functional.pad(x.flatten(), (0, 1)).amax()
