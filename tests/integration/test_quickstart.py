"""The main job: the quickstart learns, from its own warm start, with real vLLM, on the CPU."""

import json
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_quickstart_learns(tmp_path: pathlib.Path, seed: int) -> None:
    """Held-out greedy reward rises from below 0.5 to above 0.85, and the ledger adds up.

    The bound is on steps: seconds depend on what else the machine does.
    """
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain_ppo", "quickstart", "--json", "--seed", str(seed)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_before"] < 0.5
    assert result["reward_after"] > 0.85
    assert result["steps"] <= 120
    ledger = result["ledger"]
    assert ledger["issued"] == ledger["trained"] == 256 * result["steps"]
