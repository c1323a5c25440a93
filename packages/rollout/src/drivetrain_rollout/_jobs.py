"""What callers ask of the engine's thread, and how its answers get back to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from drivetrain_rollout.engine import PauseMode, RequestError
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest, VersionSpan

T = TypeVar("T")


class Reply(Generic[T]):
    """A result that the engine's thread makes and a coroutine waits for. Made on the coroutine's event loop."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def given_up(self) -> bool:
        """Whether nobody waits any more. May be asked in any thread."""
        return self.future.cancelled()


class Follower:
    """Gets the chunks of one response, on the event loop it was made on."""

    __slots__ = ("chunks", "every", "loop")

    def __init__(self, every: float) -> None:
        self.every = every
        self.loop = asyncio.get_running_loop()
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()


def tell(chunks: Iterable[tuple[Follower, Chunk]]) -> None:
    """Hand chunks to the followers' event loops; each loop is woken once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Follower, Chunk]]] = {}
    for follower, chunk in chunks:
        by_loop.setdefault(follower.loop, []).append((follower, chunk))
    for loop, told in by_loop.items():
        _call_in(loop, _tell_here, told)


def _tell_here(told: list[tuple[Follower, Chunk]]) -> None:
    for follower, chunk in told:
        follower.chunks.put_nowait(chunk)


def settle(outcomes: Iterable[tuple[Reply[Any], Any]]) -> None:
    """Hand results, or exceptions, to the replies' event loops; each loop is woken once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for reply, outcome in outcomes:
        by_loop.setdefault(reply.loop, []).append((reply.future, outcome))
    for loop, settled in by_loop.items():
        _call_in(loop, _settle_here, settled)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[list[Any]], None], argument: list[Any]) -> None:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The loop ended without waiting for its coroutines: there is nobody to tell.


def _settle_here(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in settled:
        if future.done():
            continue  # given up
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@dataclass(slots=True)
class Generate:
    """Sample a response; answered with the completion."""

    request: GenerateRequest
    follower: Follower | None = None
    reply: Reply[Completion] = field(default_factory=Reply)
    made: float = field(default_factory=time.monotonic)
    begun: float | None = None
    """When the model got it."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Of the weights that have been replaced since, the tokens sampled here with them."""
    told: int = 0
    """Tokens of the response that the follower has."""
    told_at: float = 0.0

    @property
    def what(self) -> str:
        return f"request {self.request.request_id!r}"


@dataclass(slots=True)
class Barrier:
    """Call ``run`` when nothing is running; answered with its result."""

    what: str
    run: Callable[[], Any]
    reply: Reply[Any] = field(default_factory=Reply)


@dataclass(slots=True)
class Question:
    """Call ``run`` as soon as the thread sees it; answered with its result."""

    what: str
    run: Callable[[], Any]
    reply: Reply[Any] = field(default_factory=Reply)


@dataclass(slots=True)
class Pause:
    """Stop sampling; answered when nothing is sampled any more."""

    mode: PauseMode
    reply: Reply[None] = field(default_factory=Reply)
    what: str = "pause"


@dataclass(slots=True)
class Abort:
    """Stop a request nobody waits for any more."""

    job: Generate


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread."""


Job = Generate | Barrier | Question | Pause | Abort | Close


@dataclass(frozen=True, slots=True)
class End:
    """Why the thread takes no more jobs."""

    reason: Literal["engine_closed", "engine_failed"]
    cause: BaseException | None = None

    def error(self, job: Generate | Barrier | Question | Pause) -> RequestError | RuntimeError:
        """What the one who waits for ``job`` gets."""
        message = "the engine is closed" if self.cause is None else f"the engine failed: {self.cause!r}"
        error: RequestError | RuntimeError
        if isinstance(job, Generate):
            error = RequestError(job.request.request_id, self.reason, message, partial=job.request.continued)
        else:
            error = RuntimeError(f"{job.what}: {message}")
        error.__cause__ = self.cause
        return error
