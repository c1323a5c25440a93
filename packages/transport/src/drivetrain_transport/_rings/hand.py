"""One process's part in a ring: its open records, the lock around every change, sleeping, and leaving."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._forks import forget_in_children
from drivetrain_transport._rings.lease import Loan
from drivetrain_transport._rings.memory import RingMemory
from drivetrain_transport._rings.state import SLICE, Record, RingState
from drivetrain_transport._stats import Counters

T = TypeVar("T")

_REAP_SECONDS = 1.0  # who never waits looks for dead processes this often
_HEADER_SECONDS = 10.0  # for changes without a deadline of their own; they take microseconds
_GRACE_SECONDS = 1.0  # the header is waited for this much longer than what the caller waits for
_FREE_THREADS_BYTES = 1 << 16  # copies from here on let other threads run meanwhile


class RingHand:
    """May be used from any thread. Counts what it does in `counters`, under `counting`."""

    def __init__(self, memory: RingMemory, *, fresh: tuple[int, int, int] | None = None) -> None:
        """Attach to the memory, which is this hand's from now on; `fresh` as for `RingState`."""
        self.name = memory.name
        self.address = memory.address
        self.counters = Counters()
        self.counting = threading.Lock()
        self.closed = False
        self._memory: RingMemory | None = memory
        self.foreign = False  # in a child by fork
        self._open: dict[Record, weakref.ref[Loan]] = {}  # wanted, reserved or leased, and not settled
        self._loose: deque[Record] = deque()  # to be settled
        self._reaped_at = time.monotonic()
        try:
            self._state = RingState(memory, fresh=fresh)
            self.capacity = self._state.capacity
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory.map)) + self._state.data_offset
            self._data = memoryview(memory.map)[self._state.data_offset :]
            self._whole = ctypes.c_char * self.capacity
            self._locked(self._state.reap)
            self._locked(self._state.join)
        except BaseException:
            os.close(memory.descriptor)
            raise
        forget_in_children(self)

    def check_open(self) -> None:
        """Raise RuntimeError if this hand can do nothing any more."""
        if self.foreign:
            raise RuntimeError(f"ring {self.name} belongs to the parent process: attach to {self.address} here")
        if self.closed:
            raise RuntimeError(f"ring {self.name} is closed")

    def processes(self) -> list[int]:
        """See `Ring.processes`."""
        self.check_open()
        self._reap(time.monotonic())
        return self._state.processes()

    def count(self) -> int:
        """Records in the ring; 0 once closed."""
        return 0 if self.closed or self.foreign else self._state.count()

    def reserve(self, loan: Loan, length: int, timeout: float) -> None:
        """Room for a new record. Whether it succeeds or not, `drop` has to follow at the end, after `publish`.

        Raises:
            TimeoutError: There was none in time.
        """
        what = f"room for a record of {length} bytes"
        self._wait_for(self._reserve, loan, length, for_room=True, what=what, timeout=timeout)

    def write(self, record: Record, start: int, source: memoryview) -> None:
        """Copy bytes to a place in a reserved record."""
        start += record.start
        if source.nbytes < _FREE_THREADS_BYTES or source.readonly:
            self._data[start : start + source.nbytes] = source
        else:
            origin = ctypes.addressof(ctypes.c_char.from_buffer(source))
            ctypes.memmove(self._base + start, origin, source.nbytes)

    def publish(self, record: Record) -> None:
        """Let others have a reserved record."""
        self._locked(self._publish, record)
        self._state.wake(for_room=False)

    def drop(self, record: Record) -> None:
        """Undo a reservation, or what was begun of one; no effect on a record that was published."""
        if not self.foreign and record in self._open:
            self._locked(self._settle, record)
            self._state.wake(for_room=True)

    def take(self, timeout: float) -> tuple[Record, memoryview]:
        """Lease a record; it is settled when nobody looks at the view, or at slices of it, any more.

        Raises:
            TimeoutError: There was none in time.
        """
        memory = self._memory
        self.check_open()
        assert memory is not None  # it is there until after the closing
        record = Record()
        buffer: Any = self._whole.from_buffer(memory.map, self._state.data_offset)
        buffer.loan = Loan(self, record)
        self._wait_for(self._take, buffer.loan, for_room=False, what="record", timeout=timeout)
        return record, memoryview(buffer).cast("B")[record.start : record.start + record.length]

    def end(self, record: Record) -> None:
        """A lease has let go of its record, something else may still look at its bytes."""
        record.quiet = False
        if self.foreign:
            return
        if self._loose:
            self._tidy()
        if record.done and not record.settled:
            self._locked(self._state.acknowledge, record)

    def settle(self, record: Record) -> None:
        """Nothing here looks at the record's bytes any more. Also called by the garbage collector, at any moment."""
        if self.foreign or record not in self._open:
            return
        self._loose.append(record)
        if record.quiet:
            return
        with contextlib.suppress(TimeoutError):  # the header's holder is stopped: the next operation tries again
            self._tidy()

    def close(self) -> None:
        """Leave, or be about to: the last record in use takes this process out with it."""
        self.closed = True
        if not self.foreign and self._memory is not None:
            self._locked(self._leave_if_idle)
            self._let_go()

    def forget(self) -> None:
        """In a child by fork: let go of the descriptor, which would keep the parent alive in the others' eyes."""
        self.foreign = True
        if self._memory is not None:
            os.close(self._memory.descriptor)

    def _wait_for(
        self, attempt: Callable[..., bool], *arguments: Any, for_room: bool, what: str, timeout: float
    ) -> None:
        start = now = time.monotonic()
        deadline = start + check_timeout(timeout)
        waited = False
        try:
            while True:
                if now - self._reaped_at > (SLICE if waited else _REAP_SECONDS):
                    self._reap(now)
                seen, said = self._locked(
                    self._attempt, attempt, arguments, for_room, now >= deadline, until=deadline + _GRACE_SECONDS
                )
                if seen is None:
                    return
                if said:
                    raise TimeoutError(f"ring {self.name}: no {what} within {timeout} s: {said}")
                waited = True
                self._state.sleep(for_room=for_room, seen=seen, seconds=deadline - now)
                now = time.monotonic()
        finally:
            if waited:
                with self.counting:
                    self.counters.waited(time.monotonic() - start)

    def _attempt(
        self, attempt: Callable[..., bool], arguments: Sequence[Any], for_room: bool, last: bool
    ) -> tuple[int | None, str]:
        """None when it worked, or what to sleep on; the last time with words about the ring."""
        self.check_open()
        if attempt(*arguments):
            return None, ""
        said = ""
        if last:
            turn = self._state.first_claim(arguments[0].record) if for_room else ""
            attached = ", ".join(map(str, self._state.processes()))
            said = f"{self._state.describe()}; {turn}attached: {attached}"
        return self._state.signal(for_room=for_room), said

    def _reserve(self, loan: Loan, length: int) -> bool:
        record = loan.record
        self._open[record] = weakref.ref(loan)
        claimed = record.claim != 0
        if not self._state.reserve(record, length):
            return False
        with self.counting:
            self.counters.queue(self._state.count())
        if claimed:
            self._state.wake(for_room=True)  # those who queued behind the claim
        return True

    def _publish(self, record: Record) -> None:
        self._state.publish(record)
        self._open.pop(record, None)
        self._leave_if_idle()

    def _settle(self, record: Record) -> None:
        self._state.settle(record)
        self._open.pop(record, None)
        self._leave_if_idle()

    def _take(self, loan: Loan) -> bool:
        self._open[loan.record] = weakref.ref(loan)
        if not self._state.take(loan.record):
            del self._open[loan.record]
            return False
        return True

    def _reap(self, now: float) -> None:
        self._reaped_at = now
        if self._locked(self._reap_if_here):
            self._state.wake(for_room=True)
            for _ in range(self._state.count()):
                self._state.wake(for_room=False)

    def _reap_if_here(self) -> bool:
        self.check_open()
        # An interrupt may even keep a loan that dies from saying so.
        self._loose.extend(record for record, loan in self._open.items() if loan() is None)
        return bool(self._state.reap())

    def _tidy(self) -> None:
        while self._loose and not self._state.is_inside():  # else the end of `_locked` comes back here
            self._state.locked(time.monotonic() + _HEADER_SECONDS, self._settle_loose)
            self._state.wake(for_room=True)
            self._state.wake(for_room=False)
        self._let_go()

    def _settle_loose(self) -> None:
        while self._loose:
            try:
                self._settle(self._loose[0])  # it stays there until it is settled, should an interrupt come
            except RuntimeError:
                del self._open[self._loose.popleft()]  # it was taken from this process: that is said once
                raise
            self._loose.popleft()

    def _locked(self, action: Callable[..., T], *arguments: Any, until: float | None = None) -> T:
        if self.foreign:
            self.check_open()
        try:
            deadline = time.monotonic() + _HEADER_SECONDS if until is None else until
            return self._state.locked(deadline, action, *arguments)
        finally:
            if self._loose:
                self._tidy()

    def _leave_if_idle(self) -> None:
        if self.closed and self._memory is not None and not any(record.number is not None for record in self._open):
            self._state.leave()
            os.close(self._memory.descriptor)
            self._memory = None

    def _let_go(self) -> None:
        """After leaving, outside of the lock: drop the mapping."""
        if self._memory is None and not self.foreign:
            self._data = memoryview(b"")
            self._state.let_go()
