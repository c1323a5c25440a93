"""What engines in this process share on the caller's side: checks, submission, awaiting under a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from drivetrain_rollout._backend import Backend
from drivetrain_rollout._checks import check_request
from drivetrain_rollout._jobs import Abort, Barrier, Close, Follower, Generate, Pause, Question, Reply
from drivetrain_rollout._loop import EngineLoop
from drivetrain_rollout._streams import stream_of
from drivetrain_rollout.engine import (
    DigestFunction,
    EngineConfig,
    EngineInfo,
    EngineMetrics,
    PauseMode,
    RequestError,
    RolloutEngine,
    WeightsState,
    WeightUpdate,
    WeightWrite,
    Writer,
)
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest

T = TypeVar("T")

CLOSE_TIMEOUT = 120.0
"""Seconds that ending the engine may take: the step it is in, and freeing the device."""


class ThreadedEngine(RolloutEngine):
    """An engine whose model lives in one thread of this process.

    consumes: requests, from any event loop. waits for: the engine's thread. is unblocked by: the step that ends a
    request, or the thread's own end. produces: completions.
    """

    def __init__(
        self,
        build: Callable[[], Backend],
        config: EngineConfig,
        *,
        digest: DigestFunction | None,
        writer: Writer | None = None,
    ) -> None:
        """Start the thread and wait until ``build``, called in it, has returned the model.

        Raises:
            TimeoutError: it took longer than ``config.start_timeout``.
            Exception: what ``build`` raised.
        """
        self._config = config
        self._refused: Counter[str] = Counter()
        started: Future[tuple[EngineLoop, EngineInfo]] = Future()
        self._thread = threading.Thread(
            target=_serve,
            args=(build, config.seed, digest, writer, started),
            name=f"drivetrain-{config.engine}",
            daemon=True,
        )
        self._thread.start()
        try:
            self._loop, self._info = started.result(timeout=config.start_timeout)
        except TimeoutError:
            if started.done():
                raise
            raise TimeoutError(
                f"{config.engine} has not loaded {config.model} within {config.start_timeout:.0f} s (start_timeout)"
            ) from None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def weights(self) -> WeightsState:
        return self._loop.weights

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check(request)
        return await self._answer(Generate(request))

    async def stream(self, request: GenerateRequest, *, every: float = 0.1) -> AsyncIterator[Chunk]:
        self._check(request)
        follower = Follower(every)
        answer = asyncio.ensure_future(self._answer(Generate(request, follower=follower)))
        async for chunk in stream_of(request, answer, follower.chunks):
            yield chunk

    def _check(self, request: GenerateRequest) -> None:
        try:
            check_request(request, self._info)
        except RequestError as error:
            self._refused[error.reason] += 1
            raise

    async def _answer(self, job: Generate) -> Completion:
        try:
            return await self._ask(job, job.reply)
        except asyncio.CancelledError:
            self._loop.put(Abort(job))
            raise
        except TimeoutError as error:
            self._loop.put(Abort(job))
            request = job.request
            raise RequestError(request.request_id, "engine_failed", str(error), partial=request.continued) from error

    async def pause(self, mode: PauseMode = "wait") -> None:
        if mode not in ("wait", "keep", "abort"):
            raise ValueError(f"pause mode {mode!r}: use 'wait', 'keep' or 'abort'")
        job = Pause(mode)
        await self._ask(job, job.reply)

    async def resume(self) -> None:
        job = Question("resume", self._loop.resume)
        await self._ask(job, job.reply)

    async def metrics(self) -> EngineMetrics:
        job = Question("metrics", self._loop.metrics)
        found: EngineMetrics = await self._ask(job, job.reply)
        failed = self._refused + Counter(found.failed)
        return msgspec.structs.replace(found, failed=dict(failed))

    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        job = Barrier(f"update_weights to version {update.policy_version}", partial(self._loop.changes.update, update))
        state: WeightsState = await self._ask(job, job.reply)
        return state

    async def write_weights(self, write: WeightWrite) -> WeightsState:
        if not self._info.can_write:
            return await super().write_weights(write)
        job = Barrier(f"write_weights to version {write.policy_version}", partial(self._loop.changes.write, write))
        state: WeightsState = await self._ask(job, job.reply)
        return state

    async def sleep(self, level: int = 1) -> None:
        if not self._info.can_sleep:
            raise RuntimeError(
                f"{self._info.engine} on {self._info.device} cannot sleep as it was started (info.can_sleep is False)"
            )
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: use 1 (keep the weights in host memory) or 2 (drop them)")
        job = Barrier("sleep", partial(self._loop.sleep, level))
        await self._ask(job, job.reply)

    async def wake(self) -> None:
        job = Barrier("wake", self._loop.changes.wake)
        await self._ask(job, job.reply)

    async def health(self) -> None:
        job = Question("health", lambda: None)
        await self._ask(job, job.reply)

    async def close(self) -> None:
        self._loop.put(Close())
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT)
        if self._thread.is_alive():
            raise TimeoutError(f"close: the thread of {self._config.engine} has not ended within {CLOSE_TIMEOUT:.0f} s")
        if (error := self._loop.closing_error) is not None:
            self._loop.closing_error = None
            raise RuntimeError(f"close: {self._config.engine} did not end cleanly: {error!r}") from error

    async def _ask(self, job: Generate | Barrier | Question | Pause, reply: Reply[T]) -> T:
        """The job's result; TimeoutError once the thread, unless paused, has not moved for ``stall_timeout``."""
        self._loop.put(job)
        timeout = self._config.stall_timeout
        try:
            while True:
                await asyncio.wait((reply.future,), timeout=timeout)
                if reply.future.done():
                    return reply.future.result()
                still = time.monotonic() - self._loop.beat
                if still >= timeout and not self._loop.paused:
                    raise TimeoutError(
                        f"{job.what}: {self._config.engine} has not moved for {still:.0f} s (stall_timeout)"
                    )
        finally:
            reply.future.cancel()


def _serve(
    build: Callable[[], Backend],
    seed: int,
    digest: DigestFunction | None,
    writer: Writer | None,
    started: Future[tuple[EngineLoop, EngineInfo]],
) -> None:
    try:
        backend = build()
        loop = EngineLoop(backend, seed=seed, digest=digest, writer=writer)
        info = msgspec.structs.replace(backend.info, can_write=backend.info.can_write and writer is not None)
    except BaseException as error:  # noqa: BLE001 - the constructor waits for it
        started.set_exception(error)
        return
    started.set_result((loop, info))
    loop.run()
