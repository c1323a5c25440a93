"""A lock where threads and asyncio tasks alike wait until something can be done."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._stats import Counters

T = TypeVar("T")


class Gate:
    """Guards a state that changes on several threads. What waits for a change of it has a deadline, and is counted.

    An `attempt` is called under the lock; it returns None as long as it has to wait. A child by fork has neither the
    threads that would open the gate nor, perhaps, a lock that anybody lets go: there every use is a RuntimeError.
    """

    def __init__(self, counters: Counters) -> None:
        self._condition = threading.Condition()
        self._counters = counters
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._require_own_process()
        self._condition.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def open(self) -> None:
        """The state changed: let everybody try again. Called under the lock."""
        self._condition.notify_all()
        tasks, self._tasks = self._tasks, []
        for loop, future in tasks:
            with contextlib.suppress(RuntimeError):  # that loop has closed, and its tasks are gone
                loop.call_soon_threadsafe(_wake, future)

    def wait(self, attempt: Callable[[], T | None], timeout: float, late: Callable[[], str]) -> T:
        """Try until it works. TimeoutError with `late`'s text after `timeout` seconds."""
        self._require_own_process()
        check_timeout(timeout)
        with self._condition:
            result = attempt()
            if result is not None:
                return result
            start = time.monotonic()
            try:
                while result is None:
                    left = start + timeout - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(late())
                    self._condition.wait(left)
                    result = attempt()
            finally:
                self._counters.waited(time.monotonic() - start)
        return result

    async def wait_async(self, attempt: Callable[[], T | None], timeout: float, late: Callable[[], str]) -> T:
        """The same without blocking, on any event loop. Cancelling it takes nothing away."""
        self._require_own_process()
        check_timeout(timeout)
        start = time.monotonic()
        waited = False
        try:
            while True:
                with self._condition:
                    result = attempt()
                    if result is not None:
                        return result
                    left = start + timeout - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(late())
                    loop = asyncio.get_running_loop()
                    place = (loop, loop.create_future())
                    self._tasks.append(place)
                waited = True
                await self._sleep(place, left)
        finally:
            if waited:
                with self._condition:
                    self._counters.waited(time.monotonic() - start)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this belongs to process {self._process}, from which this one was forked: make one here, or start "
                "processes by spawn"
            )

    async def _sleep(self, place: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await place[1]
        except TimeoutError:
            pass
        finally:
            with self._condition, contextlib.suppress(ValueError):
                self._tasks.remove(place)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
