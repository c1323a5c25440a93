"""The PPO loop, read from top to bottom.

                 rank 0 only                                     every learner rank
   prompts ──► engines ──► rewards ──► buffer ─┬─► make_batch ──► score ──► advantages ──► update
                  ▲                     ledger │   (its share)    old, ref    GAE, KL      critic, actor
                  │                            │                  log-probs                   │
                  └──────────────── push_weights: named tensors, version, digest ◄────────────┘

The schedule is synchronous. Each step
  consumes      `prompts_per_step` prompts,
  waits for     every sample's response and score (or its deadline),
  is unblocked  by the buffer holding the step's rollouts,
  produces      a policy that is `epochs * minibatches` optimizer steps newer (a step without a finite gradient is left
                out, and counted), which every engine has proved to hold.

Every rank runs this same function. What differs between one node and many is only what the assembly puts into `Parts`.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from drivetrain_algorithms import (
    aggregate,
    clipped_value_loss,
    gae,
    loss_denominator,
    ppo_clip,
    token_rewards,
    whiten,
)
from drivetrain_learner import Learner, LossTerms, PackedBatch, PolicyModel, UpdateResult, ValueModel
from drivetrain_rollout import derive_seed
from drivetrain_telemetry import Metric, StageTimer

from drivetrain_ppo.batch import Batch, Scored, make_batch, minibatches
from drivetrain_ppo.config import AlgorithmConfig, RunConfig
from drivetrain_ppo.metrics import check_finite_scores, check_logprobs, check_updates, step_metrics, weight_metrics
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.sampling import Collected, Evaluation, Sampler
from drivetrain_ppo.weights import Push

Tensor = torch.Tensor
Metrics = dict[str, Metric]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an assembly hands to the loop."""

    config: RunConfig
    ranks: Ranks
    device: str
    actor: Learner[PolicyModel]
    critic: Learner[ValueModel]
    reference: Learner[PolicyModel]
    """Only ever asked for log-probs."""
    sampler: Sampler | None
    """On rank 0; None elsewhere."""
    push: Callable[[PolicyModel, int], Push]
    """Makes a version of the policy ready for the engines, on all ranks, with its digest."""
    timer: StageTimer
    recorder: "Recorder"
    start_step: int = 0


class Recorder(Protocol):
    """Where the loop's results go: a run directory and a display, or a test."""

    def started(self, step: int, evaluation: Evaluation) -> None: ...
    def stepped(self, step: int, metrics: Metrics, collected: Collected, evaluation: Evaluation | None) -> None: ...
    def checkpoint(self, step: int, parts: Parts) -> None: ...


async def train(parts: Parts) -> None:
    """Run PPO from `start_step` to `config.trainer.steps`, or until held-out reward reaches `stop_reward`."""
    config, ranks, timer = parts.config, parts.ranks, parts.timer
    await push_weights(parts)
    first = await evaluate(parts)
    parts.recorder.started(parts.start_step, first)
    if parts.start_step and reached(config, first):
        return
    for step in range(parts.start_step + 1, config.trainer.steps + 1):
        with timer.step():
            version = parts.actor.step
            collected = await collect(parts, version)
            batch = make_batch(collected.rollouts, rank=ranks.rank, size=ranks.size, device=parts.device)
            scored = await score(parts, batch)
            check_finite_scores(batch, scored)
            mismatch = check_logprobs(config, ranks, batch, scored)
            with timer.stage("advantages"):
                advantages, returns = advantages_and_returns(batch, scored, config.algorithm, ranks)
            with timer.stage("update_critic"):
                critic_updates = [
                    await update_critic(parts, part, scored, returns) for part in split(parts, batch, step)
                ]
            with timer.stage("update_actor"):
                actor_updates = [
                    await update_actor(parts, part, scored, advantages) for part in split(parts, batch, step)
                ]
            check_updates(step, critic=critic_updates, actor=actor_updates)
            with timer.stage("weight_sync"):
                weights = await push_weights(parts)
            if parts.sampler is not None:
                parts.sampler.trained(collected.rollouts)
            last, evaluation = step == config.trainer.steps, None
            if last or step % config.trainer.eval_every == 0:
                with timer.stage("evaluation"):
                    evaluation = await evaluate(parts)
                last = last or reached(config, evaluation)
        metrics = step_metrics(
            ranks, collected, batch, scored, mismatch, returns, actor_updates, critic_updates, version=version
        )
        metrics |= weights
        parts.recorder.stepped(step, metrics, collected, evaluation)
        if last or step % config.trainer.checkpoint_every == 0:
            parts.recorder.checkpoint(step, parts)
        if last:
            return


async def collect(parts: Parts, version: int) -> Collected:
    """This step's scored rollouts, on every rank."""
    collected = None
    if parts.sampler is not None:
        with parts.timer.stage("rollout"):
            sampled = await parts.sampler.sample()
        with parts.timer.stage("reward"):
            collected = await parts.sampler.collect(sampled, learner_version=version)
    return parts.ranks.share(collected, Collected)


async def evaluate(parts: Parts) -> Evaluation:
    """Greedy reward on held-out prompts, on every rank."""
    evaluation = None
    if parts.sampler is not None:
        evaluation = await parts.sampler.evaluate()
    return parts.ranks.share(evaluation, Evaluation)


def reached(config: RunConfig, evaluation: Evaluation) -> bool:
    """Whether held-out reward is where the run was to bring it."""
    goal = config.trainer.stop_reward
    return goal is not None and evaluation.reward >= goal


