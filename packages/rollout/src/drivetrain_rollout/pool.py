"""Many engines as one.

    generate ──► wait for room ──► an engine ──► completion
                      ▲                │ it failed, or it was told to stop for an update
                      └── continued ◄──┘

An engine serves while it is alive and holds the pool's weights, by version and digest. One that fails, or misses an
update, gets no requests until it does again; what it was sampling goes on elsewhere, with the same seed, behind what is
known of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from drivetrain_rollout._checks import check_request
from drivetrain_rollout._members import Member, Members, Waiter
from drivetrain_rollout._pool_config import ELSEWHERE, MemberInfo, PoolConfig
from drivetrain_rollout._streams import grown, stream_of
from drivetrain_rollout.engine import (
    EngineInfo,
    EngineMetrics,
    PauseMode,
    RequestError,
    RequestErrorReason,
    RolloutEngine,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
    WeightWrite,
)
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest

log = logging.getLogger(__name__)

Refresh = Callable[[RolloutEngine], Awaitable[object]]
"""Brings an engine to the weights that the pool holds, by an update of its own."""


class EnginePool(RolloutEngine):
    """Engines of one model as one engine: a training loop does not change with their number.

    A request goes to the least loaded engine, or to the one that has its group or has seen its beginning. An engine
    gets as many requests as a ``SawtoothLimit`` allows; the rest wait here, in order.

    Args:
        engines: of the same model; by name, or in order. The pool closes them.
        config: what happens when.
        refresh: brings an engine that joins, or was gone during an update, to the pool's weights; without it such an
            engine waits for the next update.

    Raises:
        ValueError: no engines, or engines with different vocabularies or weights.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine] | dict[str, RolloutEngine],
        config: PoolConfig | None = None,
        *,
        refresh: Refresh | None = None,
    ) -> None:
        named = engines if isinstance(engines, dict) else {f"engine-{i}": engine for i, engine in enumerate(engines)}
        if not named:
            raise ValueError("a pool starts with at least one engine")
        self._config = config or PoolConfig()
        self._refresh = refresh
        first = next(iter(named.values()))
        self._weights = first.weights
        self._info = first.info
        self._members = Members(self._config.limit)
        self._seeds = random.Random(self._config.seed)
        self._failed: Counter[str] = Counter()
        self._completed = 0
        self._paused: PauseMode | None = None
        self._asleep = self._closed = False
        self._updating = 0
        self._looked = time.monotonic()
        self._looking: set[asyncio.Task[None]] = set()
        for name, engine in named.items():
            if engine.weights != self._weights:
                raise ValueError(
                    f"engine {name!r} holds {engine.weights}, another one {self._weights}: start them alike"
                )
            self._check_fit(name, engine)
            self._members.add(name, engine, "serving")

    @property
    def info(self) -> EngineInfo:
        """The first engine's; ``max_model_len`` is the shortest, and what only some can do none can."""
        return self._info

    @property
    def weights(self) -> WeightsState:
        """What an engine must hold to serve."""
        return self._weights

    @property
    def members(self) -> list[MemberInfo]:
        """How each engine is doing."""
        return [
            MemberInfo(
                name=member.name,
                state=member.state,
                running=member.running,
                limit=member.limit.value,
                weights=member.engine.weights,
                error=None if member.error is None else str(member.error),
            )
            for member in self._members
        ]

    def _check_fit(self, name: str, engine: RolloutEngine) -> None:
        mine, other = self._info, engine.info
        if other.vocab_size != mine.vocab_size:
            raise ValueError(f"engine {name!r} has {other.vocab_size} ids, the pool's others {mine.vocab_size}")
        self._info = msgspec.structs.replace(
            mine,
            max_model_len=min(mine.max_model_len, other.max_model_len),
            can_sleep=mine.can_sleep and other.can_sleep,
            can_write=mine.can_write and other.can_write,
        )

    async def add(self, name: str, engine: RolloutEngine) -> None:
        """Let an engine join; it serves once it holds the pool's weights.

        Raises:
            ValueError: the name is taken, or it is an engine of another model.
        """
        self._check_fit(name, engine)
        member = self._members.add(name, engine, "stale")
        await self._revive(member)

    async def remove(self, name: str, *, drain: bool = True) -> RolloutEngine:
        """Let an engine leave; it is the caller's to close.

        Args:
            name: of the engine.
            drain: wait until what it has begun has ended. Otherwise that is continued elsewhere.

        Raises:
            ValueError: there is no such engine.
        """
        member = self._members.get(name)
        if drain:
            self._members.set_state(member, "draining")
            while member.running and member.state == "draining":
                await asyncio.sleep(0.01)
        self._members.remove(member)
        if not drain and member.running:
            await member.engine.pause("abort")
            while member.running:
                await asyncio.sleep(0.01)
            await member.engine.resume()
        return member.engine

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._counted(self._within_deadline(self._seeded(request)))

    async def _counted(self, answer: Awaitable[Completion]) -> Completion:
        try:
            completion = await answer
        except RequestError as error:
            self._failed[error.reason] += 1
            raise
        self._completed += 1
        return completion

    def _seeded(self, request: GenerateRequest) -> GenerateRequest:
        """With a seed, so that another attempt draws what the first one would have drawn."""
        if request.sampling.seed is not None or request.sampling.temperature == 0:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.getrandbits(63))
        return msgspec.structs.replace(request, sampling=sampling)

    async def _within_deadline(self, request: GenerateRequest) -> Completion:
        if self._config.deadline is None:
            return await self._attempts(request, self._ask)
        known: list[Completion | None] = [request.continued]

        async def ask(engine: RolloutEngine, request: GenerateRequest) -> Completion:
            async for chunk in engine.stream(request, every=max(0.1, (self._config.deadline or 0) / 20)):
                known[0] = grown(request, known[0], chunk)
            assert chunk.completion is not None
            return chunk.completion

        try:
            async with asyncio.timeout(self._config.deadline):
                return await self._attempts(request, ask)
        except TimeoutError:
            raise RequestError(
                request.request_id,
                "deadline",
                f"it has not ended within {self._config.deadline:g} s",
                partial=known[0],
            ) from None

    async def stream(self, request: GenerateRequest, *, every: float = 0.1) -> AsyncIterator[Chunk]:
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()

        async def ask(engine: RolloutEngine, request: GenerateRequest) -> Completion:
            async for chunk in engine.stream(request, every=every):
                if chunk.completion is not None:
                    return chunk.completion
                chunks.put_nowait(chunk)
            raise AssertionError("a stream ends with its completion")

        answer = asyncio.ensure_future(self._counted(self._attempts(self._seeded(request), ask)))
        async for chunk in stream_of(request, answer, chunks):
            yield chunk

    async def _ask(self, engine: RolloutEngine, request: GenerateRequest) -> Completion:
        return await engine.generate(request)

    async def _attempts(
        self, request: GenerateRequest, ask: Callable[[RolloutEngine, GenerateRequest], Awaitable[Completion]]
    ) -> Completion:
        """The request's completion, from as many engines as it takes."""
        check_request(request, self._info)
        failures = 0
        while True:
            self._check_served(request)
            member = await self._room(request)
            try:
                completion = await ask(member.engine, request)
            except RequestError as error:
                state = ELSEWHERE.get(error.reason)
                if state is None or self._closed:
                    raise
                failures += 1
                if member.state == "serving":
                    self._members.set_state(member, state, error)
                    log.warning("engine %s is out of service: %s", member.name, error)
                if error.partial is not None:
                    request = msgspec.structs.replace(request, continued=error.partial)
                if failures == self._config.attempts:
                    raise
            else:
                if completion.finish_reason != "abort" or self._paused == "abort":
                    return completion
                # It was told to stop for an update, or because it leaves the pool.
                request = msgspec.structs.replace(request, continued=completion)
            finally:
                self._members.release(member)

    def _check_served(self, request: GenerateRequest) -> None:
        """Whether the pool as a whole was closed, put to sleep, or has lost its weights."""
        reason: RequestErrorReason
        if self._closed:
            reason, message = "engine_closed", "the pool is closed"
        elif self._asleep:
            reason, message = "engine_asleep", "the pool sleeps; wake it first"
        elif self._weights.status == "refused":
            reason, message = "stale_weights", "the pool's engines dropped their weights; update them first"
        else:
            return
        raise RequestError(request.request_id, reason, message, partial=request.continued)

    async def _room(self, request: GenerateRequest) -> Member:
        """A member that takes the request; RequestError when none has served for too long."""
        self._look_soon()
        waiter = Waiter(request)
        self._members.wait(waiter)
        try:
            alone = time.monotonic()
            while not waiter.reply.future.done():
                await asyncio.wait((waiter.reply.future,), timeout=self._config.look_every)
                self._check_served(request)
                self._look_soon()
                if any(member.state == "serving" for member in self._members):
                    alone = time.monotonic()
                elif not waiter.reply.future.done() and time.monotonic() - alone >= self._config.no_engine_timeout:
                    raise self._nobody(request)
            return waiter.reply.future.result()
        except BaseException:
            self._members.give_up(waiter)
            raise

    def _nobody(self, request: GenerateRequest) -> RequestError:
        states = "; ".join(f"{member.name} is {member.state} ({member.error})" for member in self._members)
        message = f"no engine has served for {self._config.no_engine_timeout:g} s: {states or 'there is none'}"
        return RequestError(request.request_id, "no_engine", message, partial=request.continued)

    def _look_soon(self) -> None:
        """Look at the engines, if that is due, beside what goes on."""
        now = time.monotonic()
        if now - self._looked < self._config.look_every or self._closed or self._updating or self._looking:
            return
        self._looked = now
        task = asyncio.ensure_future(self.look())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def look(self) -> None:
        """Look at each engine now: adapt its limit, take it out of service, or take it back. A pool that is used does
        so by itself every ``look_every`` seconds."""
        await asyncio.gather(*map(self._look_at, self._members))

    async def _look_at(self, member: Member) -> None:
        if member.state in ("failed", "stale"):
            await self._revive(member)
            return
        try:
            async with asyncio.timeout(self._config.look_timeout):
                metrics = await member.engine.metrics()
        except (RuntimeError, TimeoutError) as error:
            if member.state == "serving":
                self._members.set_state(member, "failed", error)
            return
        member.limit.observe(metrics, used=member.running)
        self._members.grew()

    async def _revive(self, member: Member) -> None:
        """Take an engine back that answers and holds the pool's weights."""
        try:
            async with asyncio.timeout(self._config.look_timeout):
                await member.engine.health()
            if member.engine.weights != self._weights and self._refresh is not None:
                await self._refresh(member.engine)
        except (RuntimeError, TimeoutError, ValueError) as error:
            self._members.set_state(member, "failed", error)
            return
        self._judge(member)

    def _judge(self, member: Member, error: Exception | None = None) -> None:
        """A member that answers serves if it holds the pool's weights."""
        held = member.engine.weights
        if held == self._weights and held.status == "ready":
            if member.state != "draining":
                self._members.set_state(member, "serving")
            return
        reason = error or WeightsRefused(f"it holds {held}, and the pool {self._weights}")
        self._members.set_state(member, "stale", reason)

    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        tensors = list(update.tensors)
        each = WeightUpdate(policy_version=update.policy_version, digest=update.digest, tensors=tensors)
        return await self.update_each(lambda _: each)

    async def write_weights(self, write: WeightWrite) -> WeightsState:
        if not self._info.can_write:
            return await super().write_weights(write)
        return await self.update_each(lambda _: write)

    async def update_each(self, update: Callable[[str], WeightUpdate | WeightWrite]) -> WeightsState:
        """As ``update_weights``, with an update of its own for each engine, all of one version and digest.

        Args:
            update: called with an engine's name.
        """
        members = [member for member in self._members if member.state != "failed"]
        self._updating += 1  # an engine that loads weights does not answer a look
        try:
            errors = await asyncio.gather(*(self._update(member, update(member.name)) for member in members))
        finally:
            self._updating -= 1
        # What is in place now is the version that most engines were brought to: those that hold it serve.
        held = [member.engine.weights for member, error in zip(members, errors, strict=True) if error is None]
        if held:
            self._weights = held[0]
        for member, error in zip(members, errors, strict=True):
            self._judge(member, error)
        if len(held) < self._config.min_updated:
            told = "; ".join(f"{m.name}: {e}" for m, e in zip(members, errors, strict=True) if e is not None)
            cause = next((error for error in errors if error is not None), None)
            kind = type(cause) if isinstance(cause, WeightsRefused | TimeoutError) else RuntimeError
            raise kind(
                f"{len(held)} of {len(members)} engines took the update, and min_updated is {self._config.min_updated}"
                + (f": {told}" if told else "")
            ) from cause
        return self._weights

    async def _update(self, member: Member, update: WeightUpdate | WeightWrite) -> Exception | None:
        engine, mode = member.engine, self._config.updates
        try:
            if self._paused is None and mode != "wait":
                await engine.pause(mode)
            if isinstance(update, WeightWrite):
                state = await engine.write_weights(update)
            else:
                state = await engine.update_weights(update)
            if (state.policy_version, state.digest, state.status) != (update.policy_version, update.digest, "ready"):
                return WeightsRefused(f"it holds {state} after an update to version {update.policy_version}")
        except (RuntimeError, TimeoutError, ValueError) as error:
            return error
        finally:
            if self._paused is None and mode != "wait":
                await self._quietly(engine.resume())
        return None

    async def _quietly(self, awaitable: Awaitable[Any]) -> None:
        """An engine that cannot do it any more is found out at the next look."""
        try:
            await awaitable
        except (RuntimeError, TimeoutError) as error:
            log.warning("an engine of the pool: %s", error)

    async def _all(self, what: Callable[[RolloutEngine], Awaitable[Any]]) -> list[Any]:
        """Of every engine that has not failed; one that fails at it is out of service, and an error only if all do."""
        members = [member for member in self._members if member.state != "failed"]
        found = await asyncio.gather(*(what(member.engine) for member in members), return_exceptions=True)
        done = []
        for member, result in zip(members, found, strict=True):
            if isinstance(result, RuntimeError | TimeoutError) and not isinstance(result, WeightsRefused):
                self._members.set_state(member, "failed", result)
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(result)
        if not done:
            raise next((error for error in found if isinstance(error, Exception)), self._none())
        return done

    def _none(self) -> RuntimeError:
        return RuntimeError("the pool is closed" if self._closed else "no engine of the pool is alive")

    async def pause(self, mode: PauseMode = "wait") -> None:
        if mode not in ("wait", "keep", "abort"):
            raise ValueError(f"pause mode {mode!r}: use 'wait', 'keep' or 'abort'")
        self._paused = mode
        await self._all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        self._paused = None
        await self._all(lambda engine: engine.resume())

    async def metrics(self) -> EngineMetrics:
        """Sums over the engines; requests that wait in the pool are waiting, and the fullest KV cache is told."""
        found: list[EngineMetrics] = await self._all(lambda engine: engine.metrics())
        usage = [metrics.kv_cache_usage for metrics in found if metrics.kv_cache_usage is not None]
        return EngineMetrics(
            running=sum(metrics.running for metrics in found),
            waiting=sum(metrics.waiting for metrics in found) + self._members.waiting,
            kv_cache_usage=max(usage, default=None),
            preemptions=sum(metrics.preemptions for metrics in found),
            prompt_tokens=sum(metrics.prompt_tokens for metrics in found),
            response_tokens=sum(metrics.response_tokens for metrics in found),
            completed=self._completed,
            failed=dict(self._failed),
        )

    async def sleep(self, level: int = 1) -> None:
        if not self._info.can_sleep:
            raise RuntimeError("an engine of the pool cannot sleep as it was started (info.can_sleep is False)")
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: use 1 (keep the weights in host memory) or 2 (drop them)")
        await self._strictly(lambda engine: engine.sleep(level))
        self._asleep = True
        if level == 2:
            self._weights = msgspec.structs.replace(self._weights, status="refused")

    async def wake(self) -> None:
        await self._strictly(lambda engine: engine.wake())
        self._asleep = False

    async def _strictly(self, what: Callable[[RolloutEngine], Awaitable[Any]]) -> None:
        """Of every engine that has not failed; any error is the caller's."""
        await asyncio.gather(*(what(member.engine) for member in self._members if member.state != "failed"))

    async def health(self) -> None:
        await self._all(lambda engine: engine.health())

    async def close(self) -> None:
        self._closed = True
        found = await asyncio.gather(*(member.engine.close() for member in self._members), return_exceptions=True)
        for task in list(self._looking):
            task.cancel()
        for error in found:
            if isinstance(error, BaseException):
                raise error
