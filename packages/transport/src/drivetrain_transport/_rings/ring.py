"""A ring in shared memory: typed records from any number of processes of a host to any number of others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from drivetrain_transport._codec.frames import MAX_BYTES, decode, encode
from drivetrain_transport._errors import FrameError
from drivetrain_transport._rings.hand import RingHand
from drivetrain_transport._rings.lease import Lease, Loan, index, layout, split
from drivetrain_transport._rings.memory import make_memory, open_memory
from drivetrain_transport._rings.state import Record, data_offset
from drivetrain_transport._stats import ChannelStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


class Ring:
    """Records from any number of processes to any number of others, each to one of them, through shared memory.

        ring = Ring.create("samples", 1 << 30)                  # one process makes it and tells the others its address
        ring.send(Batch(tokens=tokens), timeout=60)

        ring = Ring.attach(address)                             # any process of the same user on the same host
        with ring.receive(Batch, timeout=60) as lease:
            train(lease.message.tokens)

    `send` copies the tensors into the ring, the only copy there is; the receiver's tensors lie in it. Every handle can
    send and receive, from any thread; `asyncio.to_thread(ring.receive, Batch, timeout=1)` is the form for coroutines.
    Records of one sender come in the order in which it sent them, when one receiver takes them.

    **Life and death.** The processes are equal; none is needed by the others, the creator neither.
    * One that dies while it sends: its record is there whole or not at all, never in part.
    * One that dies with a lease, or gives it back, or closes: the record goes to the next who receives, marked as
      `redelivered`, though younger ones may have passed it. So a record is handled once, or again where nobody can
      know how far the dead one had come; it is lost only with all of the ring.
    * Death is read from a lock that the kernel drops, not from silence: a stopped or busy process is alive. It is
      noticed within a second, at once by whoever waits.
    * The memory has no name in any file system. It is gone when the last process that has it open is gone, be it
      killed: nothing can be left over. What was in it is gone too.
    * A child by fork has no part in the ring of its parent: it has to attach itself.

    **Room.** Records lie in the order in which they were begun, and room comes free from the oldest on. A lease that
    is held for long, or a tensor that is kept, stops all senders once the rest is full: `send` then raises a
    TimeoutError that names who holds the oldest record. Copy what is kept (`Lease.copy`). Who waits for room is served
    first, so large records are not starved by small ones; a process that is stopped while it is first in turn, or while
    it writes, stops the others as well, and is named. A record may be as large as the ring, but two that are to
    travel at the same time must fit together: four times the usual record is a good size.

    The header is a lock and a few words, each change decided by one store; copies are made outside the lock.
    """

    def __init__(self, hand: RingHand) -> None:
        """Use `create` or `attach`."""
        self._hand = hand

    @classmethod
    def create(cls, name: str, capacity_bytes: int, *, max_records: int = 4096, max_processes: int = 64) -> Self:
        """Make a ring. Its memory is taken at once, all of it.

        Args:
            name: For messages and counts; letters, digits, dots, underscores, hyphens. Need not be unique.
            capacity_bytes: Room for records; rounded up to pages. A record takes its frames' bytes, each frame rounded
                up to 64, and 8 more for each frame.
            max_records: How many records may be in it at once; 64 bytes each.
            max_processes: How many may attach at once.

        Raises:
            ValueError: A number that is not positive, or a name with other characters.
            OSError: There is not so much free memory, on the machine or in this process's control group, or this is not
                Linux. Nothing is taken then: without the look ahead, the kernel would kill a process to find the rest.
        """
        numbers = {"capacity_bytes": capacity_bytes, "max_records": max_records, "max_processes": max_processes}
        for what, number in numbers.items():
            if not 0 < number < 1 << 48:
                raise ValueError(f"{what} is {number}: a ring needs room for at least one")
        offset = data_offset(max_records, max_processes)
        capacity = -(-capacity_bytes // 4096) * 4096
        memory = make_memory(name, offset + capacity)
        return cls(RingHand(memory, fresh=(capacity, max_records, max_processes)))

    @classmethod
    def attach(cls, address: str) -> Self:
        """Take part in a ring that another process of this host has open.

        Args:
            address: The `address` of any handle on it, in any process of the same user.

        Raises:
            ValueError: It is no address of a ring, or one of another version of this library.
            PeerLost: The process in it is gone, or has closed the ring.
            PermissionError: The process in it is another user's.
            RuntimeError: As many processes are attached as the ring was made for.
        """
        return cls(RingHand(open_memory(address)))

    @property
    def name(self) -> str:
        """The name it was created with."""
        return self._hand.name

    @property
    def address(self) -> str:
        """What `attach` takes, in other processes, as long as this handle is open: `shm://PROCESS/FILE/NAME.TOKEN`."""
        return self._hand.address

    @property
    def capacity_bytes(self) -> int:
        """Room for records."""
        return self._hand.capacity

    @property
    def processes(self) -> list[int]:
        """The numbers of the living processes that are attached; one that is attached twice comes twice.

        Raises:
            RuntimeError: The ring is closed.
        """
        return self._hand.processes()

    @property
    def stats(self) -> ChannelStats:
        """What went through this handle. `queued` is what is in the ring now, by whomever: written, waiting, leased."""
        with self._hand.counting:
            self._hand.counters.queue(self._hand.count())
            return self._hand.counters.snapshot(self.name)

    def send(self, obj: Any, *, timeout: float) -> None:
        """Put an object into the ring. When this returns, it is there, and tensors in it may be changed.

        Args:
            obj: What `encode` takes: a struct, tensors, ...
            timeout: Seconds to wait for room; 0 does not wait.

        Raises:
            ValueError: It is larger than the ring, or cannot travel.
            TypeError: msgspec cannot encode a part of it.
            TimeoutError: No room came free; says what is in the ring, which process holds the oldest record, and which
                one is to get room before this one. Nothing was sent.
            RuntimeError: The ring is closed.
        """
        self.send_frames(encode(obj, max_bytes=max(self.capacity_bytes, MAX_BYTES)), timeout=timeout)

    def send_frames(self, frames: Sequence[Buffer], *, timeout: float) -> None:
        """Put frames of bytes into the ring, as one record. Raises as `send`."""
        self._hand.check_open()
        views = [memoryview(frame) for frame in frames]
        sizes = [view.nbytes for view in views]
        starts, length = layout(sizes)
        if length > self.capacity_bytes:
            raise ValueError(
                f"a record of {length} bytes is larger than ring {self.name} of {self.capacity_bytes}: "
                "send it in parts, or create a larger ring"
            )
        record = Record()
        loan = Loan(self._hand, record)
        try:
            self._hand.reserve(loan, length, timeout)
            self._hand.write(record, 0, memoryview(index(sizes)))
            for view, start in zip(views, starts, strict=True):
                if view.nbytes:
                    self._hand.write(record, start, view.cast("B"))
            self._hand.publish(record)
        finally:
            self._hand.drop(record)
        with self._hand.counting:
            self._hand.counters.sent(sum(sizes))

    def receive(self, type: type[T], *, timeout: float) -> Lease[T]:
        """Take the oldest record that nobody else has.

        Args:
            type: What to expect, as for `decode`: a struct, a union of tagged ones, ...
            timeout: Seconds to wait for a record; 0 does not wait.

        Raises:
            FrameError: The record is not of that type. It is dropped, and counted as refused; the next one follows.
            TimeoutError: No record came; says what is in the ring and who is attached.
            RuntimeError: The ring is closed.
        """
        limit = max(self.capacity_bytes, MAX_BYTES)

        def decode_frames(frames: Sequence[Buffer], copy: bool) -> T:
            message: T = decode(frames, type, max_bytes=limit, copy=copy)
            return message

        return self._receive(decode_frames, timeout)

    def receive_frames(self, *, timeout: float) -> Lease[list[memoryview]]:
        """Take the oldest record that nobody else has, as the frames that were sent: `lease.message` is writable views
        of the ring, `lease.frames` read-only ones, `lease.copy()` a list of its own. Raises as `receive`.
        """

        def take_frames(frames: Sequence[Buffer], copy: bool) -> list[memoryview]:
            return [memoryview(bytearray(frame)) if copy else memoryview(frame) for frame in frames]

        return self._receive(take_frames, timeout)

    def close(self) -> None:
        """Let go of the ring. Without effect on a closed one. Calls that wait in other threads end with RuntimeError.

        Records on lease here are delivered again to others, as soon as their leases and tensors are gone: until then
        the process counts as attached. The same goes for a record that another thread is about to send.

        Raises:
            TimeoutError: Another process holds the header, and is stopped.
        """
        self._hand.close()

    def _receive(self, decode: Callable[[Sequence[Buffer], bool], T], timeout: float) -> Lease[T]:
        record, view = self._hand.take(timeout)
        try:
            frames = split(view)
            lease = Lease(self._hand, record, frames, decode)
            with self._hand.counting:
                self._hand.counters.received(sum(len(frame) for frame in frames))
                self._hand.counters.redelivered += record.delivery > 1
            return lease
        except FrameError as error:
            refusal = str(error)
        # Outside of the handler, so that no traceback keeps the record's bytes in use.
        record.done = True
        with self._hand.counting:
            self._hand.counters.refused += 1
        view, frames = memoryview(b""), []
        self._hand.end(record)
        raise FrameError(f"ring {self.name}: a record was dropped: {refusal}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        hand = getattr(self, "_hand", None)
        if hand is not None and not hand.closed and not hand.foreign and not sys.is_finalizing():
            warnings.warn(f"ring {hand.name} was not closed", ResourceWarning, source=self, stacklevel=2)
            hand.close()
