"""The verdict: which stage sets the pace of a run, why, and which setting to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain_telemetry.records import Metric, means, stage_seconds

LEVEL = 0.05
"""Two stages whose shares differ by less set the pace together."""


def _often_truncated(metrics: Mapping[str, float]) -> bool:
    return metrics.get("rollout/truncated", 0.0) >= 0.25


@dataclass(frozen=True, slots=True)
class Rule:
    """What to say when `stage` sets the pace."""

    stage: str
    why: str
    """May hold metrics that `applies` has found, as in `{rollout/truncated:.0%}`."""
    change: str
    """The setting to change, by its key in the configuration, and how."""
    applies: Callable[[Mapping[str, float]], bool] | None = None
    """Told the mean of each metric; None applies always."""


# The first rule that applies speaks. A stage `wait_x` is time in which a step waited for x.
RULES: tuple[Rule, ...] = (
    Rule(
        "rollout",
        "{rollout/truncated:.0%} of the responses run to the length limit, and a step waits for the longest",
        "lower rollout.max_response_tokens, or raise rollout.workers",
        _often_truncated,
    ),
    Rule(
        "rollout",
        "each response is sampled one token after the other, and a step waits for the longest",
        "raise rollout.max_num_seqs where a step has more samples than that, then rollout.workers",
    ),
    Rule(
        "reward",
        "a step waits for the slowest of its reward calls",
        "raise reward.workers, or lower reward.deadline if a few calls are much slower than the rest",
    ),
    Rule(
        "old_logprobs",
        "the policy reads every token of the batch once more before its first update",
        "raise actor.max_tokens_per_microbatch while memory allows",
    ),
    Rule(
        "ref_logprobs",
        "the reference model reads every token of the batch",
        "raise actor.max_tokens_per_microbatch while memory allows",
    ),
    Rule(
        "values",
        "the critic reads every token of the batch before its first update",
        "raise critic.max_tokens_per_microbatch while memory allows",
    ),
    Rule(
        "advantages",
        "advantages are arithmetic on a few numbers per token: the batch is too small to keep anything else busy",
        "raise rollout.prompts_per_step",
    ),
    Rule(
        "update_actor",
        "the policy goes forward and backward over every token of the batch, once per epoch",
        "lower algorithm.epochs, or give the learner more devices; where a minibatch is cut into several "
        "micro-batches, raise actor.max_tokens_per_microbatch",
    ),
    Rule(
        "update_critic",
        "the critic goes forward and backward over every token of the batch, once per epoch",
        "lower algorithm.epochs, or give the learner more devices; where a minibatch is cut into several "
        "micro-batches, raise critic.max_tokens_per_microbatch",
    ),
    Rule(
        "weight_sync",
        "every weight travels to every engine once per step, however few samples the step trains on",
        "raise rollout.prompts_per_step",
    ),
    Rule(
        "wait_rollout",
        "training waits for samples: sampling is the slower side",
        "raise rollout.workers",
    ),
    Rule(
        "wait_reward",
        "training waits for scores: the reward calls are the slower side",
        "raise reward.workers",
    ),
    Rule(
        "wait_learner",
        "sampling waits for the learner: training is the slower side",
        "give the learner more devices, or raise trainer.max_staleness",
    ),
    Rule(
        "evaluation",
        "held-out prompts are sampled between the steps",
        "raise trainer.eval_every",
    ),
    Rule(
        "other",
        "the time passes between the stages, where nothing is measured: fixed costs of a step",
        "raise rollout.prompts_per_step, so that a step has more work for the same fixed costs",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which stage sets the pace."""

    stage: str
    """The stage that takes most of a step; empty when no step was timed."""
    share: float
    """Its share of a step, 0 to 1."""
    seconds: float
    """Its time in a mean step."""
    runner_up: str
    """The stage after it; empty when there is no other."""
    runner_up_share: float
    why: str
    change: str
    text: str
    """All of it in a few sentences."""


def verdict(records: Sequence[Mapping[str, Metric]], *, rules: Sequence[Rule] = RULES) -> Verdict:
    """Says in words which stage sets the pace, why, and which setting to change.

    Shares are those of a mean step. The first record is left out when there are three or more: it holds what happens
    once, such as compilation and the filling of caches.

    Args:
        records: one per step, as `read_metrics` gives them; their `time/` metrics are in seconds.
        rules: the first whose stage and condition fit gives the reason and the advice.
    """
    steady = means(records[1:] if len(records) >= 3 else records)
    stages = list(stage_seconds(steady).items())
    step = sum(seconds for _, seconds in stages)
    if not step:
        return Verdict(
            stage="", share=0.0, seconds=0.0, runner_up="", runner_up_share=0.0, why="", change="", text=_NOTHING_TIMED
        )
    (stage, seconds), (runner_up, runner_up_seconds) = stages[0], stages[1] if len(stages) > 1 else ("", 0.0)
    rule = _rule_for(stage, steady, rules)
    why = rule.why.format_map(steady)
    share, runner_up_share = seconds / step, runner_up_seconds / step
    if not runner_up:
        lead = f"{stage} sets the pace: {share:.0%} of a step ({_of(seconds, step)})."
    elif share - runner_up_share < LEVEL:
        lead = (
            f"{stage} and {runner_up} set the pace together: {share:.0%} and {runner_up_share:.0%} of a step of "
            f"{step:.3g} s."
        )
    else:
        lead = (
            f"{stage} sets the pace: {share:.0%} of a step ({_of(seconds, step)}); "
            f"{runner_up} comes next with {runner_up_share:.0%}."
        )
    return Verdict(
        stage=stage,
        share=share,
        seconds=seconds,
        runner_up=runner_up,
        runner_up_share=runner_up_share,
        why=why,
        change=rule.change,
        text=f"{lead} Why: {why}. To change it: {rule.change}.",
    )


_NOTHING_TIMED = "No step was timed, so nothing can be said about the pace."


def _of(seconds: float, step: float) -> str:
    return f"{seconds:.3g} of {step:.3g} s"


def _rule_for(stage: str, metrics: Mapping[str, float], rules: Sequence[Rule]) -> Rule:
    for rule in rules:
        if rule.stage == stage and (rule.applies is None or rule.applies(metrics)):
            return rule
    return Rule(stage, "no rule knows this stage", f"look at what runs inside the stage {stage!r}")
