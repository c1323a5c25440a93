import os
import pathlib
import random
import selectors
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from drivetrain_buffer import Ledger, LedgerCounts, LedgerMark, Outcome, read_ledger

OUTCOMES: list[Outcome] = ["trained", "filtered", "stale", "failed"]


def counts(**numbers: int) -> LedgerCounts:
    return LedgerCounts(**{"issued": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0, "in_flight": 0} | numbers)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "ledger"


def test_every_outcome_is_counted(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        for sample_id in range(7):
            ledger.issue(sample_id)
        for sample_id, outcome in enumerate([*OUTCOMES, "trained"]):
            ledger.end(sample_id, outcome, reason="because")
        expected = counts(issued=7, trained=2, filtered=1, stale=1, failed=1, in_flight=2)
        assert ledger.counts() == expected
        assert ledger.check() == expected
        assert ledger.in_flight() == [5, 6]
        assert read_ledger(path) == expected


def test_the_file_is_one_json_object_a_line(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(3)
        ledger.end(3, "failed", reason="no\nanswer")
    lines = path.read_bytes().splitlines()
    header, *events = [msgspec.json.decode(line) for line in lines]
    assert header["event"] == "ledger"
    assert events == [
        {"event": "issue", "sample_id": 3},
        {"event": "end", "sample_id": 3, "outcome": "failed", "reason": "no\nanswer"},
    ]


def test_misuse_is_refused_and_leaves_no_trace(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        ledger.issue(2)
        ledger.end(2, "trained")
        before = path.read_bytes()
        with pytest.raises(RuntimeError, match="sample 1 was issued before and is in flight"):
            ledger.issue(1)
        with pytest.raises(RuntimeError, match="sample 2 was issued before and has ended"):
            ledger.issue(2)
        with pytest.raises(RuntimeError, match="sample 2 has ended before"):
            ledger.end(2, "stale")
        with pytest.raises(RuntimeError, match="sample 9 was never issued"):
            ledger.end(9, "failed")
        with pytest.raises(ValueError, match=r"outcome='lost'.*trained, filtered, stale, failed"):
            ledger.end(1, "lost")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            ledger.issue(object())  # type: ignore[arg-type]
        assert path.read_bytes() == before
        assert ledger.check() == counts(issued=2, trained=1, in_flight=1)


def test_a_closed_ledger_refuses(path: pathlib.Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(RuntimeError, match="is closed"):
        ledger.issue(1)
    with pytest.raises(RuntimeError, match="is closed"):
        ledger.mark()


def test_one_holder_at_a_time(path: pathlib.Path) -> None:
    with Ledger(path), pytest.raises(RuntimeError, match="is held by another process or another Ledger"):
        Ledger(path)
    Ledger(path).close()


def test_opening_again_goes_on_at_the_end(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        ledger.issue(2)
        ledger.end(1, "filtered")
    with Ledger(path) as ledger:
        assert ledger.in_flight() == [2]
        with pytest.raises(RuntimeError, match="has ended"):
            ledger.issue(1)
        ledger.end(2, "trained")
        assert ledger.check() == counts(issued=2, trained=1, filtered=1)


def test_a_file_cut_anywhere_gives_its_complete_lines(path: pathlib.Path) -> None:
    after_line: list[LedgerCounts] = []
    with Ledger(path) as ledger:
        after_line.append(ledger.counts())
        for sample_id, outcome in enumerate(OUTCOMES):
            ledger.issue(sample_id)
            after_line.append(ledger.counts())
            ledger.end(sample_id, outcome)
            after_line.append(ledger.counts())
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        with Ledger(path) as ledger:
            assert ledger.check() == after_line[max(lines - 1, 0)]
            ledger.issue(99)
            assert ledger.check().issued == ledger.counts().issued
        if lines:
            kept = whole[:size].rpartition(b"\n")[0] + b"\n"
            assert path.read_bytes() == kept + b'{"event":"issue","sample_id":99}\n'


def test_a_writer_may_be_read_in_the_middle_of_a_line(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        with path.open("ab") as file:
            file.write(b'{"event":"iss')
        assert read_ledger(path) == counts(issued=1, in_flight=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\0\0\0\n", "is no ledger record"),
        (b'{"event":"end","sample_id":1,"outcome":"lost"}\n', "is no ledger record"),
        (b'{"event":"end","sample_id":5,"outcome":"stale"}\n', "sample 5 was never issued"),
        (b'{"event":"issue","sample_id":1}\n', "sample 1 was issued before"),
    ],
)
def test_damage_is_named_with_its_place(path: pathlib.Path, line: bytes, message: str) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(line + b'{"event":"issue","sample_id":2}\n')
    with pytest.raises(ValueError, match=f"is damaged at byte {size}: .*{message}"):
        Ledger(path)
    with pytest.raises(ValueError, match="is damaged"):
        read_ledger(path)


@pytest.mark.parametrize("content", [b"step,reward\n", b"notes", b'{"event":"issue","sample_id":1}\n'])
def test_other_files_are_left_alone(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no sample ledger"):
        Ledger(path)
    assert path.read_bytes() == content


def test_another_format_version_is_refused(path: pathlib.Path) -> None:
    path.write_bytes(b'{"event":"ledger","ledger_id":"a","version":2}\n')
    with pytest.raises(ValueError, match="version 2"):
        Ledger(path)


def test_check_notices_a_file_that_says_something_else(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        with path.open("ab") as file:
            file.write(b'{"event":"end","sample_id":1,"outcome":"stale"}\n')
        with pytest.raises(RuntimeError, match="does not add up"):
            ledger.check()


def test_resume_goes_back_to_the_mark_and_keeps_the_history(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        for sample_id in (1, 2, 3):
            ledger.issue(sample_id)
        ledger.end(1, "trained")
        mark = ledger.mark()
        ledger.end(2, "trained")
        ledger.issue(4)
        ledger.end(4, "stale")
    history = path.read_bytes()
    saved = msgspec.json.encode(msgspec.to_builtins(mark))
    with Ledger.resume(path, msgspec.json.decode(saved, type=LedgerMark)) as ledger:
        assert ledger.check() == counts(issued=3, trained=1, in_flight=2)
        assert ledger.in_flight() == [2, 3]
        with pytest.raises(RuntimeError, match="has ended"):
            ledger.issue(1)
        ledger.issue(4)
        ledger.end(2, "filtered")
        assert ledger.check() == counts(issued=4, trained=1, filtered=1, in_flight=2)
    assert path.read_bytes().startswith(history)
    with Ledger(path) as ledger:
        assert ledger.check() == counts(issued=4, trained=1, filtered=1, in_flight=2)


def test_resume_at_the_end_changes_nothing_and_none_goes_back_to_the_beginning(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        mark = ledger.mark()
    content = path.read_bytes()
    Ledger.resume(path, mark).close()
    assert path.read_bytes() == content
    with Ledger.resume(path, None) as ledger:
        assert ledger.check() == counts()
        ledger.issue(1)
    with Ledger.resume(path, mark) as ledger:
        assert ledger.check() == counts(issued=1, in_flight=1)


def test_a_mark_of_a_branch_that_was_given_up_still_names_its_state(path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        early = ledger.mark()
        ledger.end(1, "trained")
        ledger.issue(2)
        late = ledger.mark()
    with Ledger.resume(path, early) as ledger:
        ledger.end(1, "failed")
        ledger.issue(3)
        other = ledger.mark()
    with Ledger.resume(path, late) as ledger:
        assert ledger.check() == counts(issued=2, trained=1, in_flight=1)
        assert ledger.in_flight() == [2]
    with Ledger.resume(path, other) as ledger:
        assert ledger.check() == counts(issued=2, failed=1, in_flight=1)
        assert ledger.in_flight() == [3]


def test_marks_that_do_not_belong_are_refused(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Ledger(path) as ledger:
        ledger.issue(1)
        mark = ledger.mark()
    with Ledger(tmp_path / "other") as other:
        foreign = other.mark()
    content = path.read_bytes()
    with pytest.raises(ValueError, match="the mark belongs to ledger"):
        Ledger.resume(path, foreign)
    for offset in (-1, 0, 5, mark.offset - 1, mark.offset + 1, 10_000):
        with pytest.raises(ValueError, match=f"the mark's offset, {offset}, is not the end of a record"):
            Ledger.resume(path, LedgerMark(ledger_id=mark.ledger_id, offset=offset))
    assert path.read_bytes() == content
    Ledger.resume(path, mark).close()


def test_any_history_with_resumes_equals_its_model(path: pathlib.Path) -> None:
    """Against a dictionary that is copied at each mark and put back at each resume."""
    chance = random.Random(7)
    life: dict[int, str] = {}
    marks: list[tuple[LedgerMark, dict[int, str]]] = []
    ledger = Ledger(path)
    for _ in range(600):
        in_flight = [sample_id for sample_id, what in life.items() if what == "in_flight"]
        match chance.choices(["issue", "end", "mark", "resume", "reopen"], [10, 8, 2, 1, 1])[0]:
            case "issue":
                free = [sample_id for sample_id in range(300) if sample_id not in life]
                sample_id = chance.choice(free[:5])
                ledger.issue(sample_id)
                life[sample_id] = "in_flight"
            case "end" if in_flight:
                sample_id, outcome = chance.choice(in_flight), chance.choice(OUTCOMES)
                ledger.end(sample_id, outcome)
                life[sample_id] = outcome
            case "mark":
                marks.append((ledger.mark(), dict(life)))
            case "resume" if marks:
                mark, remembered = chance.choice(marks)
                ledger.close()
                ledger = Ledger.resume(path, mark)
                life = dict(remembered)
            case "reopen":
                ledger.close()
                ledger = Ledger(path)
        what = list(life.values())
        expected = counts(issued=len(life), **{kind: what.count(kind) for kind in [*OUTCOMES, "in_flight"]})
        assert ledger.counts() == expected
    assert ledger.check() == expected
    ledger.close()


def test_threads_may_share_a_ledger(path: pathlib.Path) -> None:
    def live(ids: range) -> None:
        for sample_id in ids:
            ledger.issue(sample_id)
            if sample_id % 5:
                ledger.end(sample_id, OUTCOMES[sample_id % 4])

    with Ledger(path) as ledger:
        threads = [threading.Thread(target=live, args=(range(start, 2000, 4),)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert ledger.check() == counts(issued=2000, trained=400, filtered=400, stale=400, failed=400, in_flight=400)


WRITER = """
import itertools, os, sys
from drivetrain_buffer import Ledger
ledger = Ledger(sys.argv[1])
first = ledger.counts().issued
for sample_id in itertools.count(first):
    ledger.issue(sample_id)
    os.write(1, b"i")
    if sample_id % 3:
        ledger.end(sample_id, "trained", reason="x" * (sample_id % 50))
        os.write(1, b"e")
"""


def kill_mid_writing(path: pathlib.Path, after_bytes: int) -> bytes:
    """Run the writer, kill it once it has told of so many calls, and return all it told of."""
    told = b""
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(told) < after_bytes:
                assert selector.select(deadline - time.monotonic()), f"the writer told of {len(told)} calls in 60 s"
                told += os.read(process.stdout.fileno(), 1 << 16)
                assert told or process.poll() is None
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read()
        process.wait(timeout=60)
    return told


def test_sigkill_loses_nothing_that_was_returned_from(path: pathlib.Path) -> None:
    issued = ended = 0
    chance = random.Random(1)
    for _ in range(6):
        told = kill_mid_writing(path, chance.randint(1, 5000))
        issued += told.count(b"i")
        ended += told.count(b"e")
        with Ledger(path) as ledger:
            found = ledger.check()
        # The call that the kill caught may be in the file although it never returned.
        unreported = (found.issued - issued) + (found.trained - ended)
        assert unreported in (0, 1)
        assert found.issued >= issued
        assert found.trained >= ended
        assert found.in_flight == found.issued - found.trained
        issued, ended = found.issued, found.trained


def test_killed_and_resumed_at_random_every_prompt_is_trained_exactly_once(path: pathlib.Path) -> None:
    """A run of 100 prompts, whose checkpoint holds the prompts it trained on and the ledger's mark."""
    chance = random.Random(3)
    checkpoint: tuple[list[int], LedgerMark | None] = ([], None)
    for life in range(6):
        trained = list(checkpoint[0])
        with Ledger.resume(path, checkpoint[1]) as ledger:
            again = ledger.in_flight()
            fresh = [prompt for prompt in range(100) if prompt not in trained and prompt not in again]
            in_flight = list(again)
            dies_after = chance.randint(20, 120) if life < 5 else 10_000
            for _ in range(dies_after):
                if fresh and len(in_flight) < 8:
                    ledger.issue(fresh[0])
                    in_flight.append(fresh.pop(0))
                elif in_flight:
                    prompt = in_flight.pop(chance.randrange(len(in_flight)))
                    ledger.end(prompt, "trained")
                    trained.append(prompt)
                    if len(trained) % 10 == 0:
                        checkpoint = (list(trained), ledger.mark())
    assert sorted(trained) == list(range(100))
    assert read_ledger(path) == counts(issued=100, trained=100)
