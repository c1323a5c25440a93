"""The journal: marks and effects that are there together or not at all, for several processes, in little space."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drivetrain_transport import AlreadyHandled, Journal, JournalFailed
from hypothesis import given, settings
from hypothesis import strategies as st


class Delivery:
    """What a receiver hands out, as far as a journal is concerned."""

    def __init__(self, number: int, stream: str = "a") -> None:
        self.stream = stream
        self.number = number
        self.recorded = False
        self.acks = 0

    def ack(self) -> None:
        self.acks += 1


def effects(journal: Journal) -> list[int]:
    with journal.transaction() as connection:
        return [number for (number,) in connection.execute("SELECT number FROM effects ORDER BY number")]


def with_table(path: Path) -> Journal:
    journal = Journal(path)
    with journal.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS effects (number INTEGER)")
    return journal


def test_effect_and_mark_are_one_and_are_made_once(tmp_path: Path) -> None:
    with with_table(tmp_path / "journal") as journal:
        delivery = Delivery(3)
        with pytest.raises(ZeroDivisionError), journal.handling(delivery) as connection:
            connection.execute("INSERT INTO effects VALUES (3)")
            1 // 0  # noqa: B018
        assert (delivery.acks, delivery.recorded, journal.is_handled("a", 3), effects(journal)) == (0, False, False, [])
        with journal.handling(delivery) as connection:
            connection.execute("INSERT INTO effects VALUES (3)")
        assert (delivery.acks, delivery.recorded, journal.is_handled("a", 3), effects(journal)) == (1, True, True, [3])
        again = Delivery(3)
        with pytest.raises(AlreadyHandled, match=r"^message 3 of stream 'a' was handled already$"):
            with journal.handling(again) as connection:
                connection.execute("INSERT INTO effects VALUES (3)")
        assert (again.acks, effects(journal)) == (1, [3])
        with contextlib.suppress(AlreadyHandled), journal.handling(Delivery(3, "b")) as connection:
            connection.execute("INSERT INTO effects VALUES (33)")
        assert effects(journal) == [3, 33]


def test_two_journals_of_one_file_see_each_others_marks(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as one, Journal(tmp_path / "journal") as other:
        assert one.record("a", 0)
        assert other.is_handled("a", 0)
        assert not other.record("a", 0)
        assert other.record("a", 1)
        assert len(one.handled("a")) == 2
        assert len(one.handled("b")) == 0


@settings(deadline=None, derandomize=True, max_examples=20)
@given(order=st.permutations(range(600)), missing=st.sets(st.integers(0, 599), max_size=4))
def test_the_marks_are_those_that_were_made_and_take_the_space_of_the_gaps(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], missing: set[int]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Journal(path) as journal:
        made = [number for number in order if number not in missing]
        assert all(journal.record("a", number) for number in made)
        assert not any(journal.record("a", number) for number in made[::50])
        assert {number for number in range(600) if journal.is_handled("a", number)} == set(made)
        numbers = journal.handled("a")
        assert len(numbers) == len(made)
        assert {n for first, past in numbers.missing(600) for n in range(first, past)} == missing


def test_a_long_stream_leaves_a_small_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        with journal.transaction():
            for number in range(20_000):
                for stream in ("a", "b"):
                    with contextlib.suppress(AlreadyHandled):
                        journal._mark(journal._writer, stream, number)
        assert journal.handled("a").below == journal.handled("b").below == 20_000
        with journal.transaction() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM drivetrain_handled").fetchone()
        assert rows < 1100
    assert (tmp_path / "journal").stat().st_size < 500_000


def test_a_process_killed_in_its_transaction_leaves_neither_effect_nor_mark(tmp_path: Path) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[2])
from test_journal import Delivery, with_table
journal = with_table(sys.argv[1])
with journal.handling(Delivery(0)) as connection:
    connection.execute("INSERT INTO effects VALUES (0)")
with journal.handling(Delivery(1)) as connection:
    connection.execute("INSERT INTO effects VALUES (1)")
    print("in the transaction", flush=True)
    sys.stdin.read()
"""
    path = tmp_path / "journal"
    command = [sys.executable, "-c", script, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "in the transaction\n"
        with Journal(path, timeout=0.2) as journal:
            assert journal.is_handled("a", 0)  # reading waits for nobody
            start = time.monotonic()
            with pytest.raises(TimeoutError, match=r"journal was in another process's transaction for 0.2 s"):
                journal.record("a", 1)
            assert time.monotonic() - start < 5
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            assert not journal.is_handled("a", 1)
            with journal.handling(Delivery(1)) as connection:
                connection.execute("INSERT INTO effects VALUES (11)")
            assert effects(journal) == [0, 11]


def test_threads_take_turns(tmp_path: Path) -> None:
    with with_table(tmp_path / "journal") as journal:

        def work() -> None:
            for number in range(100):
                with contextlib.suppress(AlreadyHandled), journal.handling(Delivery(number)) as connection:
                    connection.execute("INSERT INTO effects VALUES (?)", (number,))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert effects(journal) == list(range(100))


def test_a_thread_that_holds_its_transaction_does_not_block_the_others_for_ever(tmp_path: Path) -> None:
    errors: list[str] = []

    def record() -> None:
        try:
            journal.record("a", 1)
        except TimeoutError as error:
            errors.append(str(error))

    with Journal(tmp_path / "journal", timeout=0.2) as journal:
        with journal.transaction():
            with pytest.raises(RuntimeError, match=r"this thread is in a transaction of the journal"):
                journal.record("a", 1)
            other = threading.Thread(target=record)
            other.start()
            other.join(5)
        assert errors == [f"the journal {tmp_path}/journal was in another thread's transaction for 0.2 s"]
        assert journal.record("a", 1)


def test_files_that_are_no_journal_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database\n" * 1000)
    with pytest.raises(ValueError, match=r"text is no journal, choose another file"):
        Journal(tmp_path / "text")
    with pytest.raises(
        OSError, match=r"cannot use the journal .*absent/journal: unable to open .*its folder must exist"
    ):
        Journal(tmp_path / "absent" / "journal")


def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal._process = os.getpid() + 1  # as a child would see it
        with pytest.raises(RuntimeError, match=r"was opened before the fork"):
            journal.is_handled("a", 0)
        journal._process = os.getpid()


def test_it_is_closed_with_its_block(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        pass
    journal.close()
    uses: list[Callable[[], object]] = [
        lambda: journal.is_handled("a", 0),
        lambda: journal.handled("a"),
        lambda: journal.record("a", 0),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=rf"the journal {tmp_path}/journal is closed: open it again"):
            use()


def test_closing_within_a_transaction_is_an_error_and_waits_for_other_threads_within_bounds(tmp_path: Path) -> None:
    with with_table(tmp_path / "journal") as journal:
        with pytest.raises(
            RuntimeError, match=r"this thread is in a transaction of the journal .*: end that one first"
        ):
            with journal.transaction() as connection:
                connection.execute("INSERT INTO effects VALUES (1)")
                journal.close()
        assert effects(journal) == []
    inside, go = threading.Event(), threading.Event()

    def stay() -> None:
        with journal.transaction():
            inside.set()
            assert go.wait(20)

    with Journal(tmp_path / "journal", timeout=0.2) as journal:
        thread = threading.Thread(target=stay)
        thread.start()
        assert inside.wait(20)
        with pytest.raises(TimeoutError, match=r"was in another thread's transaction for 0.2 s"):
            journal.close()
        go.set()
        thread.join(20)


def test_a_full_disk_is_named_and_what_was_begun_is_undone(tmp_path: Path) -> None:
    with with_table(tmp_path / "journal") as journal:
        (pages,) = journal._writer.execute("PRAGMA page_count").fetchone()
        journal._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(
            JournalFailed, match=rf"journal {tmp_path}/journal: .* is full: make room on its disk"
        ) as full:
            with journal.handling(Delivery(0)) as connection:
                for _ in range(100):
                    connection.execute("INSERT INTO effects VALUES (?)", (bytes(5000),))
        assert isinstance(full.value.__cause__, sqlite3.OperationalError)
        assert not journal.is_handled("a", 0)
        with journal.handling(Delivery(0)) as connection:  # there is room for little
            connection.execute("INSERT INTO effects VALUES (1)")
        assert effects(journal) == [1]
        with pytest.raises(sqlite3.OperationalError, match="no such table"), journal.transaction() as connection:
            connection.execute("INSERT INTO none VALUES (1)")  # the block's own mistake


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.record("a", 0)
    with path.open("r+b") as file:
        file.seek(4096)  # the first page, which says what tables there are, stays
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with Journal(path) as journal:
        uses: list[Callable[[], object]] = [
            lambda: journal.is_handled("a", 0),
            lambda: journal.handled("a"),
            lambda: journal.record("a", 0),
        ]
        for use in uses:
            with pytest.raises(
                JournalFailed, match=rf"{path}: .* malformed: it is damaged: put it aside and"
            ) as damaged:
                use()
            assert isinstance(damaged.value.__cause__, sqlite3.DatabaseError)
