"""Child processes: their environment, their death, their last words."""

import pathlib
import subprocess
import sys

import pytest
from drivetrain_ppo.config import load_config
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.launch import Child, child_environ
from drivetrain_ppo.models import check_source


def test_torchruns_group_stays_with_torchrun() -> None:
    parent = {
        "PATH": "/bin",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "HIP_VISIBLE_DEVICES": "0,1",
    }
    assert child_environ(parent, {"HIP_VISIBLE_DEVICES": None, "A": "b"}) == {"PATH": "/bin", "A": "b"}
    assert child_environ({"OMP_NUM_THREADS": "1"}, {}) == {"OMP_NUM_THREADS": "1"}, "the user's own is kept"


def test_a_child_that_ended_is_named_with_the_end_of_its_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "logs" / "worker.log"
    with Child("rollout-worker", ["--join", "nonsense"], log=log, environ={}) as child:
        child.stop()
        with pytest.raises(RuntimeError, match=r"(?s)rollout-worker ended with code 2.*nonsense"):
            child.check()
        error = TimeoutError("waited")
        child.explain(error)
    assert "rollout-worker ended with code 2" in error.__notes__[0]


def test_a_worker_whose_parent_is_gone_does_not_start(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "drivetrain_ppo", "rollout-worker", "--join", "127.0.0.1:9", "--parent", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the parent process is gone" in done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [("./gone", "is no folder"), ("gone", "is no folder"), ("{empty}", "holds no config.json")],
)
def test_a_model_that_cannot_be_there(tmp_path: pathlib.Path, source: str, message: str) -> None:
    config = load_config(None, [f"model.source={source.format(empty=tmp_path)}"])
    with pytest.raises(ConfigError, match=message):
        check_source(config)
