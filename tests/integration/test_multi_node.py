"""Many nodes, on one machine: two gloo learner ranks under torchrun, one vLLM worker that joins over TCP."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.timeout(600)
def test_two_learner_ranks_and_a_worker_over_tcp(start: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys"
    subprocess.run([sys.executable, "-m", "drivetrain_ppo", "keys", str(keys)], check=True, timeout=60)
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "run.yaml"
    config.write_text(
        "name: two-ranks\n"
        "actor: {lr: 1e-4}\n"
        "critic: {lr: 5e-4}\n"
        "data: {max_prompt_tokens: 16}\n"
        "rollout: {max_response_tokens: 8, kv_cache_bytes: 67108864, spawn: false}\n"
    )
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    )
    run = start(
        "learner",
        str(config),
        "--json",
        prefix=(*torchrun, "-m", "drivetrain_ppo"),
        **{"trainer.steps": 2, "rollout.listen": f"tcp://{address}", "rollout.keys": str(keys)},
    )
    with subprocess.Popen(
        [sys.executable, "-m", "drivetrain_ppo", "rollout-worker", "--join", address, "--keys", str(keys)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as worker:
        try:
            code, out = run.finish()
            assert code == 0, out[-4000:]
            said, _ = worker.communicate(timeout=30)
            assert worker.returncode == 0, said[-3000:]
        finally:
            worker.kill()
    result = json.loads([line for line in out.splitlines() if line.startswith('{"run"')][-1])
    assert result["ledger"]["trained"] == result["ledger"]["issued"] == 64
    records = run.records()
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert record["rollout/logprob_diff_mean"] < 1e-4
        assert record["policy/first_ratio_deviation"] < 1e-5
