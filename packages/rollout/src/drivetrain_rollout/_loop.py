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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from drivetrain_rollout._checks import Manifest, completion
from drivetrain_rollout.engine import (
    DigestFunction,
    EngineInfo,
    RequestError,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
)
from drivetrain_rollout.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


QUIET = 0.001
LONGEST_GATHERING = 0.02
"""An idle engine starts once nothing has come for QUIET seconds, so that requests sent together are batched together;
at the latest after LONGEST_GATHERING."""


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
        """Replace all weights and empty the caches; nothing is running. Any exception leaves them unusable."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back; nothing is running."""

    def wake(self) -> None:
        """Take the memory again."""

    def close(self) -> None:
        """Free everything."""


@dataclass(slots=True)
class Generate:
    """Sample a response; ends with the completion."""

    request: GenerateRequest
    future: Future[Completion] = field(default_factory=Future)


@dataclass(slots=True)
class Barrier:
    """Call ``run`` when nothing is running; ends with its result."""

    what: str
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Ping:
    """Ends as soon as the thread sees it."""

    what: str
    future: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class Abort:
    """Stop a request nobody waits for any more."""

    job: Generate


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread."""


Job = Generate | Barrier | Ping | Abort | Close


@dataclass(frozen=True, slots=True)
class End:
    """Why the thread takes no more jobs."""

    reason: Literal["engine_closed", "engine_failed"]
    cause: BaseException | None = None

    def error(self, job: Generate | Barrier | Ping) -> RequestError | RuntimeError:
        """What the one who waits for ``job`` gets."""
        message = "the engine is closed" if self.cause is None else f"the engine failed: {self.cause!r}"
        error: RequestError | RuntimeError
        if isinstance(job, Generate):
            error = RequestError(job.request.request_id, self.reason, message)
        else:
            error = RuntimeError(f"{job.what}: {message}")
        error.__cause__ = self.cause
        return error


class EngineLoop:
    """Runs in the engine's thread; other threads call ``put`` and read the public attributes."""

    def __init__(self, backend: Backend, *, digest: DigestFunction | None) -> None:
        self.weights = WeightsState(policy_version=0, digest=None, status="ready")
        self.end: End | None = None
        self.closing_error: Exception | None = None
        self.beat = time.monotonic()
        self._backend = backend
        self._digest = digest
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._backlog: deque[Generate | Barrier] = deque()
        self._running: dict[int, Generate] = {}
        self._asleep = False
        self._next_key = 0

    def put(self, job: Job) -> None:
        """Hand a job over, from any thread. Raises what its future would, when the loop has ended."""
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
        idle = not self._running and not self._backlog
        gathering_until = 0.0
        while True:
            try:
                if not idle:
                    job = self._inbox.get_nowait()
                elif not gathering_until:
                    job = self._inbox.get()
                    gathering_until = time.monotonic() + LONGEST_GATHERING
                else:
                    left = gathering_until - time.monotonic()
                    job = self._inbox.get(timeout=min(QUIET, max(left, 0.0)))
            except queue.Empty:
                return True
            self.beat = time.monotonic()
            match job:
                case Generate() | Barrier():
                    self._backlog.append(job)
                case Ping():
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_result(None)
                case Abort():
                    self._abort(job.job)
                case Close():
                    return False

    def _admit(self) -> None:
        """Start everything up to the first barrier, and the barrier itself once nothing is running."""
        while self._backlog:
            job = self._backlog[0]
            if isinstance(job, Barrier) and self._running:
                return
            self._backlog.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            if isinstance(job, Barrier):
                self._pass(job)
            else:
                self._start(job)

    def _start(self, job: Generate) -> None:
        request_id = job.request.request_id
        if self._asleep:
            job.future.set_exception(RequestError(request_id, "engine_asleep", "the engine sleeps; wake it first"))
        elif self.weights.status == "refused":
            message = "the engine does not hold complete weights; update them first"
            job.future.set_exception(RequestError(request_id, "stale_weights", message))
        else:
            key, self._next_key = self._next_key, self._next_key + 1
            try:
                self._backend.add(key, job.request)
            except ValueError as error:
                refused = RequestError(request_id, "engine_refused", str(error))
                refused.__cause__ = error
                job.future.set_exception(refused)
            else:
                self._running[key] = job

    def _pass(self, job: Barrier) -> None:
        try:
            result = job.run()
        except Exception as error:  # noqa: BLE001 - belongs to whoever asked; the engine goes on
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        self.beat = time.monotonic()

    def _abort(self, job: Generate) -> None:
        for key, running in self._running.items():
            if running is job:
                del self._running[key]
                self._backend.abort(key)
                return
        # Still waiting, or ended meanwhile: its future is cancelled, and _admit passes over it.

    def _deliver(self, ended: list[Sampled]) -> None:
        for sampled in ended:
            job = self._running.pop(sampled.key, None)
            if job is None:
                continue  # aborted in the same step
            try:
                result = completion(
                    job.request,
                    token_ids=sampled.token_ids,
                    logprobs=sampled.logprobs,
                    finish_reason=sampled.finish_reason,
                    policy_version=self.weights.policy_version,
                )
            except RequestError as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _finish(self, end: End) -> None:
        try:
            self._backend.close()
        except Exception as error:  # noqa: BLE001 - close() raises it
            self.closing_error = error
        with self._ending:
            self.end = end
        waiting: list[Job] = [*self._running.values(), *self._backlog]
        while not self._inbox.empty():
            waiting.append(self._inbox.get_nowait())
        for job in waiting:
            if isinstance(job, Abort | Close):
                continue
            if job.future.running() or job.future.set_running_or_notify_cancel():
                job.future.set_exception(end.error(job))

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
