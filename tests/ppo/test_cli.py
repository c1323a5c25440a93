"""The command line: what a mistake gets, and how fast. No model and no engine is loaded here."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest


def command(*arguments: str, cwd: pathlib.Path, tries: int = 3) -> tuple[int, str, str, float]:
    """Exit code, standard output, standard error, seconds."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD"))}
    best = float("inf")
    for _ in range(tries):  # the machine may be busy: the best of three is the program's own time
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain_ppo", *arguments],
            cwd=cwd,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        best = min(best, time.perf_counter() - began)
    return done.returncode, done.stdout, done.stderr, best


def test_help_is_quick(tmp_path: pathlib.Path) -> None:
    code, out, _, seconds = command("--help", cwd=tmp_path)
    assert code == 0
    assert "quickstart" in out
    assert "rollout-worker" in out
    assert seconds < 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.step=5"], "trainer.step: unknown key; did you mean `trainer.steps`?"),
        (["trainer.steps=many"], "trainer.steps: Expected `int`, got `str`"),
        (["model.source=/nowhere/model"], "model.source: '/nowhere/model' is no folder"),
        (["rollout.engine=sglang"], "rollout.engine: 'sglang' is unknown; choose vllm"),
        (["trainer.device=tpu"], "trainer.device: 'tpu' is unknown"),
        (["rollout.listen=tcp://0.0.0.0:0"], "can be reached from other hosts and needs keys"),
        (["rollout.listen=udp://127.0.0.1:1"], "is not tcp://HOST:PORT"),
        (["data.source=nowhere.jsonl"], "data.source: nowhere.jsonl: no such file"),
        (["reward.function=nowhere"], "reward.function: 'nowhere' is unknown"),
        (["--resume"], "--resume: there is no run runs/ppo-*"),
        (["--resume", "gone"], "--resume: gone holds no run"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path: pathlib.Path, arguments: list[str], message: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("trainer: {steps: 2}\n")
    code, out, err, seconds = command("run", str(config), *arguments, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert seconds < 1.0
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, err, seconds = command("run", str(config), f"rollout.listen={address}", cwd=tmp_path)
    assert code == 2
    assert address in err
    assert "Address already in use" in err
    assert err.count("\n") == 1
    assert seconds < 1.0


def test_a_missing_configuration(tmp_path: pathlib.Path) -> None:
    code, _, err, _ = command("run", "nowhere.yaml", cwd=tmp_path)
    assert code == 2
    assert "nowhere.yaml: no such configuration file" in err


def test_config_prints_every_default(tmp_path: pathlib.Path) -> None:
    code, out, _, _ = command("config", "quickstart", "seed=9", cwd=tmp_path)
    assert code == 0
    assert "seed: 9" in out
    assert "max_tokens_per_microbatch:" in out


def test_overrides_may_stand_anywhere(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("")
    code, _, err, _ = command("run", str(config), "seed=1", "--json", "trainer.step=5", cwd=tmp_path)
    assert code == 2
    assert "trainer.step: unknown key" in err
    code, _, err, _ = command("run", str(config), "--jsom", "seed=1", cwd=tmp_path)
    assert code == 2
    assert "unrecognized arguments: --jsom" in err


def test_keys_are_made_for_this_user_alone(tmp_path: pathlib.Path) -> None:
    _, first, _, _ = command("keys", "secret", cwd=tmp_path, tries=1)
    assert "secret: copy this folder" in first
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "secret").iterdir())
