"""The engine's own thread: takes jobs from an inbox, batches requests, and keeps the order that the contract promises.

    inbox ──► backlog ──► backend.step ──► completions
                 ▲
                 barriers (update_weights, sleep, wake) run when nothing is running; what came later waits behind them.
                 During a pause requests stay in the backlog, and barriers run as soon as nothing is sampled.

Everything of the model (construction, steps, weight loading, the end) happens in this one thread, since torch binds
CPU threads and CUDA state per thread.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from drivetrain_rollout._backend import Backend, Sampled
from drivetrain_rollout._changes import Changes
from drivetrain_rollout._checks import after, completion, joined_spans, most_tokens
from drivetrain_rollout._jobs import Abort, Barrier, Close, End, Generate, Job, Pause, Question, settle, tell
from drivetrain_rollout.engine import (
    DigestFunction,
    EngineMetrics,
    PauseMode,
    RequestError,
    WeightsState,
    Writer,
)
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest, Timings, VersionSpan

QUIET = 0.001
MOST_LOOKS = 20
"""An idle engine that gets a request looks again every QUIET seconds until nothing more has come, MOST_LOOKS times at
most: requests that are sent together start together, and callers are not disturbed at each."""


class EngineLoop:
    """Runs in the engine's thread; other threads call ``put`` and read the public attributes."""

    def __init__(
        self, backend: Backend, *, seed: int, digest: DigestFunction | None = None, writer: Writer | None = None
    ) -> None:
        self.changes = Changes(backend, digest=digest, writer=writer, before=self._note_versions)
        self.end: End | None = None
        self.closing_error: Exception | None = None
        self.beat = time.monotonic()
        self.paused: PauseMode | None = None
        self._backend = backend
        self._seeds = random.Random(seed)
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._backlog: deque[Generate | Barrier] = deque()
        self._running: dict[int, Generate] = {}
        self._followed: dict[int, Generate] = {}
        self._pauses: list[Pause] = []
        self._next_key = 0
        self._completed = self._prompt_tokens = self._response_tokens = 0
        self._failed: Counter[str] = Counter()

    @property
    def weights(self) -> WeightsState:
        """Which weights are served now."""
        return self.changes.weights

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
                if self._sampling():
                    self._deliver(self._backend.step())
                    self._tell_followers()
                if self._pauses and not self._sampling():
                    self._settle_pauses()
                self.beat = time.monotonic()
            end = End("engine_closed")
        except BaseException as error:  # noqa: BLE001 - the thread's end, whatever ended it; all who wait get it
            end = End("engine_failed", error)
        self._finish(end)

    def _sampling(self) -> bool:
        return bool(self._running) and self.paused != "keep"

    def _admissible(self) -> bool:
        return any(isinstance(job, Barrier) for job in self._backlog) if self.paused else bool(self._backlog)

    def _take(self) -> bool:
        """Sort what arrived; wait for something when there is nothing to sample. False: the engine is being closed."""
        if self._sampling() or self._admissible():
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
                case Question():
                    settle([(job.reply, job.run())])
                case Pause():
                    self._pause(job)
                case Abort():
                    self._abort(job.job)
                case Close():
                    return False
        return True

    def _admit(self) -> None:
        """Start everything up to the first barrier that must wait, and each barrier once nothing is sampled."""
        waiting: deque[Generate | Barrier] = deque()
        while self._backlog:
            job = self._backlog[0]
            if isinstance(job, Barrier) and self._sampling():
                break
            self._backlog.popleft()
            if job.reply.given_up():
                continue
            if isinstance(job, Barrier):
                self._pass(job)
            elif self.paused:
                waiting.append(job)
            else:
                self._start(job)
        self._backlog.extendleft(reversed(waiting))

    def _start(self, job: Generate) -> None:
        request = job.request
        if self.changes.asleep:
            self._refuse(job, "engine_asleep", "the engine sleeps; wake it first")
        elif self.weights.status == "refused":
            self._refuse(job, "stale_weights", "the engine does not hold complete weights; update them first")
        elif request.continued is not None and _is_full(request, self._backend.info.max_model_len):
            settle([(job.reply, msgspec.structs.replace(request.continued, finish_reason="length"))])
        else:
            key, self._next_key = self._next_key, self._next_key + 1
            try:
                self._backend.add(key, self._seeded(request))
            except ValueError as error:
                self._refuse(job, "engine_refused", str(error), cause=error)
                return
            job.begun = time.monotonic()
            self._prompt_tokens += len(request.prompt_token_ids)
            self._running[key] = job
            if job.follower is not None:
                self._followed[key] = job

    def _seeded(self, request: GenerateRequest) -> GenerateRequest:
        if request.sampling.seed is not None or request.sampling.temperature == 0:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.getrandbits(63))
        return msgspec.structs.replace(request, sampling=sampling)

    def _refuse(self, job: Generate, reason: str, message: str, *, cause: Exception | None = None) -> None:
        request = job.request
        error = RequestError(request.request_id, reason, message, partial=request.continued)  # type: ignore[arg-type]
        error.__cause__ = cause
        self._failed[reason] += 1
        settle([(job.reply, error)])

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
                self._forget(key)
                self._backend.abort(key)
                return
        # Still waiting, or ended meanwhile: it was given up, and _admit passes over it.

    def _forget(self, key: int) -> Generate | None:
        self._followed.pop(key, None)
        return self._running.pop(key, None)

    def _pause(self, job: Pause) -> None:
        self.paused = job.mode
        self._pauses.append(job)
        if job.mode == "wait" or not self._running:
            return
        self._deliver(self._backend.drain())
        if job.mode == "abort":
            ended = self._backend.progress(list(self._running))
            for sampled in ended:
                self._backend.abort(sampled.key)
            self._deliver(ended, early=True)

    def _settle_pauses(self) -> None:
        settled, self._pauses = self._pauses, []
        settle((pause.reply, None) for pause in settled)

    def resume(self) -> None:
        """Question: go on sampling."""
        self.paused = None
        self._settle_pauses()
        if self.weights.status == "refused":
            for sampled in self._backend.progress(list(self._running)):
                self._backend.abort(sampled.key)
                job = self._forget(sampled.key)
                assert job is not None
                message = "its weights were replaced while it was kept, and the engine holds no complete ones now"
                error = RequestError(
                    job.request.request_id, "stale_weights", message, partial=self._partial(job, sampled)
                )
                self._failed["stale_weights"] += 1
                settle([(job.reply, error)])

    def metrics(self) -> EngineMetrics:
        """Question: what goes on."""
        usage = self._backend.usage()
        return EngineMetrics(
            running=len(self._running) - usage.waiting,
            waiting=sum(isinstance(job, Generate) for job in self._backlog) + usage.waiting,
            kv_cache_usage=usage.kv_cache_usage,
            preemptions=usage.preemptions,
            prompt_tokens=self._prompt_tokens,
            response_tokens=self._response_tokens,
            completed=self._completed,
            failed=dict(self._failed),
        )

    def sleep(self, level: int) -> None:
        """Barrier: give the device's memory back."""
        if self._running:
            raise RuntimeError(
                f"sleep: a pause keeps {len(self._running)} responses; pause with 'abort' or 'wait', or resume first"
            )
        self.changes.sleep(level)

    def _note_versions(self) -> None:
        """The weights are about to change: what is kept has been sampled with those there are now."""
        for sampled in self._backend.progress(list(self._running)):
            job = self._running[sampled.key]
            job.spans = self._spans(job, len(sampled.token_ids))

    def _spans(self, job: Generate, tokens: int) -> list[VersionSpan]:
        """Of the ``tokens`` sampled for it."""
        before = sum(span.tokens for span in job.spans)
        return list(joined_spans([*job.spans, VersionSpan(self.weights.policy_version, tokens - before)]))

    def _deliver(self, ended: Iterable[Sampled], *, early: bool = False) -> None:
        jobs = [(self._forget(sampled.key), sampled) for sampled in ended]
        # Without a job: aborted after the step had begun.
        settle((job.reply, self._outcome(job, sampled, early=early)) for job, sampled in jobs if job is not None)

    def _outcome(self, job: Generate, sampled: Sampled, *, early: bool) -> Completion | RequestError:
        try:
            outcome = self._completion(job, sampled, early=early)
        except RequestError as error:
            self._failed[error.reason] += 1
            return error
        self._completed += 1
        self._response_tokens += len(sampled.token_ids)
        return outcome

    def _completion(self, job: Generate, sampled: Sampled, *, early: bool) -> Completion:
        assert job.begun is not None
        return completion(
            job.request,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            spans=self._spans(job, len(sampled.token_ids)),
            timings=Timings(queued=job.begun - job.made, sampled=time.monotonic() - job.begun),
            early=early,
        )

    def _partial(self, job: Generate, sampled: Sampled) -> Completion | None:
        try:
            return self._completion(job, sampled, early=True)
        except RequestError:
            return job.request.continued  # what came after it cannot be trusted

    def _tell_followers(self) -> None:
        now = time.monotonic()
        due = [
            key
            for key, job in self._followed.items()
            if job.follower is not None and now - max(job.told_at, job.begun or 0.0) >= job.follower.every
        ]
        if due:
            tell((job.follower, chunk) for job, chunk in self._chunks(due, now) if job.follower is not None)

    def _chunks(self, keys: list[int], now: float) -> Iterable[tuple[Generate, Chunk]]:
        for sampled in self._backend.progress(keys):
            job = self._followed[sampled.key]
            job.told_at = now
            new = slice(job.told, len(sampled.token_ids))
            if new.start < new.stop and sampled.logprobs is not None:
                job.told = new.stop
                yield (
                    job,
                    Chunk(
                        request_id=job.request.request_id,
                        response_token_ids=tuple(sampled.token_ids[new]),
                        rollout_logprobs=tuple(sampled.logprobs[new]),
                        version_spans=after(self._spans(job, new.stop), new.start),
                    ),
                )

    def _finish(self, end: End) -> None:
        for sampled in self._last_progress():
            job = self._forget(sampled.key)
            if job is not None:
                error = end.error(job)
                assert isinstance(error, RequestError)
                error.partial = self._partial(job, sampled)
                settle([(job.reply, error)])
        try:
            self._backend.close()
        except Exception as error:  # noqa: BLE001 - close() raises it
            self.closing_error = error
        with self._ending:
            self.end = end
        waiting = [*self._running.values(), *self._backlog, *self._pauses, *self._arrived()]
        settle((job.reply, end.error(job)) for job in waiting if not isinstance(job, Abort | Close))

    def _last_progress(self) -> list[Sampled]:
        try:
            return self._backend.progress(list(self._running))
        except Exception:  # noqa: BLE001 - of a broken backend; then nothing is known of what it had sampled
            return []


def _is_full(request: GenerateRequest, max_model_len: int) -> bool:
    assert request.continued is not None
    return len(request.continued.response_token_ids) >= most_tokens(request, max_model_len)
