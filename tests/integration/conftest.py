"""Runs of the real command: its own processes, real vLLM, one small model."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

TINY = {
    # A few supervised steps and small batches: what is tested is the machinery, not the learning.
    "warm_start.max_steps": 10,
    "data.train_size": 2048,
    "data.held_out": 32,
    "rollout.prompts_per_step": 32,
    "rollout.max_num_seqs": 32,
    "trainer.eval_every": 100,
}


class Run:
    """One `drivetrain-ppo` process and the folder it writes."""

    def __init__(self, command: list[str], folder: pathlib.Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command, cwd=folder.parent, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, what: str, reached: Callable[[], bool], *, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {what}:\n{self.output()[-3000:]}")
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"{what}: not within {timeout:g} s:\n{self.output()[-3000:]}")
            time.sleep(0.05)

    def output(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def finish(self, *, timeout: float = 400) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out


def family(pid: int) -> set[int]:
    """A process and all that descend from it, as the kernel lists them."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, frontier = {pid}, [pid]
    while frontier:
        for child in children.get(frontier.pop(), []):
            found.add(child)
            frontier.append(child)
    return found


def survivors(pids: set[int], *, timeout: float) -> set[int]:
    """Those of `pids` still there (and no zombies) when the time is up."""

    def alive(pid: int) -> bool:
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + timeout
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Run]]:
    """Starts runs in a folder of the test's own, and ends what a failed test leaves."""
    runs: list[Run] = []

    def begin(*arguments: str, prefix: tuple[str, ...] = (), **settings: Any) -> Run:
        folder = tmp_path / "run"
        settings = {**TINY, "run_dir": str(folder), **settings}
        overrides = [f"{key}={value}" for key, value in settings.items() if value is not None]
        launcher = list(prefix) or [sys.executable, "-m", "drivetrain_ppo"]
        run = Run([*launcher, *arguments, *overrides], folder, {**os.environ, "HF_HUB_OFFLINE": "1"})
        runs.append(run)
        return run

    yield begin
    for run in runs:
        if run.process.poll() is None:
            pids = family(run.process.pid)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if run.process.stdout is not None and not run.process.stdout.closed:
            run.process.communicate(timeout=10)


@pytest.fixture
def processes() -> Callable[[int], set[int]]:
    return family


@pytest.fixture
def still_running() -> Callable[..., set[int]]:
    return survivors


@pytest.fixture
def shared_memory() -> Callable[[], set[str]]:
    return lambda: {entry.name for entry in pathlib.Path("/dev/shm").iterdir()}