async def push_weights(parts: Parts) -> Metrics:
    """Move the policy into every engine. It is made ready by all ranks together, and complete before rank 0 sends it.

    What was gathered for it is let go before the next step.
    """
    push = parts.push(parts.actor.module, parts.actor.step)
    if parts.sampler is not None:
        await parts.sampler.push_weights(push)
    parts.ranks.barrier()
    return weight_metrics(push)


async def score(parts: Parts, batch: Batch) -> Scored:
    """Log-probs of policy and reference and the critic's values, all without gradient."""
    temperature = parts.config.rollout.temperature

    def logprobs(model: PolicyModel) -> Callable[[PackedBatch], Tensor]:
        return lambda part: model(part, temperature=temperature).logprobs

    with parts.timer.stage("old_logprobs"):
        old_logprobs = parts.actor.infer(batch.packed, logprobs(parts.actor.module))
    await heed_signals()
    with parts.timer.stage("ref_logprobs"):
        ref_logprobs = parts.reference.infer(batch.packed, logprobs(parts.reference.module))
    await heed_signals()
    with parts.timer.stage("values"):
        values = parts.critic.infer(batch.packed, parts.critic.module)
    return Scored(old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values)


def advantages_and_returns(
    batch: Batch, scored: Scored, algorithm: AlgorithmConfig, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """KL-shaped token rewards, then GAE; advantages are whitened over all ranks, returns never are."""
    mask, cu_seqlens = batch.packed.loss_mask, batch.packed.cu_seqlens
    rewards = token_rewards(
        batch.scores,
        scored.old_logprobs,
        scored.ref_logprobs,
        mask,
        kl_coef=algorithm.kl_coef,
        kl=algorithm.kl,
        cu_seqlens=cu_seqlens,
    )
    advantages, returns = gae(
        rewards, scored.values, mask, gamma=algorithm.gamma, lam=algorithm.lam, cu_seqlens=cu_seqlens
    )
    if algorithm.whiten:
        advantages = whiten(advantages, mask, reduce=ranks.reduce)
    return advantages, returns


async def heed_signals() -> None:
    """A signal cancels the loop where it suspends, and computing never does by itself."""
    await asyncio.sleep(0)


def split(parts: Parts, batch: Batch, step: int) -> Iterator[PackedBatch]:
    """The minibatches of all epochs, in order; the same for actor and critic."""
    algorithm = parts.config.algorithm
    for epoch in range(algorithm.epochs):
        yield from minibatches(batch, algorithm.minibatches, seed=derive_seed(parts.config.seed, step, epoch))


async def update_actor(parts: Parts, minibatch: PackedBatch, scored: Scored, advantages: Tensor) -> UpdateResult:
    """One optimizer step on the clipped surrogate with an entropy bonus."""
    await heed_signals()
    algorithm, reduce = parts.config.algorithm, parts.ranks.reduce
    mask, bounds = minibatch.loss_mask, minibatch.cu_seqlens
    tokens = loss_denominator(mask, mode="token_mean", cu_seqlens=bounds, reduce=reduce)
    denominator = loss_denominator(mask, mode=algorithm.loss_aggregation, cu_seqlens=bounds, reduce=reduce)

    def loss(part: PackedBatch) -> LossTerms:
        out = parts.actor.module(part, temperature=parts.config.rollout.temperature, entropy=True)
        policy = ppo_clip(
            out.logprobs,
            scored.old_logprobs[part.tokens],
            advantages[part.tokens],
            part.loss_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        surrogate = aggregate(
            policy.loss,
            part.loss_mask,
            mode=algorithm.loss_aggregation,
            denominator=denominator,
            cu_seqlens=part.cu_seqlens,
        )
        entropy = token_mean(out.entropy, part, tokens)
        return LossTerms(
            loss=surrogate - algorithm.entropy_coef * entropy,
            metrics={
                "loss": surrogate.detach(),
                "entropy": entropy.detach(),
                "clip_fraction": token_mean(policy.clipped.float(), part, tokens),
                "approx_kl": token_mean(policy.approx_kl, part, tokens),
                "ratio_deviation": token_mean((policy.ratio - 1).abs(), part, tokens),
            },
        )

    return parts.actor.update(minibatch, loss)


async def update_critic(parts: Parts, minibatch: PackedBatch, scored: Scored, returns: Tensor) -> UpdateResult:
    """One optimizer step on the clipped squared error to the returns."""
    await heed_signals()
    tokens = loss_denominator(
        minibatch.loss_mask, mode="token_mean", cu_seqlens=minibatch.cu_seqlens, reduce=parts.ranks.reduce
    )

    def loss(part: PackedBatch) -> LossTerms:
        value = clipped_value_loss(
            parts.critic.module(part),
            scored.values[part.tokens],
            returns[part.tokens],
            part.loss_mask,
            clip=parts.config.algorithm.value_clip,
        )
        total = token_mean(value.loss, part, tokens)
        return LossTerms(loss=total, metrics={"loss": total.detach()})

    return parts.critic.update(minibatch, loss)


def token_mean(x: Tensor, part: PackedBatch, tokens: Tensor) -> Tensor:
    """A micro-batch's summand of the mean over the whole minibatch's trained tokens."""
    return aggregate(x, part.loss_mask, mode="token_mean", denominator=tokens, cu_seqlens=part.cu_seqlens)
