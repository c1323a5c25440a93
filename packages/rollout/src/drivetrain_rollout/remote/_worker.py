"""The worker's side: makes the engine it is told to make, and answers for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain_transport import Endpoint

from drivetrain_rollout.engine import EngineConfig, RequestError, RolloutEngine, WeightsRefused, WeightUpdate
from drivetrain_rollout.remote import _messages as messages
from drivetrain_rollout.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from drivetrain_transport import Keys, Peer
    from torch import Tensor


def serve(
    address: str,
    *,
    factory: Callable[[EngineConfig], RolloutEngine],
    name: str,
    keys: Keys | None = None,
    timeout: float = 60.0,
) -> None:
    """The worker's side: join the controller at an address, and serve the engine it asks for until it goes away.

    Blocks. Returns when the controller says goodbye and also when it is lost; the engine is closed then.

    Args:
        address: where the controller's endpoint is bound; it need not be there yet.
        factory: makes the engine, in a thread of its own: ``lambda config: VLLMEngine(config, digest=digest)``.
        name: what the controller calls this worker, in errors too.
        keys: the run's keys; needed if the controller is on another host.
        timeout: seconds until the controller must have answered.

    Raises:
        TimeoutError, ConnectionError: there is no controller at the address, or it turned this worker away.
    """
    worker = Worker(factory)
    try:
        with Endpoint.connect(
            address, protocol=messages.PROTOCOL, handler=worker.answer, name=name, keys=keys, timeout=timeout
        ) as endpoint:
            endpoint.wait_closed()
    finally:
        asyncio.run(worker.close())


class Batch:
    """Requests that came in one message, and what has ended of them and was not told yet."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[GenerateRequest], every: float | None) -> None:
        self.untold = len(requests)
        self._ended: list[messages.Outcome] = []
        self._chunks: list[messages.Progress] = []
        self._some_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[Completion]] = []
        for index, request in enumerate(requests):
            answer = engine.generate(request) if every is None else self._follow(engine, index, request, every)
            task = asyncio.ensure_future(answer)
            task.add_done_callback(partial(self._end, index, request.request_id))
            self._tasks.append(task)

    async def _follow(self, engine: RolloutEngine, index: int, request: GenerateRequest, every: float) -> Completion:
        async for chunk in engine.stream(request, every=every):
            if chunk.completion is not None:
                return chunk.completion
            self._chunks.append(messages.Progress(index=index, chunk=chunk))
            self._some_ended.set()
        raise AssertionError("a stream ends with its completion")

    def _end(self, index: int, request_id: str, task: asyncio.Task[Completion]) -> None:
        self._ended.append(_outcome(index, request_id, task))
        self._some_ended.set()

    async def next(self) -> messages.Ended:
        """What has ended or come since the last time; waits until something has. Giving up on it gives up the batch."""
        try:
            await self._some_ended.wait()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        self._some_ended.clear()
        ended, self._ended = self._ended, []
        chunks, self._chunks = self._chunks, []
        self.untold -= len(ended)
        return messages.Ended(outcomes=tuple(ended), chunks=tuple(chunks))

    def abort(self, index: int) -> None:
        """Stop one request."""
        self._tasks[index].cancel()


def _outcome(index: int, request_id: str, task: asyncio.Task[Completion]) -> messages.Outcome:
    error: BaseException | None
    if task.cancelled():
        error = RequestError(request_id, "engine_refused", "it was given up")
    elif (error := task.exception()) is None:
        return messages.Outcome(index=index, completion=task.result())
    elif not isinstance(error, RequestError):
        error = RequestError(request_id, "engine_failed", repr(error))  # the engine broke its contract
    failure = messages.RequestFailed(
        request_id=error.request_id, reason=error.reason, message=error.message, partial=error.partial
    )
    return messages.Outcome(index=index, failure=failure)


class Worker:
    """Answers the controller's requests, on the endpoint's loop."""

    def __init__(self, factory: Callable[[EngineConfig], RolloutEngine]) -> None:
        self._factory = factory
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drivetrain-start")
        self._made: Future[RolloutEngine] | None = None
        self._engine: RolloutEngine | None = None
        self._batches: dict[int, Batch] = {}
        self._update = -1
        self._kept: list[tuple[str, Tensor]] = []

    async def answer(self, _peer: Peer, request: Any) -> Any:
        """The transport's handler. The contract's errors are replies; any other reaches the caller as RemoteError."""
        try:
            if isinstance(request, messages.Start):
                return await self._start(request.config)
            if isinstance(request, messages.More):
                return await self._next(request.batch)
            engine = self._engine
            if engine is None:
                raise RuntimeError("no engine was started here")
            if isinstance(request, messages.Generate):
                self._batches[request.batch] = Batch(engine, request.requests, request.every)
                return await self._next(request.batch)
            if isinstance(request, messages.Metrics):
                return messages.Measured(metrics=await engine.metrics(), weights=engine.weights)
            await asyncio.sleep(0)  # the requests that arrived before this one reach the engine before it
            await self._do(request, engine)
            return messages.Done(weights=engine.weights)
        except (WeightsRefused, ValueError, TimeoutError, RuntimeError) as error:
            state = self._engine.weights if self._engine is not None else None
            return messages.CallFailed(kind=_kind(error), message=str(error), weights=state)

    async def _next(self, number: int) -> messages.Ended:
        batch = self._batches[number]
        try:
            ended = await batch.next()
        except asyncio.CancelledError:
            del self._batches[number]
            raise
        if not batch.untold:
            del self._batches[number]
        return ended

    async def _start(self, config: EngineConfig) -> messages.Started:
        if self._made is not None:
            raise RuntimeError("an engine was started here already; close it first")
        self._made = self._maker.submit(self._factory, config)
        try:
            self._engine = engine = await asyncio.wrap_future(self._made)
        except Exception:
            self._made = None
            raise
        return messages.Started(info=engine.info, weights=engine.weights)

    async def _do(self, request: Any, engine: RolloutEngine) -> None:
        match request:
            case messages.Abort(batch=number, index=index):
                if number in self._batches:
                    self._batches[number].abort(index)
            case messages.Bucket(update=update, names=names, tensors=tensors):
                if update != self._update:
                    self._update, self._kept = update, []
                self._kept.extend(zip(names, tensors, strict=True))
            case messages.Commit(update=update, policy_version=version, digest=digest):
                if update != self._update:
                    raise RuntimeError(f"update {update} was given up for update {self._update}; send it again, alone")
                kept, self._update, self._kept = self._kept, -1, []
                await engine.update_weights(WeightUpdate(policy_version=version, digest=digest, tensors=kept))
            case messages.Write(write=write):
                await engine.write_weights(write)
            case messages.Sleep(level=level):
                await engine.sleep(level)
            case messages.Wake():
                await engine.wake()
            case messages.Pause(mode=mode):
                await engine.pause(mode)
            case messages.Resume():
                await engine.resume()
            case messages.Health():
                await engine.health()
            case messages.Stop():
                self._engine = self._made = None
                await engine.close()

    async def close(self) -> None:
        """Close the engine, also one that is still being made; on any loop, after the endpoint's has ended."""
        self._maker.shutdown()
        if self._made is not None and not self._made.cancelled():
            await self._made.result(timeout=0).close()


def _kind(error: Exception) -> messages.ErrorKind:
    if isinstance(error, WeightsRefused):
        return "WeightsRefused"
    if isinstance(error, ValueError):
        return "ValueError"
    return "TimeoutError" if isinstance(error, TimeoutError) else "RuntimeError"
