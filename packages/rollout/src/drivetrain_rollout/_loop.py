"""The engine's own thread: takes jobs from an inbox, batches requests, and keeps the order that the contract promises.

    inbox ──► backlog ──► backend.step ──► completions
                 ▲
                 barriers (update_weights, sleep, wake) run when nothing is running; what came later waits behind them

Everything of the model (construction, steps, weight loading, the end) happens in this one thread, since torch binds
CPU threads and CUDA state per thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from drivetrain_rollout._checks import Manifest, completion
from drivetrain_rollout._jobs import Abort, Barrier, Close, End, Generate, Job, Ping, settle
from drivetrain_rollout.engine import (
    DigestFunction,
    EngineInfo,
    RequestError,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
    WeightWrite,
    Writer,
)
from drivetrain_rollout.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


QUIET = 0.001
MOST_LOOKS = 20
"""An idle engine that gets a request looks again every QUIET seconds until nothing more has come, MOST_LOOKS times at
most: requests that are sent together start together, and callers are not disturbed at each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A backend's answer to the request it was given under ``key``."""

    key: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str


class Backend(Protocol):
    """A model that samples in batches. Every method is called in the engine's thread, one at a time."""

    @property
    def info(self) -> EngineInfo:
        """What the model is; fixed."""

    @property
    def manifest(self) -> Manifest:
        """What a complete set of weights is; fixed."""

    def add(self, key: int, request: GenerateRequest) -> None:
        """Take a request. A ValueError refuses this one alone."""

    def abort(self, key: int) -> None:
        """Forget a request that was added and has not ended."""

    def step(self) -> list[Sampled]:
        """Advance what was added; return what ended. Any exception is the end of the engine."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights, and use nothing more that was computed with the old ones; nothing is running. Any
        exception leaves them unusable."""

    def parameters(self) -> Mapping[str, Tensor]:
        """What it samples with, by name. Asked for only if ``info.can_write``."""

    def write(self, act: Callable[[], str]) -> str:
        """Let ``act`` change the parameters in place; otherwise as ``load``."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back; nothing is running."""

    def wake(self) -> None:
        """Take the memory again."""

    def close(self) -> None:
        """Free everything."""


