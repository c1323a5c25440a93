"""The numbers of a step. Sums are taken over all ranks before anything is divided: they do not depend on the split."""

import math
from collections.abc import Sequence

import torch
from drivetrain_algorithms import Mismatch, check_finite, explained_variance, mismatch_metrics
from drivetrain_learner import UpdateResult
from drivetrain_telemetry import Metric

from drivetrain_ppo.batch import Batch, Scored
from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.sampling import Collected
from drivetrain_ppo.weights import Push

LOGPROB_DIFF_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}


class LogprobMismatch(RuntimeError):
    """Engine and learner disagree on the policy: wrong weights, another temperature, or too little precision."""


def check_logprobs(config: RunConfig, ranks: Ranks, batch: Batch, scored: Scored) -> Mismatch:
    """How far the learner is from what the engines reported of the same tokens; above the limit, the run stops."""
    limit = config.trainer.logprob_diff_limit
    limit = LOGPROB_DIFF_LIMIT[config.model.dtype] if limit is None else limit
    mismatch = mismatch_metrics(
        scored.old_logprobs,
        batch.rollout_logprobs,
        batch.packed.loss_mask,
        cu_seqlens=batch.packed.cu_seqlens,
        reduce=ranks.reduce,
        reduce_max=ranks.maximum,
    )
    mean, largest = float(mismatch.abs_mean), float(mismatch.abs_max)
    if not mean <= limit:
        raise LogprobMismatch(
            f"engine and learner log-probs of the same tokens differ by {mean:.2e} on average (largest {largest:.2e}); "
            f"the limit is {limit:g}. The engine holds other weights, applies another temperature, or computes in "
            "another type; trainer.logprob_diff_limit raises the limit"
        )
    return mismatch


def check_finite_scores(batch: Batch, scored: Scored) -> None:
    """Refuse NaN and infinities by the sequence and token they are at, before they spread over the step."""
    mask, bounds = batch.packed.loss_mask, batch.packed.cu_seqlens
    check_finite("old_logprobs", scored.old_logprobs, mask, cu_seqlens=bounds)
    check_finite("ref_logprobs", scored.ref_logprobs, mask, cu_seqlens=bounds)
    check_finite("values", scored.values, mask, cu_seqlens=bounds)


def check_updates(step: int, **updates: Sequence[UpdateResult]) -> None:
    """Stop when a model took not one optimizer step of a whole PPO step: the run would go on and learn nothing."""
    for name, results in updates.items():
        reasons = [result.skipped for result in results]
        if all(reasons):
            raise RuntimeError(f"step {step}: all {len(reasons)} updates of the {name} were skipped: {reasons[0]}")


def step_metrics(
    ranks: Ranks,
    collected: Collected,
    batch: Batch,
    scored: Scored,
    mismatch: Mismatch,
    returns: torch.Tensor,
    actor_updates: Sequence[UpdateResult],
    critic_updates: Sequence[UpdateResult],
    *,
    version: int,
) -> dict[str, Metric]:
    """Everything a step reports but its times. `version` is the learner's when the samples were taken."""
    mask = batch.packed.loss_mask
    kl = (scored.old_logprobs - scored.ref_logprobs)[mask].double().sum()
    sizes = torch.tensor([float(mask.sum()), float(mask.numel())], dtype=torch.float64, device=mask.device)
    response_tokens, labels, kl_sum = ranks.reduce(torch.cat([sizes, kl[None]])).tolist()
    rollouts = collected.rollouts
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    mean = sum(scores) / len(scores)
    staleness = [version - rollout.min_policy_version for rollout in rollouts]
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((value - mean) ** 2 for value in scores) / len(scores)),
        "reward/failed": float(sum(collected.failed.values())),
        **_means("policy", actor_updates),
        "policy/first_ratio_deviation": actor_updates[0].metrics.get("ratio_deviation"),
        "policy/ref_kl": kl_sum / max(response_tokens, 1.0),
        **_means("critic", critic_updates),
        "critic/explained_variance": float(explained_variance(scored.values, returns, mask, reduce=ranks.reduce)),
        "rollout/samples": float(len(rollouts)),
        "rollout/tokens": labels + len(rollouts),
        "rollout/response_tokens": response_tokens,
        "rollout/length_mean": response_tokens / len(rollouts),
        "rollout/truncated": sum(rollout.turns[-1].finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/logprob_diff_mean": float(mismatch.abs_mean),
        "rollout/logprob_diff_max": float(mismatch.abs_max),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": float(max(staleness)),
    }


def weight_metrics(push: Push) -> dict[str, Metric]:
    """What was pushed: the version that every engine has answered it holds, by its digest, and its size."""
    return {
        "weights/version": push.policy_version,
        "weights/digest": push.digest,
        "weights/bytes": push.nbytes,
    }


def _means(area: str, updates: Sequence[UpdateResult]) -> dict[str, Metric]:
    """Means over the optimizer steps that were taken, and how many were skipped."""
    taken = [update for update in updates if update.skipped is None]
    names = sorted({name for update in taken for name in update.metrics})
    return {
        **{f"{area}/{name}": _mean([update.metrics[name] for update in taken]) for name in names},
        f"{area}/grad_norm": _mean([update.grad_norm for update in taken]),
        f"{area}/lr": updates[-1].lr,
        f"{area}/skipped": float(sum(update.skipped is not None for update in updates)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
