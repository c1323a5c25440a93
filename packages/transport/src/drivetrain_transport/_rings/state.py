"""What the processes of a ring share beside the records' bytes: who is attached, and where each record stands.

    header      constants, the lock, head and tail, what one can sleep on
    processes   a word for each process: its number, 0 for a free place
    claims      a word for each sender that waits for room: its ticket and its process, 0 for a free place
    table       a line for each record: state, where it lies, since when; record number n has line n modulo the table
    data        the records' bytes, in a circle

A record's state goes this way, always under the lock:

    FREE -> WRITING -> READY -> LEASED -> FREE, or -> DONE -> FREE while tensors of a finished record are still alive

**Killed at any point.** Every change is decided by a single store of a word, which a processor does whole or not at
all; the stores before it write where nobody looks yet, those after it only repeat what can be found out again:

    reserve      the line beyond the tail is written, then *the tail moves*; then the claim on room becomes 0
    publish      the mark of the first ready record moves down, then *the state becomes READY*; then sleepers are woken
    take         *the state becomes LEASED, with the taker and the count of deliveries in the same word*; then the mark
                 moves up, which only saves looking
    finish       *the state becomes FREE*; then the head passes the free lines, which who looks for room does as well
    give back    as publish
    acknowledge  *the state becomes DONE*
    reap         as finish and give back for each record of the dead, then *their word becomes 0*

So there is no state to repair: whoever gets the lock of a dead holder goes on, and sees the dead one's stores in their
order, because the kernel hands the lock over after the last of them. What a dead process left is found by `reap`: what
it was writing is dropped (a reservation without a commit is no message), what it had leased is ready again, what it had
finished is free. A wake-up that died with its sender is why nobody sleeps longer than `SLICE`.

Ctrl-C may come between any two stores as well, in a process that lives on; what it left is found by the objects that
had to live for it (`Loan`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain_transport._rings import futex
from drivetrain_transport._rings.locks import RobustLock, hold, is_held
from drivetrain_transport._rings.memory import RingMemory

T = TypeVar("T")

SLICE = 0.1
"""Seconds that a process sleeps at most before it looks for dead ones."""
ALIGNMENT = 64
"""Records begin at multiples of this many bytes, and so do the frames in them."""

FREE, WRITING, READY, LEASED, DONE = range(5)
_STATES = ("free", "being written", "ready", "leased", "finished but still in use")

_MAGIC = int.from_bytes(b"DTRING\x00\x01", "little")
_MAGIC_AT, _CAPACITY, _LINES, _PROCESSES = range(4)
_LOCK_AT = 8  # words; the lock has a cache line of its own
_HOLDER, _HEAD, _TAIL, _FIRST_READY, _TICKET, _READY_SIGNAL, _ROOM_SIGNAL = range(16, 23)
_PROCESS_TABLE = 64
_STATE, _START, _END, _LENGTH, _SINCE = range(5)
_LINE = 8  # words


class Record:
    """A record as one process has it: reserved, or leased."""

    __slots__ = ("claim", "delivery", "done", "length", "number", "quiet", "settled", "settling", "start")

    def __init__(self) -> None:
        self.number: int | None = None
        self.start = 0
        self.length = 0
        self.claim = 0
        """Not 0 while room is claimed for it."""
        self.quiet = False
        """While its lease ends, which looks after it."""
        self.delivery = 0
        self.done = False
        self.settling = False
        self.settled = False


class RingState:
    """One process's view of the shared state.

    Changes are made under the lock: in `locked`. Only `sleep`, `wake`, `is_inside` and `let_go` are called without it.
    """

    def __init__(self, memory: RingMemory, *, fresh: tuple[int, int, int] | None = None) -> None:
        """With `fresh` (capacity, lines, processes) the memory is new and is laid out.

        Raises:
            ValueError: The memory is not laid out as this version does.
        """
        words = memoryview(memory.map)[: len(memory.map) // 8 * 8].cast("Q")
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory.map))
        self._words = words
        self._lock = RobustLock(base + 8 * _LOCK_AT)
        self._signals = {_READY_SIGNAL: base + 8 * _READY_SIGNAL, _ROOM_SIGNAL: base + 8 * _ROOM_SIGNAL}
        if fresh is not None:
            self._lock.make()
            words[_CAPACITY], words[_LINES], words[_PROCESSES] = fresh
            words[_HEAD] = words[_TAIL] = words[_FIRST_READY] = 1
            words[_MAGIC_AT] = _MAGIC
        self.capacity, self._lines, self._processes = words[_CAPACITY], words[_LINES], words[_PROCESSES]
        self.data_offset = data_offset(self._lines, self._processes)
        if words[_MAGIC_AT] != _MAGIC or self.data_offset + self.capacity != len(memory.map):
            raise ValueError(f"ring {memory.name} is of another version: install one version in all processes")
        self._claims = _PROCESS_TABLE + self._processes
        self._table = self._claims + self._processes
        self.name = memory.name
        self._descriptor = memory.descriptor
        self._pid = os.getpid()
        self._me = -1
        self._no_claims = bytes(8 * self._processes)

    def locked(self, deadline: float, action: Callable[..., T], *arguments: Any) -> T:
        """Do something under the lock.

        Raises:
            TimeoutError: The lock was not to be had by the deadline: its holder is stopped.
            RuntimeError: This process has let go of the ring.
        """
        words = self._words  # keeps the memory mapped, whatever other threads do
        if not words:
            raise RuntimeError(f"ring {self.name} is closed")
        here = self._here()
        try:
            if not self._lock.acquire(deadline):
                holder = words[_HOLDER] >> 32
                raise TimeoutError(f"ring {self.name}: process {holder} holds the header and does not move")
            words[_HOLDER] = here
            return action(*arguments)
        finally:
            if words[_HOLDER] == here:
                words[_HOLDER] = 0
            self._lock.unlock(self._lock.address)

    def is_inside(self) -> bool:
        """Whether this very thread is within `locked` (a garbage collection got in between)."""
        words = self._words
        return bool(words) and words[_HOLDER] == self._here()

    def sleep(self, *, for_room: bool, seen: int, seconds: float) -> None:
        """Wait for the signal to differ from the one seen; `SLICE` seconds at most."""
        words = self._words
        if words:
            address = self._signals[_ROOM_SIGNAL if for_room else _READY_SIGNAL]
            futex.wait(address, seen & 0xFFFFFFFF, max(min(seconds, SLICE), 0.0))

    def wake(self, *, for_room: bool) -> None:
        """Wake one who waits for a record, or all who wait for room: only they know how much they need."""
        words = self._words
        if words:
            address = self._signals[_ROOM_SIGNAL if for_room else _READY_SIGNAL]
            futex.wake(address, 0x7FFFFFFF if for_room else 1)

    def let_go(self) -> None:
        """Let the memory be unmapped, once nobody uses it."""
        self._words = memoryview(b"").cast("Q")

    def signal(self, *, for_room: bool) -> int:
        """What to give to `sleep`, read before looking."""
        return self._words[_ROOM_SIGNAL if for_room else _READY_SIGNAL]

    def join(self) -> None:
        """Enter this process: first the lock that tells it is alive, then the word that says that it is here.

        Raises:
            RuntimeError: The table of processes is full.
        """
        for index in range(self._processes):
            if self._words[_PROCESS_TABLE + index] == 0 and hold(self._descriptor, index):
                self._words[_PROCESS_TABLE + index] = self._pid
                self._me = index
                return
        raise RuntimeError(f"ring {self.name} has room for {self._processes} processes: create it with more")

    def leave(self) -> None:
        """Take this process out. It has no records any more."""
        self._words[_PROCESS_TABLE + self._me] = 0

    def reserve(self, record: Record, length: int) -> bool:
        """Room for so many bytes; False when there is none, or when others wait for it already.

        Who gets none has a claim from then on, and is served in turn; it is given up with `forgo`, or here.
        """
        words = self._words
        if self._is_behind(record):
            self._make_claim(record)
            return False
        if words[self._line(words[_HEAD]) + _STATE] & 0xFF == FREE:
            self._pass_free()
        head, tail = words[_HEAD], words[_TAIL]
        size = -(-length // ALIGNMENT) * ALIGNMENT
        # Positions count on from turn to turn, so that the end less the beginning is what is used. An empty ring begins
        # again at 0, in memory that the caches know.
        start = words[self._line(tail - 1) + _END] if head != tail else 0
        if start % self.capacity + size > self.capacity:
            start += self.capacity - start % self.capacity
        full = head != tail and start + size - words[self._line(head) + _START] > self.capacity
        if full or tail - head >= self._lines:
            self._make_claim(record)
            return False
        line = self._line(tail)
        words[line + _START] = start
        words[line + _END] = start + size
        words[line + _LENGTH] = length
        words[line + _SINCE] = time.monotonic_ns()
        words[line + _STATE] = self._word(WRITING, 0)
        record.start, record.length = start % self.capacity, length
        try:
            words[_TAIL] = tail + 1
        finally:  # an interrupt that comes between the two must not part them
            record.number = tail if words[_TAIL] > tail else None
        self.forgo(record)
        return True

    def forgo(self, record: Record) -> None:
        """Give up a claim on room, if there is one."""
        if record.claim:
            for at in range(self._claims, self._table):
                if self._words[at] == record.claim:
                    self._words[at] = 0
                    self._words[_ROOM_SIGNAL] += 1
        record.claim = 0

    def publish(self, record: Record) -> None:
        """The bytes are there: let others have them."""
        self._expect(record, WRITING)
        assert record.number is not None
        record.settling = True
        self._make_ready(record.number, 0)
        record.settled = True

    def take(self, record: Record) -> bool:
        """Lease the oldest record that is ready; False when none is."""
        words = self._words
        tail = words[_TAIL]
        for number in range(max(words[_FIRST_READY], words[_HEAD]), tail):
            line = self._line(number)
            word = words[line + _STATE]
            if word & 0xFF == READY:
                record.delivery = (word >> 32) + 1
                record.start, record.length = words[line + _START] % self.capacity, words[line + _LENGTH]
                leased = self._word(LEASED, record.delivery)
                words[line + _SINCE] = time.monotonic_ns()
                try:
                    words[line + _STATE] = leased
                finally:
                    record.number = number if words[line + _STATE] == leased else None
                words[_FIRST_READY] = number + 1
                return True
        words[_FIRST_READY] = tail
        return False

    def acknowledge(self, record: Record) -> None:
        """The record is finished and is not to be delivered again, but its bytes are still in use."""
        if not record.settled:
            self._words[self._expect(record, LEASED)] = self._word(DONE, record.delivery)

    def settle(self, record: Record) -> None:
        """Nobody here uses the record any more: free it, or let it be delivered again.

        It is free when it is done, or was never published. A settling or publishing that was interrupted is repeated.
        """
        self.forgo(record)
        if record.settled or record.number is None:
            return
        if not record.settling or self._is_ours(record, WRITING, LEASED, DONE):
            self._expect(record, WRITING, LEASED, DONE)
            record.settling = True
            if record.done or not self._is_ours(record, LEASED):
                self._words[self._line(record.number) + _STATE] = FREE
            else:
                self._make_ready(record.number, record.delivery)
        self._pass_free()
        record.settled = True

    def reap(self) -> list[int]:
        """Settle what dead processes have left; their numbers."""
        words = self._words
        dead = {
            index: words[_PROCESS_TABLE + index]
            for index in range(self._processes)
            if words[_PROCESS_TABLE + index] and index != self._me and not is_held(self._descriptor, index)
        }
        if not dead:
            return []
        for number in range(words[_HEAD], words[_TAIL]):
            word = words[self._line(number) + _STATE]
            if word >> 8 & 0xFFFFFF in dead:
                if word & 0xFF == LEASED:
                    self._make_ready(number, word >> 32)
                elif word & 0xFF in (WRITING, DONE):
                    words[self._line(number) + _STATE] = FREE
        self._pass_free()
        for at in range(self._claims, self._table):
            if (words[at] & 0xFFFFFF) - 1 in dead:
                words[at] = 0
        for index in dead:
            words[_PROCESS_TABLE + index] = 0
        return list(dead.values())

    def processes(self) -> list[int]:
        """The numbers of the processes that are attached, this one's too; one that is attached twice comes twice."""
        return [pid for pid in self._words[_PROCESS_TABLE : self._claims] if pid]

    def count(self) -> int:
        """Records in the ring, in whichever state."""
        return self._words[_TAIL] - self._words[_HEAD]

    def first_claim(self, record: Record) -> str:
        """Who is to get room before this record; empty when nobody is."""
        first = min((claim for claim in self._words[self._claims : self._table] if claim), default=record.claim)
        if first == record.claim:
            return ""
        slot = (first & 0xFFFFFF) - 1
        return f"first in turn is process {self._words[_PROCESS_TABLE + slot]} (slot {slot}), does it run?; "

    def describe(self) -> str:
        """What is in the ring, and who holds the oldest record."""
        words = self._words
        lines = [self._line(number) for number in range(words[_HEAD], words[_TAIL])]
        states = [words[line + _STATE] & 0xFF for line in lines]
        used = words[lines[-1] + _END] - words[lines[0] + _START] if lines else 0
        text = f"{used} of {self.capacity} bytes in {len(lines)} of at most {self._lines} records"
        if not lines:
            return text
        kinds = ", ".join(f"{states.count(kind)} {name}" for kind, name in enumerate(_STATES) if states.count(kind))
        since = (time.monotonic_ns() - words[lines[0] + _SINCE]) / 1e9
        slot = words[lines[0] + _STATE] >> 8 & 0xFFFFFF
        whose = f" by process {words[_PROCESS_TABLE + slot]} (slot {slot})"
        by = whose if states[0] in (WRITING, LEASED, DONE) else ""
        return f"{text} ({kinds}); the oldest is {_STATES[states[0]]}{by} for {since:.1f} s"

    def _make_ready(self, number: int, deliveries: int) -> None:
        words = self._words
        if number < words[_FIRST_READY]:
            words[_FIRST_READY] = number
        words[self._line(number) + _STATE] = READY | deliveries << 32
        words[_READY_SIGNAL] += 1

    def _is_behind(self, record: Record) -> bool:
        claims = self._words[self._claims : self._table]
        if claims.tobytes() == self._no_claims:
            return False
        first = min(claim for claim in claims if claim)
        return first != record.claim

    def _make_claim(self, record: Record) -> None:
        words = self._words
        if record.claim:
            return
        for at in range(self._claims, self._table):
            if words[at] == 0:
                words[_TICKET] += 1
                record.claim = words[_TICKET] << 24 | self._me + 1
                words[at] = record.claim
                return
        # More wait than there are places: this one goes without, and gets its place or its room later.

    def _pass_free(self) -> None:
        words = self._words
        head, tail = words[_HEAD], words[_TAIL]
        while head < tail and words[self._line(head) + _STATE] & 0xFF == FREE:
            head += 1
        words[_HEAD] = head
        words[_ROOM_SIGNAL] += 1

    def _expect(self, record: Record, *states: int) -> int:
        """Where the record's state is, after a look that it still is this process's."""
        assert record.number is not None
        if not self._is_ours(record, *states):
            raise RuntimeError(
                f"ring {self.name}: record {record.number} is no longer this process's: "
                "was the ring's file descriptor closed behind its back?"
            )
        return self._line(record.number) + _STATE

    def _is_ours(self, record: Record, *states: int) -> bool:
        assert record.number is not None
        word = self._words[self._line(record.number) + _STATE]
        return word in [self._word(state, record.delivery) for state in states]

    def _line(self, number: int) -> int:
        return self._table + number % self._lines * _LINE

    def _word(self, state: int, deliveries: int) -> int:
        return state | self._me << 8 | deliveries << 32

    def _here(self) -> int:
        return self._pid << 32 | threading.get_native_id()


def data_offset(lines: int, processes: int) -> int:
    """Where the records' bytes begin, at a page."""
    return -(-8 * (_PROCESS_TABLE + 2 * processes + lines * _LINE) // 4096) * 4096
