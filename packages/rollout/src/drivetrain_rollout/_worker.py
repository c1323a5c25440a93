"""What a rollout worker does with a controller's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from drivetrain_rollout import _messages as messages
from drivetrain_rollout.engine import EngineConfig, RequestError, RolloutEngine, WeightsRefused, WeightUpdate
from drivetrain_rollout.types import GenerateRequest

if TYPE_CHECKING:
    from drivetrain_transport import Peer
    from torch import Tensor


class Batch:
    """Requests that came in one message, and what has ended of them and was not told yet."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> None:
        self._ended: list[messages.Outcome] = []
        self._some_ended = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._generate(engine, index, request)) for index, request in enumerate(requests)
        ]
        self.untold = len(self._tasks)

    async def _generate(self, engine: RolloutEngine, index: int, request: GenerateRequest) -> None:
        try:
            outcome = messages.Outcome(index=index, completion=await engine.generate(request))
        except asyncio.CancelledError:
            outcome = _failed(index, RequestError(request.request_id, "engine_refused", "it was given up"))
        except RequestError as error:
            outcome = _failed(index, error)
        except Exception as error:  # noqa: BLE001 - the engine broke its contract; the one who asked is told
            outcome = _failed(index, RequestError(request.request_id, "engine_failed", repr(error)))
        self._ended.append(outcome)
        self._some_ended.set()

    async def next(self) -> messages.Ended:
        """What has ended since the last time; waits until something has. Giving up on it gives up the batch."""
        try:
            await self._some_ended.wait()
            await asyncio.sleep(0)  # the others that ended in the same step of the engine
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        self._some_ended.clear()
        ended, self._ended = self._ended, []
        self.untold -= len(ended)
        return messages.Ended(outcomes=tuple(ended))

    def abort(self, index: int) -> None:
        """Stop one request."""
        self._tasks[index].cancel()


def _failed(index: int, error: RequestError) -> messages.Outcome:
    failure = messages.RequestFailed(request_id=error.request_id, reason=error.reason, message=error.message)
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
            engine = self._engine
            if engine is None:
                raise RuntimeError("no engine was started here")
            if isinstance(request, messages.Generate | messages.More):
                return await self._generate(request, engine)
            await self._do(request, engine)
            return messages.Done(weights=engine.weights)
        except (WeightsRefused, ValueError, TimeoutError, RuntimeError) as error:
            state = self._engine.weights if self._engine is not None else None
            return messages.CallFailed(kind=_kind(error), message=str(error), weights=state)

    async def _generate(self, request: messages.Generate | messages.More, engine: RolloutEngine) -> messages.Ended:
        if isinstance(request, messages.Generate):
            self._batches[request.batch] = Batch(engine, request.requests)
        batch = self._batches[request.batch]
        try:
            ended = await batch.next()
        except asyncio.CancelledError:
            del self._batches[request.batch]
            raise
        if not batch.untold:
            del self._batches[request.batch]
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
            case messages.Sleep(level=level):
                await engine.sleep(level)
            case messages.Wake():
                await engine.wake()
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
