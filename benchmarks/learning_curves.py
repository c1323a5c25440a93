"""Learning curves of finished runs: one JSON file with hardware, versions and commands, and one plot.

python benchmarks/learning_curves.py NAME RUN [RUN ...]     writes benchmarks/results/NAME.json and NAME.png
"""

import json
import pathlib
import sys
from typing import Any

from drivetrain_telemetry import Summary, read_events, read_metrics

RESULTS = pathlib.Path(__file__).parent / "results"
KEPT = ("reward/mean", "eval/reward", "rollout/logprob_diff_mean", "policy/ref_kl", "policy/entropy", "time/step")


def read_run(folder: pathlib.Path) -> dict[str, Any]:
    """What one run was, what it reached, and its curves."""
    events = read_events(folder / "events.jsonl")
    begun = next(event for event in events if event["event"] == "started")
    ended = next(event for event in reversed(events) if event["event"] == "finished")
    records = read_metrics(folder / "metrics.jsonl")
    summary = Summary.of(
        [record for record in records if record["step"] > 0],
        run=folder.name,
        reward_before=ended["reward_before"],
        reward_after=ended["reward_after"],
        seconds=ended["seconds"],
        ledger=ended["ledger"],
    )
    return {
        "run": folder.name,
        "command": " ".join(["drivetrain-ppo", *begun["command"][1:]]),
        "environment": begun["environment"],
        "reward_before": summary.reward_before,
        "reward_after": summary.reward_after,
        "seconds": round(summary.seconds, 1),
        "steps": summary.steps,
        "ledger": summary.ledger,
        "verdict": summary.verdict,
        "seconds_by_stage": {total.stage: round(total.seconds, 2) for total in summary.stages},
        "tokens_per_s_by_stage": {t.stage: round(t.tokens_per_s) for t in summary.stages if t.tokens_per_s},
        "largest_logprob_diff_mean": max(r["rollout/logprob_diff_mean"] for r in records if r["step"] > 0),
        "curves": {
            key: [[record["step"], round(record[key], 6)] for record in records if record.get(key) is not None]
            for key in KEPT
        },
    }


def plot(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5.5 * len(runs), 3.6), squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        for key, label, style in (("reward/mean", "sampled", "-"), ("eval/reward", "held-out, greedy", "o-")):
            steps, values = zip(*run["curves"][key], strict=True)
            axis.plot(steps, values, style, label=label, markersize=4)
        axis.set(title=f"{run['run']} ({run['environment']['devices']})", xlabel="step", ylabel="reward")
        axis.set_ylim(0, 1)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(name: str, folders: list[str]) -> None:
    runs = [read_run(pathlib.Path(folder)) for folder in folders]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(runs, indent=1) + "\n")
    plot(runs, RESULTS / f"{name}.png")
    for run in runs:
        print(f"{run['run']}: {run['reward_before']:.3f} -> {run['reward_after']:.3f} in {run['seconds']:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
