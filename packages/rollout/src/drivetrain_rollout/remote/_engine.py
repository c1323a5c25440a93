"""The controller's side: an engine that is somewhere else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from drivetrain_transport import PeerLost, RemoteError

from drivetrain_rollout._checks import check_request
from drivetrain_rollout._streams import grown, stream_of
from drivetrain_rollout.engine import (
    EngineConfig,
    EngineInfo,
    EngineMetrics,
    PauseMode,
    RequestError,
    RolloutEngine,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
    WeightWrite,
)
from drivetrain_rollout.remote import _messages as messages
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest

if TYPE_CHECKING:
    from drivetrain_transport import Peer
    from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Weights travel in messages of up to this many bytes; a larger tensor travels alone."""

CLOSE_TIMEOUT = 180.0
"""Seconds that ending a worker's engine may take."""


class _Waiting:
    """A request whose outcome is to come, and what is known of it."""

    __slots__ = ("chunks", "future", "known", "request")

    def __init__(
        self,
        request: GenerateRequest,
        future: asyncio.Future[Completion],
        chunks: asyncio.Queue[Chunk] | None = None,
    ) -> None:
        self.request = request
        self.future = future
        self.chunks = chunks
        self.known: Completion | None = request.continued

    def take(self, chunk: Chunk) -> None:
        """Another chunk of it has come."""
        self.known = grown(self.request, self.known, chunk)
        if self.chunks is not None:
            self.chunks.put_nowait(chunk)


