"""A worker process as its pool sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from drivetrain_rewards._channel import Channel, Ready, Setup
from drivetrain_rewards._types import Outcome

_decoder: msgspec.json.Decoder[Outcome] = msgspec.json.Decoder(Outcome)


class WorkerDied(Exception):
    """The process ended while it was needed, or said something that is no outcome."""


class WorkerProcess:
    """Owned by one thread, which starts it and talks to it; `kill` may be called from any."""

    def __init__(self) -> None:
        reader, their_writer = os.pipe()
        their_reader, writer = os.pipe()
        try:
            # A session of its own: Ctrl-C is the pool's to handle, and what the function starts is killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "drivetrain_rewards.worker", str(their_reader), str(their_writer)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(their_reader, their_writer),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            os.close(writer)
            raise
        finally:
            os.close(their_reader)
            os.close(their_writer)
        self._channel = Channel(reader, writer)
        self._lock = threading.Lock()

    def prepare(self, function: str, seconds: float) -> None:
        """Have the worker import the function.

        Raises:
            ValueError: It cannot, or ended meanwhile.
            TimeoutError: It takes longer than `seconds`.
        """
        setup = Setup(function=function, sys_path=sys.path)
        deadline = time.monotonic() + seconds
        try:
            self._channel.send(msgspec.json.encode(setup), deadline)
            ready = msgspec.json.decode(self._channel.receive(deadline), type=Ready)
        except TimeoutError:
            raise TimeoutError(f"{function!r} was not imported within {seconds:g} s") from None
        except (EOFError, BrokenPipeError, msgspec.DecodeError):
            raise ValueError(f"cannot import {function!r}: {self._ending()} meanwhile") from None
        if ready.error:
            raise ValueError(ready.error)

    def score(self, data: bytes, seconds: float) -> Outcome:
        """Have an encoded request scored.

        Raises:
            TimeoutError: There is no outcome after `seconds`. The worker must be killed.
            WorkerDied: It ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        try:
            self._channel.send(data, deadline)
            return _decoder.decode(self._channel.receive(deadline))
        except TimeoutError:
            raise TimeoutError(f"no score within {seconds:g} s") from None
        except (EOFError, BrokenPipeError):
            raise WorkerDied(f"{self._ending()} while it scored the sample") from None
        except msgspec.DecodeError as error:
            raise WorkerDied(f"the worker sent something that is no outcome: {error}") from error

    def kill(self) -> None:
        """Kill the worker and all that it has started. Idempotent, from any thread."""
        with self._lock:
            if self._process.returncode is None:  # not waited for, so the number is still the worker's
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def dispose(self) -> None:
        """Kill it and close the pipes; the owner's last call."""
        self.kill()
        self._channel.close()

    def _ending(self) -> str:
        self.kill()  # a process that has ended keeps the status it ended with
        code = self._process.returncode
        if code < 0:
            return f"the worker was ended by {signal.Signals(-code).name}"
        return f"the worker exited with status {code}"
