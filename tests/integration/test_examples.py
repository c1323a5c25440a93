"""Each example runs as its docstring says, and shows what it says it shows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from drivetrain_buffer import read_ledger
from drivetrain_telemetry import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMAND = Path(sys.executable).parent / "drivetrain-ppo"


def run(*command: str | Path, cwd: Path, timeout: float = 120.0) -> str:
    """What a command prints; it must end well."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_algorithms_in_your_loop(tmp_path):
    shown = run(sys.executable, EXAMPLES / "algorithms_in_your_loop.py", cwd=tmp_path)
    losses, clipped = numbers(r"loss (-?[\d.]+)", shown), numbers(r"(\d+)% of the tokens", shown)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert clipped[0] == 0  # before the first update every ratio is 1


def test_grpo_with_transformers(tmp_path):
    shown = run(sys.executable, EXAMPLES / "grpo_with_transformers.py", cwd=tmp_path)
    rewards = numbers(r"reward ([\d.]+)", shown)
    assert len(rewards) == 40 + 1
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.7


def test_dpo_with_transformers(tmp_path):
    shown = run(sys.executable, EXAMPLES / "dpo_with_transformers.py", cwd=tmp_path)
    losses, accuracies = numbers(r"loss ([\d.]+)", shown), numbers(r"accuracy ([\d.]+)", shown)
    assert losses[0] == 0.693  # log 2, before the first update
    assert losses[-1] < 0.55
    assert accuracies[0] == 0.0  # both are paid the same
    assert accuracies[-1] > 0.7


def test_evaluate_in_batches(tmp_path):
    shown = run(sys.executable, EXAMPLES / "evaluate_in_batches.py", cwd=tmp_path)
    assert "64 of 64 answered" in shown
    [score] = numbers(r"mean score ([\d.]+)", shown)
    assert 0 <= score < 0.5
    assert len(re.findall(r"engine-\d: serving", shown)) == 2


def test_buffer_between_threads(tmp_path):
    shown = run(sys.executable, EXAMPLES / "buffer_between_threads.py", cwd=tmp_path)
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", shown)}
    assert counts["trained"] == 10 * 8
    assert counts["in_flight"] == counts["failed"] == 0
    assert counts.pop("issued") == sum(counts.values())


def test_two_scripts(tmp_path):
    address = f"ipc://{tmp_path}/socket"
    scripts = [EXAMPLES / "two_scripts" / name for name in ("scorer.py", "learner.py")]
    lines = "".join(re.sub(r'^""".*?"""', "", script.read_text(), flags=re.DOTALL) for script in scripts).splitlines()
    assert len([line for line in lines if line.strip()]) <= 20
    with subprocess.Popen([sys.executable, scripts[0], address], stdin=subprocess.PIPE, cwd=tmp_path) as scorer:
        try:
            shown = run(sys.executable, scripts[1], address, cwd=tmp_path)
        finally:
            scorer.communicate(b"\n", timeout=20)
    assert shown.splitlines() == [f"step {step}: norms [{2.0 * step}, {2.0 * step}]" for step in (1, 2, 3)]
    assert scorer.returncode == 0


def test_stream_killed_consumer(tmp_path):
    assert len((EXAMPLES / "stream_killed_consumer.py").read_text().splitlines()) < 50
    shown = run(sys.executable, EXAMPLES / "stream_killed_consumer.py", cwd=tmp_path)
    sent, again, handled, different = numbers(r"(\d+)", shown)
    assert sent == handled == different == 2000
    assert 0 < again <= 64  # what the killed one held: its credit at most


def test_ring_zero_copy(tmp_path):
    assert len((EXAMPLES / "ring_zero_copy.py").read_text().splitlines()) < 50
    shown = run(sys.executable, EXAMPLES / "ring_zero_copy.py", cwd=tmp_path)
    assert shown.splitlines() == [f"step {step}: mean {step}, in the ring's memory" for step in range(5)]


def test_reshard_checkpoint(tmp_path):
    assert len((EXAMPLES / "reshard_checkpoint.py").read_text().splitlines()) < 60
    shown = run(sys.executable, EXAMPLES / "reshard_checkpoint.py", tmp_path, cwd=tmp_path)
    digests = re.findall(r"digest ([0-9a-f]{64})\n", shown)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    counts = [len(list((tmp_path / side).iterdir())) for side in ("trained", "served")]
    assert counts == numbers(r"(\d+) files", shown) == [4, 2]


def test_plan_70b(tmp_path):
    assert len((EXAMPLES / "plan_70b.py").read_text().splitlines()) < 60
    shown = run(sys.executable, EXAMPLES / "plan_70b.py", cwd=tmp_path)
    assert shown.count("723 tensors, 131.4 GiB, from 512 ranks to 512") == 2
    [between_hosts] = numbers(r"([\d.]+) TiB between hosts", shown)
    assert between_hosts == pytest.approx(63 * 131.4 / 1024, rel=1e-3)  # each host has a 64th of what it needs
    assert "0 B between hosts" in shown.split("copied on 64 hosts")[1]
    assert all(seconds < 60 for seconds in numbers(r"planned in ([\d.]+) s", shown))


def test_embed_rollout(tmp_path):
    shown = run(sys.executable, EXAMPLES / "embed_rollout.py", cwd=tmp_path)
    rewards = numbers(r"reward ([\d.]+)", shown)
    assert numbers(r"version (\d+)", shown) == list(range(1, 21))
    assert len(set(re.findall(r"\((\w{8})\)", shown))) == 20  # the weights of each version are others
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8


def run_own_task(folder: Path, *overrides: str, timeout: float = 120.0) -> dict[str, object]:
    """The last line of `drivetrain-ppo run reverse.yaml`, given in a copy of the example's folder."""
    shutil.copytree(EXAMPLES / "own_task", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    shown = run(COMMAND, "run", "reverse.yaml", "run_dir=run", *overrides, "--json", cwd=folder, timeout=timeout)
    summary: dict[str, object] = json.loads(shown.splitlines()[-1])
    return summary


def test_own_task(tmp_path):
    folder = tmp_path / "own_task"
    overrides = ("rollout.engine=transformers", "rollout.samples_per_prompt=1", "trainer.steps=2")
    ledger = run_own_task(folder, *overrides)["ledger"]
    assert ledger == {"issued": 128, "trained": 128, "filtered": 0, "stale": 0, "failed": 0, "in_flight": 0}
    assert read_ledger(folder / "run" / "ledger").trained == 128
    steps = [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["step"] > 0]
    assert len(steps) == 2
    for step in steps:
        # Of scores that are all 0 or 1, as exact match gives, the variance is mean * (1 - mean).
        assert 0 < step["reward/std"] ** 2 < step["reward/mean"] * (1 - step["reward/mean"]) - 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_task_as_it_stands(tmp_path):
    summary = run_own_task(tmp_path / "own_task", timeout=500.0)
    assert summary["steps"] == 20
    assert summary["ledger"]["trained"] == summary["ledger"]["issued"] == 20 * 64 * 4
    assert summary["reward_after"] > summary["reward_before"] + 0.1
