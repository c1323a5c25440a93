"""Reading the record of a step: its metrics by name, its stages, its rates."""

import math
from collections.abc import Iterable, Mapping

Metric = float | int | str | None
"""A number, a short text such as a digest, or None where there is no (finite) number."""

TOKENS_OF_STAGE: Mapping[str, str] = {
    "rollout": "rollout/response_tokens",
    "old_logprobs": "rollout/tokens",
    "ref_logprobs": "rollout/tokens",
    "values": "rollout/tokens",
    "update_actor": "rollout/tokens",
    "update_critic": "rollout/tokens",
}
"""The metric that counts the tokens a stage works through. Updates count each token once, whatever their epochs."""


def number(record: Mapping[str, Metric], key: str) -> float | None:
    """A metric as a float, or None where the record holds no number for it."""
    value = record.get(key)
    return float(value) if isinstance(value, float | int) else None


def means(records: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The mean of each metric over the records that hold a number for it."""
    found: dict[str, list[float]] = {}
    for record in records:
        for key in record:
            value = number(record, key)
            if value is not None:
                found.setdefault(key, []).append(value)
    return {key: math.fsum(values) / len(values) for key, values in found.items()}


def stage_seconds(record: Mapping[str, Metric]) -> dict[str, float]:
    """The seconds of each stage, from the `time/` metrics, the longest first.

    `other` is what the step spent in no stage.
    """
    times = {key.removeprefix("time/"): number(record, key) for key in record if key.startswith("time/")}
    stages = {stage: seconds for stage, seconds in times.items() if seconds is not None}
    step = stages.pop("step", None)
    if step is not None and stages:
        stages["other"] = max(0.0, step - math.fsum(stages.values()))
    return dict(sorted(stages.items(), key=lambda item: item[1], reverse=True))


def throughput(record: Mapping[str, Metric]) -> dict[str, float]:
    """The `throughput/` metrics of a step, per second, from its `time/` metrics and its counts.

    The counts are `rollout/samples`, `rollout/tokens` (prompts and responses) and `rollout/response_tokens`. A rate
    for which the record lacks a time or a count is left out.
    """
    parts = {
        "throughput/samples_per_s": ("rollout/samples", "time/step"),
        "throughput/tokens_per_s": ("rollout/tokens", "time/step"),
        "throughput/rollout_qps": ("rollout/samples", "time/rollout"),
        "throughput/rollout_tokens_per_s": (TOKENS_OF_STAGE["rollout"], "time/rollout"),
        "throughput/actor_tokens_per_s": (TOKENS_OF_STAGE["update_actor"], "time/update_actor"),
        "throughput/critic_tokens_per_s": (TOKENS_OF_STAGE["update_critic"], "time/update_critic"),
    }
    rates: dict[str, float] = {}
    for name, (counter, elapsed) in parts.items():
        count, seconds = number(record, counter), number(record, elapsed)
        if count is not None and seconds:
            rates[name] = count / seconds
    return rates