class RemoteEngine(RolloutEngine):
    """The controller's side: an engine that a worker serves.

    A worker that is lost fails the calls in flight and all later ones: ``generate`` with ``engine_failed``, the others
    with RuntimeError, chained to the transport's PeerLost.

    ``update_weights`` reads its tensors on the event loop it is awaited on, a bucket at a time.

    Args:
        peer: the worker, from ``Endpoint.wait_for_peer`` of an endpoint that was bound with ``PROTOCOL``. The endpoint
            stays its owner's to close.
        config: of the engine the worker is to make.
        timeout: seconds that any one call may take. It can be long, because a call may rightly wait for hundreds of
            responses: that the worker died is noticed within the transport's liveness, and that its engine stands still
            within the engine's own ``stall_timeout``.
        progress: seconds between reports of what running responses have, so that it is not lost with the worker: the
            RequestError's ``partial`` holds it. None: no reports, as little traffic as there can be.

    Raises:
        ValueError, RuntimeError, TimeoutError: what making the engine raised there.
    """

    def __init__(
        self, peer: Peer, config: EngineConfig, *, timeout: float = 86400.0, progress: float | None = None
    ) -> None:
        """Blocks until the engine is up. Make several at once in threads of their own."""
        self._peer = peer
        self._timeout = timeout
        self._numbers = itertools.count()
        self._progress = progress
        self._outbox: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._closed = False
        self._refused: Counter[str] = Counter()
        self._weights = WeightsState(policy_version=0, digest=None, status="refused")
        try:
            started = peer.call(messages.Start(config=config), timeout=config.start_timeout + 60)
        except (PeerLost, RemoteError) as error:
            raise RuntimeError(f"worker {peer.name} could not start {config.engine}: {error}") from error
        self._raise_failure(started, "start")
        self._info: EngineInfo = started.info
        self._weights = started.weights

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def weights(self) -> WeightsState:
        return self._weights

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check(request)
        loop = asyncio.get_running_loop()
        outbox = self._outbox.setdefault(loop, [])
        if not outbox:
            loop.call_soon(self._send, loop)
        waiting = _Waiting(request, loop.create_future())
        outbox.append(waiting)
        return await waiting.future

    async def stream(self, request: GenerateRequest, *, every: float = 0.1) -> AsyncIterator[Chunk]:
        self._check(request)
        await self._send_now()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future(), asyncio.Queue())
        self._start_pump(loop, [waiting], every)
        assert waiting.chunks is not None
        async for chunk in stream_of(request, waiting.future, waiting.chunks):
            yield chunk

    def _check(self, request: GenerateRequest) -> None:
        try:
            check_request(request, self._info)
        except RequestError as error:
            self._refused[error.reason] += 1
            raise
        if self._closed:
            raise RequestError(request.request_id, "engine_closed", "the engine is closed", partial=request.continued)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what this turn of the loop has gathered, as one message."""
        gathered = [waiting for waiting in self._outbox.pop(loop, []) if not waiting.future.done()]
        if gathered:
            self._start_pump(loop, gathered, self._progress)

    def _start_pump(self, loop: asyncio.AbstractEventLoop, gathered: list[_Waiting], every: float | None) -> None:
        pump = loop.create_task(self._pump(gathered, every))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _send_now(self) -> None:
        """Let the requests that were made before this go first."""
        self._send(asyncio.get_running_loop())
        await asyncio.sleep(0)

    async def _pump(self, gathered: list[_Waiting], every: float | None) -> None:
        """Take in the outcomes of one message's requests, as they end."""
        number = next(self._numbers)
        pump = asyncio.current_task()
        assert pump is not None
        waiting = dict(enumerate(gathered))
        for index, one in waiting.items():
            one.future.add_done_callback(partial(self._given_up, pump, number, index))
        call: Any = messages.Generate(batch=number, requests=tuple(one.request for one in gathered), every=every)
        try:
            while waiting:
                reply = await self._peer.call_async(call, timeout=self._timeout)
                if isinstance(reply, messages.CallFailed):
                    raise RuntimeError(reply.message)
                for progress in reply.chunks:
                    waiting[progress.index].take(progress.chunk)
                for outcome in reply.outcomes:
                    _settle(waiting.pop(outcome.index).future, outcome)
                call = messages.More(batch=number)
        except Exception as error:  # noqa: BLE001 - whatever it was, each of the requests gets it
            self._note_loss(error)
            for one in waiting.values():
                if not one.future.done():
                    failed = RequestError(one.request.request_id, "engine_failed", str(error), partial=one.known)
                    failed.__cause__ = error
                    one.future.set_exception(failed)

    def _given_up(self, pump: asyncio.Task[None], number: int, index: int, future: asyncio.Future[Completion]) -> None:
        # A pump that is cancelled itself gives up all its requests.
        if future.cancelled() and not pump.done() and not pump.cancelling() and self._peer.state == "open":
            abort = asyncio.ensure_future(self._abort(number, index))
            self._pumps.add(abort)
            abort.add_done_callback(self._pumps.discard)

    async def _abort(self, number: int, index: int) -> None:
        # If the worker is gone, so is the request.
        with contextlib.suppress(PeerLost):
            await self._peer.call_async(messages.Abort(batch=number, index=index), timeout=self._timeout)

    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        number = next(self._numbers)
        for names, tensors in _buckets(update.tensors):
            await self._call(messages.Bucket(update=number, names=names, tensors=tensors), "update_weights")
        commit = messages.Commit(update=number, policy_version=update.policy_version, digest=update.digest)
        await self._call(commit, f"update_weights to version {update.policy_version}")
        return self._weights

    async def write_weights(self, write: WeightWrite) -> WeightsState:
        if not self._info.can_write:
            return await super().write_weights(write)
        await self._call(messages.Write(write=write), f"write_weights to version {write.policy_version}")
        return self._weights

    async def sleep(self, level: int = 1) -> None:
        await self._call(messages.Sleep(level=level), "sleep")

    async def wake(self) -> None:
        await self._call(messages.Wake(), "wake")

    async def pause(self, mode: PauseMode = "wait") -> None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r}: use 'wait', 'keep' or 'abort'")
        await self._call(messages.Pause(mode=mode), "pause")

    async def resume(self) -> None:
        await self._call(messages.Resume(), "resume")

    async def metrics(self) -> EngineMetrics:
        reply = await self._call(messages.Metrics(), "metrics")
        metrics: EngineMetrics = reply.metrics
        return msgspec.structs.replace(metrics, failed=dict(self._refused + Counter(metrics.failed)))

    async def health(self) -> None:
        await self._call(messages.Health(), "health")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._send_now()
        if self._peer.state == "open":
            reply = await self._peer.call_async(messages.Stop(), timeout=CLOSE_TIMEOUT)
            self._raise_failure(reply, "close")

    async def _call(self, request: Any, what: str) -> Any:
        """Ask the worker, and note which weights it says it has."""
        if self._closed:
            raise RuntimeError(f"{what}: the engine is closed")
        await self._send_now()
        try:
            reply = await self._peer.call_async(request, timeout=self._timeout)
        except (PeerLost, RemoteError) as error:
            self._note_loss(error)
            raise RuntimeError(f"{what}: {error}") from error
        self._raise_failure(reply, what)
        self._weights = reply.weights
        return reply

    def _note_loss(self, error: Exception) -> None:
        if isinstance(error, PeerLost):
            self._weights = msgspec.structs.replace(self._weights, status="refused")

    def _raise_failure(self, reply: Any, what: str) -> None:
        if not isinstance(reply, messages.CallFailed):
            return
        if reply.weights is not None:
            self._weights = reply.weights
        kinds: dict[str, type[Exception]] = {
            "WeightsRefused": WeightsRefused,
            "ValueError": ValueError,
            "TimeoutError": TimeoutError,
        }
        raise kinds.get(reply.kind, RuntimeError)(f"{what} on worker {self._peer.name}: {reply.message}")


def _settle(future: asyncio.Future[Completion], outcome: messages.Outcome) -> None:
    if future.done():
        return  # given up
    if outcome.failure is not None:
        failure = outcome.failure
        future.set_exception(RequestError(failure.request_id, failure.reason, failure.message, partial=failure.partial))
    else:
        assert outcome.completion is not None
        future.set_result(outcome.completion)


def _buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[tuple[str, ...], tuple[Tensor, ...]]]:
    """Cut a stream of named tensors into parts of up to BUCKET_BYTES, at least one."""
    names: list[str] = []
    bucket: list[Tensor] = []
    size = 0
    for name, tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if bucket and size + more > BUCKET_BYTES:
            yield tuple(names), tuple(bucket)
            names, bucket, size = [], [], 0
        names.append(name)
        bucket.append(tensor)
        size += more
    yield tuple(names), tuple(bucket)
