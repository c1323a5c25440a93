"""One member's part in one generation: operations one at a time, counted, and ended by name when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from drivetrain_transport._errors import GroupBroken
from drivetrain_transport._stats import Counters
from drivetrain_transport.device._forming import Formed
from drivetrain_transport.device._links import LinkFailed
from drivetrain_transport.device._moving import Refused, Staging
from drivetrain_transport.device._rendezvous import Rendezvous
from drivetrain_transport.device._words import Report


@dataclass(eq=False, slots=True)
class Operation:
    """What a member has begun. `channels`: for each member that takes part, where both sides count it."""

    what: str
    channels: Mapping[str, str]
    timeout: float
    deadline: float
    numbers: dict[str, int] = field(default_factory=dict)
    """By channel: which operation it is."""


class Session:
    """The host of the rendezvous is told where this member is, if another one asks, and what failed here."""

    def __init__(
        self, members: Sequence[str], me: str, formed: Formed, rendezvous: Rendezvous, *, name: str, staging: Staging
    ) -> None:
        self.seat, self.link = formed
        self.staging = staging
        self.counters = Counters()
        self._members = tuple(members)
        self._me = me
        self._name = name
        self._rendezvous = rendezvous
        self._busy = threading.Lock()
        self._closed = False
        self._released = False
        self._under_way = 0

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    @contextmanager
    def whole(self, what: str, channels: Mapping[str, str], timeout: float) -> Iterator[Operation]:
        """An operation from its beginning to its end."""
        with self.begun(what, channels, timeout) as operation:
            yield operation
            self.end(operation)

    @contextmanager
    def begun(self, what: str, channels: Mapping[str, str], timeout: float) -> Iterator[Operation]:
        """The first part of an operation. `end` is called in this one, or in a `part` after it."""
        operation = Operation(what, channels, timeout, time.monotonic() + timeout)
        with self.part(operation):
            for channel in set(channels.values()):
                operation.numbers[channel] = self.seat.entered[channel] = self.seat.entered.get(channel, 0) + 1
            self._under_way += 1
            yield operation

    @contextmanager
    def part(self, operation: Operation) -> Iterator[None]:
        """A stretch of an operation in which its thread is in the library. What fails in it ends the generation.

        Raises:
            GroupBroken: It failed, or the generation was over before.
            RuntimeError: The group is closed, or in use by another thread.
        """
        what = operation.what
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{what}: another thread uses the group: let its operation end, or form a second group")
        try:
            if self._closed:
                raise RuntimeError(f"{what}: the group is closed: form the next one")
            if self.seat.ended is not None:
                self._release(orderly=False)
                raise self._gone(what)
            self.seat.now = what
            start = time.monotonic()
            try:
                with torch.no_grad():
                    yield
            except (LinkFailed, Refused) as error:
                self._fail(operation, str(error), ask=isinstance(error, LinkFailed))
                raise self._gone(what) from None
            except BaseException as error:
                self._fail(operation, f"it was interrupted by {type(error).__name__}: {error}", ask=False)
                raise
            self.seat.now = ""
            self.counters.waited(time.monotonic() - start)
        finally:
            self._busy.release()

    def end(self, operation: Operation) -> None:
        """It is through."""
        self._under_way -= 1
        for channel, number in operation.numbers.items():
            self.seat.finished[channel] = max(number, self.seat.finished.get(channel, 0))

    def close(self) -> None:
        """Take no further part, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        orderly = self.seat.ended is None and not self._under_way
        self._rendezvous.leave(self.seat)
        self._release(orderly=orderly)

    def _fail(self, operation: Operation, error: str, *, ask: bool) -> None:
        numbers = operation.numbers
        report = Report(
            generation=self.seat.number,
            what=f"{operation.what} (timeout {operation.timeout:g} s)" if ask else operation.what,
            error=error,
            expected={name: (at, numbers[at]) for name, at in operation.channels.items() if at in numbers}
            if ask
            else {},
        )
        self._rendezvous.report(self.seat, report)
        self._release(orderly=False)

    def _gone(self, what: str) -> GroupBroken:
        assert self.seat.ended is not None
        return GroupBroken(
            f"group {self._name!r} (generation {self.seat.number}) is broken, {self._me} was to {what}: "
            f"{self.seat.ended.why}",
            missing=[name for name in self._members if name in self.seat.ended.missing],
        )

    def _release(self, *, orderly: bool) -> None:
        if self._released:
            return
        self._released = True
        if orderly:
            self.link.close()
        else:
            self.link.abort()
        self.staging.drop()
