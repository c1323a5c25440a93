"""Which messages are handled, on disk: what survives the process that handled them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._errors import AlreadyHandled, JournalFailed
from drivetrain_transport._streams.numbers import Numbers

_LONGEST_S = 1e6  # SQLite counts milliseconds in 32 bits
_MENDS = {
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "its disk fails, the system's log says how",
    sqlite3.SQLITE_READONLY: "let this user write it and its folder",
    sqlite3.SQLITE_PERM: "let this user write it and its folder",
    sqlite3.SQLITE_CANTOPEN: "its folder must exist, and let this user write in it",
    sqlite3.SQLITE_CORRUPT: "it is damaged: put it aside and begin a new one, which knows of no handled message",
    sqlite3.SQLITE_NOTADB: "it is damaged: put it aside and begin a new one, which knows of no handled message",
}
_COMPACT_EVERY = 251  # prime, so that streams that take turns all get theirs
_TABLES = """
CREATE TABLE IF NOT EXISTS drivetrain_prefix (stream TEXT PRIMARY KEY, below INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS drivetrain_handled
    (stream TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (stream, number)) WITHOUT ROWID;
"""


class Identified(Protocol):
    """What a journal needs of a delivery."""

    recorded: bool

    @property
    def stream(self) -> str: ...
    @property
    def number(self) -> int: ...
    def ack(self) -> None: ...


class Journal:
    """A file that says which messages of which streams are handled. The receivers of one host share it.

    It makes "handled exactly once" true although every process may be killed at any moment:

        journal = Journal("run/handled.sqlite")
        receiver = WorkReceiver.connect(address, type=Sample, journal=journal)
        ...
        delivery = receiver.receive(timeout=60)
        with contextlib.suppress(AlreadyHandled), journal.handling(delivery) as connection:
            connection.execute("INSERT INTO results VALUES (?, ?)", (delivery.number, delivery.value.score))

    The effect and the mark are one transaction. Killed before its end, neither is there, and the message is delivered
    again. Killed after it, both are there: whoever gets the message again finds the mark and drops it. Two receivers
    that have the same message in their hands at once (a link was cut, and the sender gave it to another) are told
    apart by the mark as well: the second gets `AlreadyHandled`. An effect outside of the transaction (a file, a
    model's update) happens at least once: before the mark it may be repeated, after it could be lost.

    The file is SQLite in WAL mode. It must lie on a disk of this host, not on a network file system. A killed process
    loses nothing. A power cut may lose the last transactions, effect and mark together, and leaves the file whole; the
    senders have been told of those messages, so only one that asks again (`WorkSender.resume`) sends them again.

    Its size is that of the gaps, not of the stream: what is handled without a gap from 0 on is one number.

    May be used from several threads, of which one at a time is in a transaction, and from several processes, each with
    a Journal of its own: after a fork, make a new one.
    """

    def __init__(self, path: str | Path, *, timeout: float = 30.0) -> None:
        """Open the file, or make it.

        Args:
            path: The file; its folder must exist.
            timeout: Seconds to wait for other processes' transactions.

        Raises:
            JournalFailed: It cannot be opened or made. An OSError.
            ValueError: It is there and is no SQLite file; or the timeout is NaN or infinite.
        """
        self.path = Path(path)
        self._timeout = check_timeout(timeout)
        self._lock = threading.Lock()
        self._owner = 0
        self._reading = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._marks = 0
        self._writer = self._connect()
        try:
            self._reader = self._connect()
        except BaseException:
            self._writer.close()
            raise

    def is_handled(self, stream: str, number: int) -> bool:
        """Whether a message is handled, as far as any process has recorded it by now.

        Raises:
            JournalFailed: The file cannot be read.
            RuntimeError: The journal is closed, or was opened before a fork.
        """
        with self._reading, self._named():
            self._check_open()
            return _is_handled(self._reader, stream, number)

    def handled(self, stream: str) -> Numbers:
        """The numbers of a stream that are handled. Raises as `is_handled`."""
        with self._reading, self._named():
            self._check_open()
            self._reader.execute("BEGIN")
            try:
                below = _below(self._reader, stream)
                rows = self._reader.execute(
                    "SELECT number FROM drivetrain_handled WHERE stream = ? AND number >= ?", (stream, below)
                ).fetchall()
            finally:
                self._reader.execute("COMMIT")
        numbers = Numbers(below)
        for (number,) in rows:
            numbers.add(number)
        return numbers

    def record(self, stream: str, number: int) -> bool:
        """Record a message as handled; False when it was so already. Raises as `transaction`."""
        with self.transaction() as connection:
            return self._mark(connection, stream, number)

    @contextlib.contextmanager
    def handling(self, delivery: Identified) -> Iterator[sqlite3.Connection]:
        """Handle a message in one transaction with its mark; acknowledge it when that is committed.

        Other processes' transactions wait meanwhile: do the long part of the work before. When the block raises,
        nothing was recorded and the delivery is still in your hands: handle it again, or reject it.

        Raises:
            AlreadyHandled: Another receiver has recorded it. The block was not entered, the message is acknowledged.
            TimeoutError, JournalFailed, RuntimeError: As for `transaction`.
        """
        with self.transaction() as connection:
            fresh = self._mark(connection, delivery.stream, delivery.number)
            if fresh:
                yield connection
        delivery.recorded = True
        delivery.ack()
        if not fresh:
            raise AlreadyHandled(f"message {delivery.number} of stream {delivery.stream!r} was handled already")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction of your own in the file, for tables of your own; rolled back when the block raises.

        Raises:
            TimeoutError: Another thread or process was in one for all of the timeout; names the file.
            JournalFailed: The disk is full, or the file is damaged; the block's own SQL errors come as they are.
            RuntimeError: This thread is in one, or the journal is closed or was opened before a fork.
        """
        with self._turn():
            self._check_open()
            with self._named():
                self._writer.execute("BEGIN IMMEDIATE")
            try:
                with self._named(waited=False):
                    yield self._writer
                    self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk ends it by itself
                    self._writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file. Idempotent.

        Raises:
            RuntimeError: This thread is in a transaction of it: end that first.
            TimeoutError: Another thread was in one for all of the timeout.
        """
        if os.getpid() == self._process and not self._closed:
            with self._turn(), self._reading:
                self._closed = True
                self._writer.close()
                self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.path,
                timeout=min(max(self._timeout, 0.0), _LONGEST_S),
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
        except sqlite3.Error as error:
            raise self._failed(error) from error
        try:
            with self._named():
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(_TABLES)
        except BaseException as error:
            connection.close()
            if isinstance(error, JournalFailed) and _code(error.__cause__) == sqlite3.SQLITE_NOTADB:
                raise ValueError(f"{self.path} is no journal, choose another file: {error.__cause__}") from error
            if isinstance(error, sqlite3.Error):
                raise self._failed(error) from error
            raise
        return connection

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread's turn to write."""
        self._check_process()
        if self._owner == threading.get_ident():
            raise RuntimeError(
                f"this thread is in a transaction of the journal {self.path} already: end that one first"
            )
        if not self._lock.acquire(timeout=max(self._timeout, 0.0)):
            raise TimeoutError(f"the journal {self.path} was in another thread's transaction for {self._timeout:g} s")
        try:
            self._owner = threading.get_ident()
            yield
        finally:
            self._owner = 0
            self._lock.release()

    def _mark(self, connection: sqlite3.Connection, stream: str, number: int) -> bool:
        below = _below(connection, stream)
        if number < below:
            return False
        made = connection.execute("INSERT OR IGNORE INTO drivetrain_handled VALUES (?, ?)", (stream, number))
        if not made.rowcount:
            return False
        self._marks += 1
        if self._marks % _COMPACT_EVERY == 0:
            _compact(connection, stream, below)
        return True

    @contextlib.contextmanager
    def _named(self, *, waited: bool = True) -> Iterator[None]:
        """Names the file in what SQLite says of it. `waited`: a lock that is not to be had is this file's."""
        try:
            yield
        except sqlite3.Error as error:
            code = _code(error)
            if waited and code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise TimeoutError(
                    f"the journal {self.path} was in another process's transaction for {self._timeout:g} s"
                ) from error
            if code in _MENDS:
                raise self._failed(error) from error
            raise

    def _failed(self, error: sqlite3.Error) -> JournalFailed:
        mend = _MENDS.get(_code(error), "choose another file")
        return JournalFailed(f"cannot use the journal {self.path}: {error}: {mend}")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise RuntimeError(f"the journal {self.path} is closed: open it again")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"the journal {self.path} was opened before the fork: open it again in this process")


def _code(error: BaseException | None) -> int:
    """SQLite's number for an error; 0 for one that is not from it."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _below(connection: sqlite3.Connection, stream: str) -> int:
    row = connection.execute("SELECT below FROM drivetrain_prefix WHERE stream = ?", (stream,)).fetchone()
    return int(row[0]) if row else 0


def _is_handled(connection: sqlite3.Connection, stream: str, number: int) -> bool:
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM drivetrain_prefix WHERE stream = ?1 AND below > ?2)"
        " OR EXISTS (SELECT 1 FROM drivetrain_handled WHERE stream = ?1 AND number = ?2)",
        (stream, number),
    ).fetchone()
    return bool(row[0])


def _compact(connection: sqlite3.Connection, stream: str, below: int) -> None:
    """Turn the rows without a gap behind the prefix into the prefix."""
    first = below
    for (number,) in connection.execute(
        "SELECT number FROM drivetrain_handled WHERE stream = ? ORDER BY number", (stream,)
    ):
        if number != below:
            break
        below += 1
    if below > first:
        connection.execute("DELETE FROM drivetrain_handled WHERE stream = ? AND number < ?", (stream, below))
        connection.execute("INSERT OR REPLACE INTO drivetrain_prefix VALUES (?, ?)", (stream, below))
