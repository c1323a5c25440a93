"""Scoring in worker processes, each call under a deadline."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from drivetrain_rewards._judge import path_of
from drivetrain_rewards._process import WorkerDied, WorkerProcess
from drivetrain_rewards._rewards import Rewards
from drivetrain_rewards._types import FailureReason, Outcome, RewardFunction, RewardRequest, ScoreFailure

_JOIN_S = 10.0

log = logging.getLogger("drivetrain_rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    request: RewardRequest
    outcome: Future[Outcome] = field(default_factory=Future)

    def fail(self, reason: FailureReason, message: str) -> None:
        self.outcome.set_result(ScoreFailure(sample_id=self.request.sample_id, reason=reason, message=message))


class RewardPool(Rewards):
    """Calls a reward function in worker processes. A context manager; usable from any event loop and several at once.

    Each call has a deadline. A worker that misses it is killed with everything it has started, and replaced; its sample
    is a `ScoreFailure`, and the other samples go on. The same holds for a worker that dies. The function runs in its
    worker's main thread, so signal-based time limits work in it as they do in a script. What it prints to standard
    output is discarded; standard error is this process's.

    Consumes: requests, from `score`, in order. Waits for: a free worker, then its outcome or the deadline. Is unblocked
    by: the worker's reply, its death, the deadline, `close`. Produces: one outcome per request.
    """

    def __init__(
        self,
        function: str | RewardFunction,
        *,
        num_workers: int,
        deadline: float,
        max_failure_rate: float = 0.5,
        start_deadline: float = 120.0,
    ) -> None:
        """Start the workers, and wait until the first has imported the function.

        Args:
            function: `module:name`, `/path/file.py:name`, or a function defined at the top level of a module.
            num_workers: How many processes.
            deadline: Seconds for one call. Waiting for a free worker and starting one do not count.
            max_failure_rate: Share of failures among the last outcomes above which `score` raises, 0 to 1.
            start_deadline: Seconds for a worker to start and to import the function.

        Raises:
            ValueError: The function cannot be imported, or a number is out of its range.
            TimeoutError: No worker was ready in time.
        """
        super().__init__(max_failure_rate=max_failure_rate)
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}: it must be at least 1")
        if not (deadline > 0 and start_deadline > 0):
            raise ValueError(f"deadline is {deadline} s, start_deadline {start_deadline} s: both must be positive")
        self._function = path_of(function)
        self._deadline = deadline
        self._start_deadline = start_deadline
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[WorkerProcess] = set()
        self._first: Future[None] = Future()
        self._owner = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"drivetrain-rewards {number}", daemon=True)
            for number in range(num_workers)
        ]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()
        try:
            self._first.result()
        except BaseException:
            self.close()
            raise

    async def _outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        jobs = [_Job(request=request) for request in requests]
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardPool is closed")
            for job in jobs:
                self._jobs.put(job)
        return list(await asyncio.gather(*(asyncio.wrap_future(job.outcome) for job in jobs)))

    def close(self) -> None:
        """Kill the workers and end the threads; whoever waits for a score gets a RuntimeError. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            processes = tuple(self._processes)
        for process in processes:
            process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise RuntimeError(f"{', '.join(alive)} did not end within {_JOIN_S:g} s")
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                self._abandon(job)
        atexit.unregister(self.close)

    def _work(self) -> None:
        """One worker's thread: starts it, feeds it, replaces it."""
        process: WorkerProcess | None = None
        try:
            process = self._start()
            self._settle_first(None)
        except Exception as error:  # noqa: BLE001  # the constructor raises it, if no other worker was quicker
            self._settle_first(error)
        try:
            while (job := self._jobs.get()) is not None:
                if job.outcome.set_running_or_notify_cancel():
                    process = self._score(process, job)
        finally:
            self._dispose(process)

    def _score(self, process: WorkerProcess | None, job: _Job) -> WorkerProcess | None:
        """Settle a job; returns the worker for the next one."""
        try:
            data = msgspec.json.encode(job.request)
        except (TypeError, ValueError) as error:
            job.fail("raised", f"the request cannot be sent to a worker: {type(error).__name__}: {error}")
            return process
        try:
            process = process or self._start()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(job, "worker_died", f"no worker could be started: {error}")
            return None
        try:
            outcome = process.score(data, self._deadline)
        except TimeoutError as error:
            self._fail(job, "timeout", str(error))
        except WorkerDied as error:
            self._fail(job, "worker_died", str(error))
        else:
            job.outcome.set_result(outcome)
            return process
        self._dispose(process)
        return self._replace()

    def _replace(self) -> WorkerProcess | None:
        """A new worker at once, so that the next sample need not wait for it; None leaves it to the next sample."""
        try:
            return self._start()
        except (OSError, ValueError, RuntimeError) as error:
            if not self._closed:
                log.warning("a reward worker could not be replaced yet: %s", error)
            return None

    def _start(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardPool is closed")
            process = WorkerProcess()
            self._processes.add(process)
        try:
            process.prepare(self._function, self._start_deadline)
        except BaseException:
            self._dispose(process)
            raise
        return process

    def _dispose(self, process: WorkerProcess | None) -> None:
        if process is not None:
            with self._lock:
                self._processes.discard(process)
            process.dispose()

    def _settle_first(self, error: Exception | None) -> None:
        with self._lock:
            if self._first.done():
                if error is not None and not self._closed:
                    log.warning("a reward worker did not start: %s", error)
            elif error is None:
                self._first.set_result(None)
            else:
                self._first.set_exception(error)

    def _fail(self, job: _Job, reason: FailureReason, message: str) -> None:
        if self._closed:
            job.outcome.set_exception(
                RuntimeError(f"the RewardPool closed while it scored sample {job.request.sample_id}")
            )
        else:
            job.fail(reason, message)

    def _abandon(self, job: _Job) -> None:
        if job.outcome.set_running_or_notify_cancel():
            job.outcome.set_exception(
                RuntimeError(f"the RewardPool closed while sample {job.request.sample_id} waited")
            )
