"""The sample ledger: every sample that was issued ends exactly once, and the file can prove it."""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from types import TracebackType
from typing import BinaryIO, get_args

import msgspec

from drivetrain_buffer._ranges import RangeSet
from drivetrain_buffer._records import (
    FORMAT_VERSION,
    End,
    Header,
    Issue,
    Outcome,
    Rewind,
    complete_size,
    encode,
    live_records,
    read_header,
    require_beginning,
)


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples were issued, and where they are: `issued` is the sum of all the others.

    Example:
        >>> counts = LedgerCounts(issued=8, trained=5, filtered=1, stale=1, failed=0, in_flight=1)
        >>> counts.ended + counts.in_flight == counts.issued
        True
    """

    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    in_flight: int
    """Issued, and not ended yet."""

    @property
    def ended(self) -> int:
        """The samples that have an outcome."""
        return self.trained + self.filtered + self.stale + self.failed


class LedgerMark(msgspec.Struct, frozen=True, kw_only=True):
    """A point in a ledger's history, to keep in a checkpoint.

    `msgspec.to_builtins(mark)` makes JSON-able values of it and `msgspec.convert(values, LedgerMark)` the mark again.
    """

    ledger_id: str
    """The ledger the mark belongs to."""
    offset: int
    """Bytes from the beginning of its file."""


class Ledger:
    """An append-only file that holds the life of every sample.

    A sample is issued once, when its generation is ordered, and ends once: `trained`, `filtered`, `stale` or `failed`.
    Until then it is in flight. Each call hands its line to the operating system before it returns, so that killing the
    process, with SIGKILL too, loses nothing that was returned from; `mark` also waits for the disk, so that a
    checkpoint never knows more than the file. A line that was cut off by the kill is removed when the ledger is opened
    again.

    Opening a file that exists goes on where it ends; `Ledger.resume` goes back to a mark. One process holds a ledger at
    a time; its threads may share it. Closed, or after a write that failed, it refuses every call.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/ledger") as ledger:
        ...     ledger.issue(0)
        ...     ledger.issue(1)
        ...     ledger.end(0, "trained")
        ...     ledger.check()
        LedgerCounts(issued=2, trained=1, filtered=0, stale=0, failed=0, in_flight=1)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a ledger, or begin one; its folder exists.

        Raises:
            RuntimeError: another process, or another `Ledger` of this one, holds it.
            ValueError: the file is no ledger, one of another format version, or damaged; the message says where.
        """
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        file = _open_locked(self.path)
        try:
            self._ledger_id = _begin_or_repair(file, self.path)
            self._state = _replay(self.path)
        except BaseException:
            file.close()
            raise
        self._file = file

    @classmethod
    def resume(cls, path: str | os.PathLike[str], mark: LedgerMark | None) -> Ledger:
        """Open a ledger and go back to a mark: what came after it is undone.

        A sample issued after the mark is void and may be issued again; one that ended after it is in flight again. The
        history stays in the file: going back is itself a record. None goes back to the beginning.

        Raises:
            RuntimeError: another process, or another `Ledger` of this one, holds it.
            ValueError: the file is no ledger or damaged, or the mark does not belong to it.
        """
        ledger = cls(path)
        try:
            ledger._rewind(mark)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def issue(self, sample_id: int) -> None:
        """Record that a sample's generation was ordered.

        Raises:
            RuntimeError: it was issued before, or the ledger is closed.
        """
        with self._lock:
            file = self._opened()
            self._state.require_issuable(sample_id)
            line = encode(Issue(sample_id=sample_id))
            try:
                _write(file, line)
                self._state.issue(sample_id)
            except BaseException:
                self._close()
                raise

    def end(self, sample_id: int, outcome: Outcome, *, reason: str = "") -> None:
        """Record how a sample ended; the reason is for whoever reads the file.

        Raises:
            RuntimeError: it was never issued, or ended before, or the ledger is closed.
            ValueError: there is no such outcome.
        """
        if outcome not in get_args(Outcome):
            raise ValueError(f"outcome={outcome!r} is none; choose from {', '.join(get_args(Outcome))}")
        with self._lock:
            file = self._opened()
            self._state.require_in_flight(sample_id)
            line = encode(End(sample_id=sample_id, outcome=outcome, reason=reason))
            try:
                _write(file, line)
                self._state.end(sample_id, outcome)
            except BaseException:
                self._close()
                raise

    def counts(self) -> LedgerCounts:
        """Count the samples, from memory."""
        with self._lock:
            return self._state.counts()

    def in_flight(self) -> list[int]:
        """The ids of the samples that have not ended, in ascending order: after a resume, those to generate again."""
        with self._lock:
            return sorted(self._state.in_flight)

    def check(self) -> LedgerCounts:
        """Prove from the file that every sample issued has ended exactly once or is in flight, and count them.

        Raises:
            RuntimeError: the sum is off, the file says something else than the memory does, or the ledger is closed.
            ValueError: the file is damaged.
        """
        with self._lock:
            self._opened()
            in_memory, on_file = self._state.counts(), read_ledger(self.path)
        if on_file.issued != on_file.ended + on_file.in_flight or on_file != in_memory:
            raise RuntimeError(
                f"the ledger {self.path} does not add up: the file says {on_file}, the memory {in_memory}"
            )
        return on_file

    def mark(self) -> LedgerMark:
        """Name this point of the history, once all before it is on the disk.

        Raises:
            RuntimeError: the ledger is closed.
        """
        with self._lock:
            file = self._opened()
            os.fsync(file.fileno())
            return LedgerMark(ledger_id=self._ledger_id, offset=os.fstat(file.fileno()).st_size)

    def close(self) -> None:
        """Let the file go; closing twice is no error."""
        with self._lock:
            self._close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise RuntimeError(f"the ledger {self.path} is closed")
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewind(self, mark: LedgerMark | None) -> None:
        file = self._opened()
        first_event = len(encode(Header(ledger_id=self._ledger_id, version=FORMAT_VERSION)))
        if mark is None:
            mark = LedgerMark(ledger_id=self._ledger_id, offset=first_event)
        if mark.ledger_id != self._ledger_id:
            raise ValueError(
                f"the mark belongs to ledger {mark.ledger_id}, and {self.path} is {self._ledger_id}; "
                "resume with the ledger of the checkpoint's own run"
            )
        size = os.fstat(file.fileno()).st_size
        if not first_event <= mark.offset <= size or not _ends_a_line(file, mark.offset):
            raise ValueError(
                f"the mark's offset, {mark.offset}, is not the end of a record of {self.path} ({size} bytes)"
            )
        if mark.offset < size:
            _write(file, encode(Rewind(to=mark.offset)))
            os.fsync(file.fileno())
            self._state = _replay(self.path)


def read_ledger(path: str | os.PathLike[str]) -> LedgerCounts:
    """Count the samples of a ledger from its file, also while another process writes it.

    Raises:
        ValueError: the file is no ledger, one of another format version, or damaged.
    """
    return _replay(os.fspath(path)).counts()


class _State:
    """What the events so far amount to."""

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self._ended = RangeSet()
        self._issued = 0
        self._outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)

    def require_issuable(self, sample_id: int) -> None:
        if sample_id in self.in_flight or sample_id in self._ended:
            what = "is in flight" if sample_id in self.in_flight else "has ended"
            raise RuntimeError(f"sample {sample_id} was issued before and {what}; every sample takes an id of its own")

    def require_in_flight(self, sample_id: int) -> None:
        if sample_id not in self.in_flight:
            what = "has ended before" if sample_id in self._ended else "was never issued"
            raise RuntimeError(f"sample {sample_id} {what}; every sample is issued once and ends once")

    def issue(self, sample_id: int) -> None:
        self._issued += 1
        self.in_flight.add(sample_id)

    def end(self, sample_id: int, outcome: Outcome) -> None:
        self.in_flight.remove(sample_id)
        self._ended.add(sample_id)
        self._outcomes[outcome] += 1

    def counts(self) -> LedgerCounts:
        return LedgerCounts(issued=self._issued, in_flight=len(self.in_flight), **self._outcomes)


def _replay(path: str) -> _State:
    state = _State()
    for position, record in live_records(path):
        try:
            if isinstance(record, Issue):
                state.require_issuable(record.sample_id)
                state.issue(record.sample_id)
            else:
                state.require_in_flight(record.sample_id)
                state.end(record.sample_id, record.outcome)
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged at byte {position}: {error}") from error
    return state


def _open_locked(path: str) -> BinaryIO:
    file = open(path, "a+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RuntimeError(
            f"the ledger {path} is held by another process or another Ledger; close that one first"
        ) from error
    return file


def _begin_or_repair(file: BinaryIO, path: str) -> str:
    """Remove a line that was cut off, write the header of a new ledger, and return the ledger's id."""
    size = complete_size(path)
    if size == 0:
        require_beginning(path)
        file.truncate(0)
        _write(file, encode(Header(ledger_id=uuid.uuid4().hex, version=FORMAT_VERSION)))
        os.fsync(file.fileno())
        _sync_folder(path)
    ledger_id = read_header(path).ledger_id
    file.truncate(complete_size(path))
    return ledger_id


def _ends_a_line(file: BinaryIO, offset: int) -> bool:
    file.seek(offset - 1)
    return file.read(1) == b"\n"


def _sync_folder(path: str) -> None:
    """Put the file's name on the disk, not only what it holds."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(file: BinaryIO, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[file.write(rest) :]
