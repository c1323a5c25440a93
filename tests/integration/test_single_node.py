"""One node: the real command with real vLLM, killed, resumed, interrupted."""

import json
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
from drivetrain_buffer import read_ledger

STEP_KEYS = {
    "time/step",
    "time/rollout",
    "time/reward",
    "time/old_logprobs",
    "time/ref_logprobs",
    "time/values",
    "time/advantages",
    "time/update_actor",
    "time/update_critic",
    "time/weight_sync",
    "throughput/samples_per_s",
    "throughput/tokens_per_s",
    "throughput/rollout_qps",
    "throughput/rollout_tokens_per_s",
    "throughput/actor_tokens_per_s",
    "throughput/critic_tokens_per_s",
    "reward/mean",
    "reward/std",
    "policy/loss",
    "policy/clip_fraction",
    "policy/entropy",
    "policy/approx_kl",
    "policy/grad_norm",
    "critic/loss",
    "critic/explained_variance",
    "critic/grad_norm",
    "rollout/length_mean",
    "rollout/truncated",
    "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max",
    "staleness/mean",
    "staleness/max",
    "ledger/issued",
    "ledger/trained",
    "ledger/filtered",
    "ledger/stale",
    "ledger/failed",
    "ledger/in_flight",
    "weights/version",
    "weights/digest",
    "weights/bytes",
}


@pytest.mark.timeout(600)
def test_killed_and_resumed(
    start: Callable[..., Any],
    processes: Callable[[int], set[int]],
    still_running: Callable[..., set[int]],
    shared_memory: Callable[[], set[str]],
) -> None:
    """SIGKILL in the middle; the workers die with it; --resume goes on from the last checkpoint; the ledger adds up."""
    segments = shared_memory()
    settings = {"trainer.steps": 6, "trainer.checkpoint_every": 2, "trainer.eval_every": 3}
    run = start("quickstart", **settings)
    run.wait_until("step 3", lambda: any(r["step"] >= 3 for r in run.records()), timeout=300)
    family = processes(run.process.pid)
    assert len(family) > 1, "the engine has a process of its own"
    run.process.send_signal(signal.SIGKILL)
    run.finish(timeout=10)
    assert not still_running(family, timeout=15)

    resumed = start("quickstart", "--json", "--resume", str(run.folder), **settings)
    code, out = resumed.finish()
    assert code == 0, out[-3000:]
    assert "resumed from the checkpoint of step 2" in out
    result = json.loads(out.strip().splitlines()[-1])
    assert set(result) == {"run", "reward_before", "reward_after", "seconds", "steps", "ledger", "verdict"}
    assert result["ledger"] == {
        "issued": 192,
        "trained": 192,
        "filtered": 0,
        "stale": 0,
        "failed": 0,
        "in_flight": 0,
    }
    assert read_ledger(run.folder / "ledger").trained == 192
    records = resumed.records()
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5, 6]
    for record in records[1:]:
        assert STEP_KEYS - record.keys() == set()
        assert record["rollout/logprob_diff_mean"] < 1e-4
        assert record["policy/first_ratio_deviation"] < 1e-5
        assert record["staleness/max"] == 0
        assert record["ledger/issued"] == 32 * record["step"] == record["ledger/trained"]
        assert record["weights/version"] == 4 * record["step"]
    assert len({record["weights/digest"] for record in records[1:]}) == 6
    assert shared_memory() <= segments


@pytest.mark.timeout(400)
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    start: Callable[..., Any],
    processes: Callable[[int], set[int]],
    still_running: Callable[..., set[int]],
    shared_memory: Callable[[], set[str]],
    signal_number: int,
) -> None:
    segments = shared_memory()
    run = start("quickstart", **{"trainer.steps": 1000})
    run.wait_until("step 1", lambda: any(r["step"] >= 1 for r in run.records()), timeout=300)
    family = processes(run.process.pid)
    os.kill(run.process.pid, signal_number)
    code, out = run.finish(timeout=60)
    assert code == 130, out[-3000:]
    assert out.strip().splitlines()[-1] == "drivetrain-ppo: interrupted"
    assert not still_running(family, timeout=10)
    assert shared_memory() <= segments


@pytest.mark.timeout(400)
def test_a_worker_that_dies_is_named(start: Callable[..., Any], processes: Callable[[int], set[int]]) -> None:
    """The engine's process is killed: the run ends within seconds and says which worker was lost, and its log."""
    run = start("quickstart", **{"trainer.steps": 1000})
    run.wait_until("step 1", lambda: any(r["step"] >= 1 for r in run.records()), timeout=300)
    for pid in processes(run.process.pid) - {run.process.pid}:
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if b"rollout-worker" in command:
            os.kill(pid, signal.SIGKILL)
    code, out = run.finish(timeout=60)
    assert code not in (0, 2)
    assert "rollout-worker" in out[-3000:]


@pytest.mark.timeout(400)
def test_at_learning_rate_zero_nothing_moves(start: Callable[..., Any]) -> None:
    """The ratio is 1 on every token, no weight changes, and so neither does the digest."""
    run = start("quickstart", **{"trainer.steps": 2, "actor.lr": 0, "critic.lr": 0})
    code, out = run.finish()
    assert code == 0, out[-3000:]
    records = run.records()[1:]
    assert [record["weights/version"] for record in records] == [4, 8]
    assert len({record["weights/digest"] for record in records}) == 1
    for record in records:
        assert record["policy/ratio_deviation"] < 1e-6
        assert record["policy/clip_fraction"] == 0
        assert record["policy/approx_kl"] < 1e-8
        assert abs(record["policy/ref_kl"]) < 1e-6


@pytest.mark.timeout(400)
def test_a_configuration_of_ones_own(start: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """`run` on a YAML file with overrides, the transformers engine, a reward function by path, samples in groups."""
    (tmp_path / "mine.py").write_text(
        "def score(request):\n    return len(set(request.response)) / 6 if request.response else 0.0\n"
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        "name: mine\n"
        "rollout: {engine: transformers, samples_per_prompt: 4, max_response_tokens: 6}\n"
        "reward: {function: 'mine:score', workers: 1}\n"
        "actor: {lr: 1e-4}\n"
        "trainer: {steps: 9}\n"
    )
    run = start("run", str(config), **{"trainer.steps": 2, "rollout.prompts_per_step": 8, "data.max_prompt_tokens": 16})
    code, out = run.finish()
    assert code == 0, out[-3000:]
    records = run.records()
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[2]["ledger/trained"] == 64
    assert 0 < records[1]["reward/mean"] <= 1
    assert records[1]["rollout/logprob_diff_mean"] < 1e-4