class EngineLoop:
    """Runs in the engine's thread; other threads call ``put`` and read the public attributes."""

    def __init__(self, backend: Backend, *, digest: DigestFunction | None, writer: Writer | None) -> None:
        self.weights = WeightsState(policy_version=0, digest=None, status="ready")
        self.end: End | None = None
        self.closing_error: Exception | None = None
        self.beat = time.monotonic()
        self._backend = backend
        self._digest = digest
        self._writer = writer
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._backlog: deque[Generate | Barrier] = deque()
        self._running: dict[int, Generate] = {}
        self._asleep = False
        self._next_key = 0

    def put(self, job: Job) -> None:
        """Hand a job over, from any thread. When the loop has ended, raises what the reply would have been."""
        with self._ending:
            if self.end is None:
                self._inbox.put(job)
                return
        if not isinstance(job, Abort | Close):
            raise self.end.error(job)

    def run(self) -> None:
        """Serve until closed or broken, then free the model. Returns; whoever waits gets the error."""
        try:
            while self._take():
                self._admit()
                if self._running:
                    self._deliver(self._backend.step())
                self.beat = time.monotonic()
            end = End("engine_closed")
        except BaseException as error:  # noqa: BLE001 - the thread's end, whatever ended it; all who wait get it
            end = End("engine_failed", error)
        self._finish(end)

    def _take(self) -> bool:
        """Sort what arrived; wait for something when there is nothing to run. False: the engine is being closed."""
        if self._running or self._backlog:
            return self._sort(self._arrived())
        going_on = self._sort([self._inbox.get()])
        for _ in range(MOST_LOOKS if self._backlog and isinstance(self._backlog[-1], Generate) else 0):
            time.sleep(QUIET)
            if self._inbox.empty():
                break
            going_on = self._sort(self._arrived()) and going_on
        return going_on

    def _arrived(self) -> list[Job]:
        # qsize does not block, and only this thread takes from the inbox.
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def _sort(self, jobs: list[Job]) -> bool:
        self.beat = time.monotonic()
        for job in jobs:
            match job:
                case Generate() | Barrier():
                    self._backlog.append(job)
                case Ping():
                    settle([(job.reply, None)])
                case Abort():
                    self._abort(job.job)
                case Close():
                    return False
        return True

    def _admit(self) -> None:
        """Start everything up to the first barrier, and the barrier itself once nothing is running."""
        while self._backlog:
            job = self._backlog[0]
            if isinstance(job, Barrier) and self._running:
                return
            self._backlog.popleft()
            if job.reply.given_up():
                continue
            if isinstance(job, Barrier):
                self._pass(job)
            else:
                self._start(job)

    def _start(self, job: Generate) -> None:
        request_id = job.request.request_id
        refused: RequestError
        if self._asleep:
            refused = RequestError(request_id, "engine_asleep", "the engine sleeps; wake it first")
        elif self.weights.status == "refused":
            message = "the engine does not hold complete weights; update them first"
            refused = RequestError(request_id, "stale_weights", message)
        else:
            key, self._next_key = self._next_key, self._next_key + 1
            try:
                self._backend.add(key, job.request)
            except ValueError as error:
                refused = RequestError(request_id, "engine_refused", str(error))
                refused.__cause__ = error
            else:
                self._running[key] = job
                return
        settle([(job.reply, refused)])

    def _pass(self, job: Barrier) -> None:
        try:
            outcome = job.run()
        except Exception as error:  # noqa: BLE001 - belongs to whoever asked; the engine goes on
            outcome = error
        settle([(job.reply, outcome)])
        self.beat = time.monotonic()

    def _abort(self, job: Generate) -> None:
        for key, running in self._running.items():
            if running is job:
                del self._running[key]
                self._backend.abort(key)
                return
        # Still waiting, or ended meanwhile: it was given up, and _admit passes over it.

    def _deliver(self, ended: list[Sampled]) -> None:
        jobs = [(self._running.pop(sampled.key, None), sampled) for sampled in ended]
        # Without a job: aborted after the step had begun.
        settle((job.reply, self._completion(job.request, sampled)) for job, sampled in jobs if job is not None)

    def _completion(self, request: GenerateRequest, sampled: Sampled) -> Completion | RequestError:
        try:
            return completion(
                request,
                token_ids=sampled.token_ids,
                logprobs=sampled.logprobs,
                finish_reason=sampled.finish_reason,
                policy_version=self.weights.policy_version,
            )
        except RequestError as error:
            return error

    def _finish(self, end: End) -> None:
        try:
            self._backend.close()
        except Exception as error:  # noqa: BLE001 - close() raises it
            self.closing_error = error
        with self._ending:
            self.end = end
        waiting = [*self._running.values(), *self._backlog, *self._arrived()]
        settle((job.reply, end.error(job)) for job in waiting if not isinstance(job, Abort | Close))

    def update(self, update: WeightUpdate) -> WeightsState:
        """Barrier: load a complete set of weights, or refuse it."""
        if self._asleep:
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        arrived = [(name, tensor.detach()) for name, tensor in update.tensors]
        tensors = self._backend.manifest.accept(arrived)
        if self._digest is not None and (digest := self._digest(arrived)) != update.digest:
            raise WeightsRefused(
                f"policy version {update.policy_version}: the digest of what arrived is {digest}, "
                f"that of the update {update.digest}"
            )
        self._drop_weights()
        try:
            self._backend.load(tensors)
        except Exception as error:
            raise WeightsRefused(
                f"policy version {update.policy_version}: loading broke off ({error!r}); nothing is served until a "
                "whole update succeeds"
            ) from error
        self.weights = WeightsState(policy_version=update.policy_version, digest=update.digest, status="ready")
        return self.weights

    def write(self, write: WeightWrite) -> WeightsState:
        """Barrier: let the writer put other weights in place of the present ones."""
        if self._asleep:
            raise RuntimeError("write_weights: the engine sleeps; wake it first")
        if self._writer is None:
            raise RuntimeError("write_weights: the engine was made without a writer (info.can_write is False)")
        try:
            act = self._writer(self._backend.parameters(), write.message)
        except Exception as error:
            raise WeightsRefused(f"policy version {write.policy_version}: it cannot be written: {error}") from error
        self._drop_weights()
        try:
            digest = self._backend.write(act)
        except Exception as error:
            raise WeightsRefused(
                f"policy version {write.policy_version}: writing broke off ({error!r}); nothing is served until a "
                "whole update succeeds"
            ) from error
        if digest != write.digest:
            raise WeightsRefused(
                f"policy version {write.policy_version}: the digest of what is in place now is {digest}, that of the "
                f"update {write.digest}; nothing is served until a whole update succeeds"
            )
        self.weights = WeightsState(policy_version=write.policy_version, digest=digest, status="ready")
        return self.weights

    def sleep(self, level: int) -> None:
        """Barrier: give the device's memory back."""
        if self._asleep:
            raise RuntimeError("sleep: the engine sleeps already")
        if level == 2:
            self._drop_weights()
        self._backend.sleep(level)
        self._asleep = True

    def wake(self) -> None:
        """Barrier: take the device's memory again."""
        if not self._asleep:
            raise RuntimeError("wake: the engine does not sleep")
        self._backend.wake()
        self._asleep = False

    def _drop_weights(self) -> None:
        served = self.weights
        self.weights = WeightsState(policy_version=served.policy_version, digest=served.digest, status="refused")
