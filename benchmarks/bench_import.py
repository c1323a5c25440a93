"""What one waits for before anything happens: the command's help, and the import of a library beside torch's."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_help_of_the_command(within):
    command = [Path(sys.executable).parent / "drivetrain-ppo", "--help"]
    within(lambda: subprocess.run(command, check=True, capture_output=True, timeout=60), limit=0.3, rounds=9)


class Stopwatch:
    """A clock that goes on by what is added to it: a child process has measured it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


IMPORT_BESIDE_TORCH = """
import time, torch
start = time.perf_counter()
import drivetrain_algorithms
print(time.perf_counter() - start)
"""
stopwatch = Stopwatch()


@pytest.mark.benchmark(timer=stopwatch)
def test_import_of_algorithms_beside_torch(within):
    def import_it() -> None:
        command = [sys.executable, "-c", IMPORT_BESIDE_TORCH]
        stopwatch.seconds += float(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)

    within(import_it, limit=0.05, rounds=5)
