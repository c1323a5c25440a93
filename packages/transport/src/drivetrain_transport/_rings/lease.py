"""A record on loan: its bytes lie in the ring for as long as anything here still looks at them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from drivetrain_transport._errors import FrameError
from drivetrain_transport._rings.state import ALIGNMENT, Record

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
_WORD = struct.Struct("<Q")


class Owner(Protocol):
    """What a lease and a loan ask of their process's part in the ring."""

    name: str

    def settle(self, record: Record) -> None:
        """Nothing here has to do with the record any more."""

    def end(self, record: Record) -> None:
        """The lease has let go of its record, something else may still look at its bytes."""


class Loan:
    """Lives as long as anything here has to do with a record; when it dies, the record is settled.

    For a received one, it hangs on the buffer that all views keep alive; for one that is sent, on the call.
    """

    __slots__ = ("__weakref__", "owner", "record")

    def __init__(self, owner: Owner, record: Record) -> None:
        self.owner = owner
        self.record = record

    def __del__(self) -> None:
        owner: Owner | None = getattr(self, "owner", None)  # none if an interrupt came before it was set
        if owner is not None:
            owner.settle(self.record)


class Lease(Generic[T]):
    """A received record, on loan from the ring. A context manager; made by `Ring.receive`.

        with ring.receive(Batch, timeout=30) as lease:
            train(lease.message.tokens)         # a tensor whose memory is the ring's
            kept = lease.copy()                 # independent of the ring

    Leaving the block finishes the record; leaving it by an exception gives it back, and it is delivered again, here or
    elsewhere. So does the death of this process at any moment before, `Ring.close`, and dropping the lease unfinished.

    **Memory.** The tensors of `message`, and whatever is made of them without a copy, alias the ring. The bytes of a
    record are not reused while one of them lives, also after the end of the lease: they never change under a reader.
    A tensor that is kept keeps its place in the ring, and all that was sent after it has to do with the rest: a ring
    with one old record in it fills up, and `send` says in its TimeoutError who holds it. Keep copies instead.
    Numpy arrays and torch tensors can be written to; whoever does so changes what the next one gets if the record is
    delivered again.
    """

    def __init__(
        self,
        owner: Owner,
        record: Record,
        frames: Sequence[memoryview],
        decode: Callable[[Sequence[Buffer], bool], T],
    ) -> None:
        """Use `Ring.receive`.

        Raises:
            FrameError: The frames are not of the type that was asked for.
        """
        self._owner = owner
        self._record = record
        self._frames: Sequence[memoryview] = frames
        self._decode = decode
        self._message: T | None = decode(frames, False)
        self._ended = ""

    @property
    def message(self) -> T:
        """The object; its tensors alias the ring.

        Raises:
            RuntimeError: The lease has ended.
        """
        self._check("message")
        message: Any = self._message
        return message  # type: ignore[no-any-return]

    @property
    def frames(self) -> list[memoryview]:
        """The record as `encode` made it, frame by frame, read-only.

        Raises:
            RuntimeError: The lease has ended.
        """
        self._check("frames")
        return [frame.toreadonly() for frame in self._frames]

    def copy(self) -> T:
        """The object once more, in memory of its own.

        Raises:
            RuntimeError: The lease has ended.
        """
        self._check("copy()")
        return self._decode(self._frames, True)

    @property
    def delivery(self) -> int:
        """How often this record was handed out, this time included. It keeps rising for one that kills its readers."""
        return self._record.delivery

    @property
    def redelivered(self) -> bool:
        """Whether another lease of this record ended unfinished: parts of its work may have been done already."""
        return self._record.delivery > 1

    @property
    def nbytes(self) -> int:
        """The size in the ring."""
        return self._record.length

    def release(self) -> None:
        """The record is finished: it is not delivered again. Without effect on a finished one.

        Raises:
            RuntimeError: It was given back.
        """
        if self._ended == "released":
            return
        self._check("release()")
        self._record.done = True
        self._end("released")

    def give_back(self) -> None:
        """Let the record be delivered again, here or elsewhere, as soon as no tensor of it is alive here.

        Raises:
            RuntimeError: The lease has ended.
        """
        self._check("give_back()")
        self._end("given back")

    def _end(self, how: str) -> None:
        self._record.quiet = True
        self._ended = how
        self._message = None
        self._frames = ()
        self._owner.end(self._record)

    def _check(self, what: str) -> None:
        if self._ended:
            raise RuntimeError(
                f"{what} of a lease that was {self._ended}: "
                f"its memory is ring {self._owner.name}'s again: take a copy() before"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if kind is None:
            self.release()
        else:
            self.give_back()


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each frame begins in a record, and how long the record is. In front of them lie their number and sizes."""
    starts = []
    end = 8 * (1 + len(sizes))
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def index(sizes: Sequence[int]) -> bytes:
    """The beginning of a record: the number and the sizes of its frames."""
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def split(record: memoryview) -> list[memoryview]:
    """The frames of a record.

    Raises:
        FrameError: The sizes in it are not those of the record.
    """
    (count,) = _WORD.unpack_from(record)
    if not 0 <= count < len(record) // 8:
        raise FrameError(f"a record of {len(record)} bytes cannot have {count} frames")
    sizes = struct.unpack_from(f"<{count}Q", record, 8)
    if any(size > len(record) for size in sizes):
        raise FrameError(f"a record of {len(record)} bytes cannot have frames of {list(sizes)} bytes")
    starts, length = layout(sizes)
    if length != len(record):
        raise FrameError(f"a record of {len(record)} bytes does not hold frames of {list(sizes)} bytes")
    return [record[start : start + size] for start, size in zip(starts, sizes, strict=True)]
