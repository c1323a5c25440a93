"""An engine in another process, over ``drivetrain_transport``.

    controller                                       worker
    Endpoint.bind(protocol=PROTOCOL)   ◄── joins ─── serve(address, factory=...)
    RemoteEngine(peer, config)         ── Start ───► factory(config): an engine
    generate, sleep, wake, health      ────────────► the same call there, any number at once
    update_weights                     ── Buckets ─► kept aside while it serves
                                       ── Commit ──► checked and loaded as one update

A worker has one engine at a time. It returns when its controller says goodbye or is lost.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from drivetrain_transport import Endpoint, PeerLost, RemoteError

from drivetrain_rollout import _messages as messages
from drivetrain_rollout._checks import check_request
from drivetrain_rollout._messages import PROTOCOL
from drivetrain_rollout.engine import (
    EngineConfig,
    EngineInfo,
    RequestError,
    RolloutEngine,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
)
from drivetrain_rollout.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from drivetrain_transport import Keys, Peer
    from torch import Tensor

__all__ = ["BUCKET_BYTES", "PROTOCOL", "RemoteEngine", "serve"]

BUCKET_BYTES = 64 << 20
"""Weights travel in messages of up to this many bytes; a larger tensor travels alone."""

CLOSE_TIMEOUT = 180.0
"""Seconds that ending a worker's engine may take."""


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

    Raises:
        ValueError, RuntimeError, TimeoutError: what making the engine raised there.
    """

    def __init__(self, peer: Peer, config: EngineConfig, *, timeout: float = 86400.0) -> None:
        """Blocks until the engine is up. Make several at once in threads of their own."""
        self._peer = peer
        self._timeout = timeout
        self._updates = itertools.count()
        self._closed = False
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
        check_request(request, self._info)
        if self._closed:
            raise RequestError(request.request_id, "engine_closed", "the engine is closed")
        try:
            reply = await self._peer.call_async(messages.Generate(request=request), timeout=self._timeout)
        except (PeerLost, RemoteError, TimeoutError) as error:
            self._note_loss(error)
            raise RequestError(request.request_id, "engine_failed", str(error)) from error
        if isinstance(reply, messages.RequestFailed):
            raise RequestError(reply.request_id, reply.reason, reply.message)
        completion: Completion = reply.completion
        return completion

    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        number = next(self._updates)
        for names, tensors in _buckets(update.tensors):
            await self._call(messages.Bucket(update=number, names=names, tensors=tensors), "update_weights")
        commit = messages.Commit(update=number, policy_version=update.policy_version, digest=update.digest)
        await self._call(commit, f"update_weights to version {update.policy_version}")
        return self._weights

    async def sleep(self, level: int = 1) -> None:
        await self._call(messages.Sleep(level=level), "sleep")

    async def wake(self) -> None:
        await self._call(messages.Wake(), "wake")

    async def health(self) -> None:
        await self._call(messages.Health(), "health")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._peer.state == "open":
            reply = await self._peer.call_async(messages.Stop(), timeout=CLOSE_TIMEOUT)
            self._raise_failure(reply, "close")

    async def _call(self, request: Any, what: str) -> None:
        """Ask the worker, and note which weights it says it has."""
        if self._closed:
            raise RuntimeError(f"{what}: the engine is closed")
        try:
            reply = await self._peer.call_async(request, timeout=self._timeout)
        except (PeerLost, RemoteError) as error:
            self._note_loss(error)
            raise RuntimeError(f"{what}: {error}") from error
        self._raise_failure(reply, what)
        self._weights = reply.weights

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
    worker = _Worker(factory)
    try:
        with Endpoint.connect(
            address, protocol=PROTOCOL, handler=worker.answer, name=name, keys=keys, timeout=timeout
        ) as endpoint:
            endpoint.wait_closed()
    finally:
        asyncio.run(worker.close())


class _Worker:
    """Answers the controller's requests, on the endpoint's loop."""

    def __init__(self, factory: Callable[[EngineConfig], RolloutEngine]) -> None:
        self._factory = factory
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drivetrain-start")
        self._made: Future[RolloutEngine] | None = None
        self._engine: RolloutEngine | None = None
        self._update = -1
        self._kept: list[tuple[str, Tensor]] = []

    async def answer(self, _peer: Peer, request: Any) -> Any:
        """The transport's handler. The contract's errors are replies; any other reaches the caller as RemoteError."""
        if isinstance(request, messages.Generate):
            return await self._generate(request.request)
        try:
            if isinstance(request, messages.Start):
                return await self._start(request.config)
            engine = self._engine
            if engine is None:
                raise RuntimeError("no engine was started here")
            await self._do(request, engine)
            return messages.Done(weights=engine.weights)
        except (WeightsRefused, ValueError, TimeoutError, RuntimeError) as error:
            state = self._engine.weights if self._engine is not None else None
            return messages.CallFailed(kind=_kind(error), message=str(error), weights=state)

    async def _generate(self, request: GenerateRequest) -> messages.Generated | messages.RequestFailed:
        try:
            if self._engine is None:
                raise RequestError(request.request_id, "engine_closed", "no engine was started here")
            return messages.Generated(completion=await self._engine.generate(request))
        except RequestError as error:
            return messages.RequestFailed(request_id=error.request_id, reason=error.reason, message=error.message)

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
