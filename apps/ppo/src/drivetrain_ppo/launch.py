"""Child processes that end with their parent, however it ends."""

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Self

PR_SET_PDEATHSIG = 1
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
)
"""Beginnings of the variables that describe torchrun's own process group."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, also by SIGKILL. Exits at once if it already has.

    Linux only; elsewhere the lost connection ends a worker a few seconds later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent process is gone")


def child_environ(parent: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a child: the parent's with changes (None takes a variable away), without torchrun's group.

    An engine makes a process group of its own, and would join the learner's instead. The one thread that torchrun gives
    each rank goes too.
    """
    torchrun = (*TORCHRUN, "OMP_NUM_THREADS") if "TORCHELASTIC_RUN_ID" in parent else TORCHRUN
    kept = {name: value for name, value in parent.items() if not name.startswith(torchrun)}
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


class Child:
    """A role of the run in its own process, its output in a log file."""

    def __init__(
        self, role: str, arguments: Sequence[str], *, log: pathlib.Path, environ: Mapping[str, str | None]
    ) -> None:
        """`environ` changes this process's own (`child_environ`)."""
        self.role = role
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "drivetrain_ppo", role, *arguments, "--parent", str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environ(os.environ, environ),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its children in order
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise RuntimeError with the end of the log if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"{self.role} ended with code {code}; the end of {self.log}:\n{self.tail()}")

    def explain(self, error: BaseException) -> None:
        """Add the end of the log to an error if the process has ended."""
        if self._process.poll() is not None:
            error.add_note(
                f"{self.role} ended with code {self._process.returncode}; the end of {self.log}:\n{self.tail()}"
            )

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, *, patience: float = 6.0) -> None:
        """Wait for the process to end by itself, then SIGTERM, then SIGKILL its whole session."""
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
            if signal_number is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal_number)
            deadline = time.monotonic() + patience
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._process.wait()
