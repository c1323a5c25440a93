import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from drivetrain_buffer import BufferClosed, BufferCounts, Ledger, RolloutBuffer


class Item(NamedTuple):
    version: int
    name: str


def by_version(item: Item) -> int:
    return item.version


def new_buffer(
    capacity: int = 8, *, max_staleness: int | None = None, log: list[str] | None = None
) -> RolloutBuffer[Item]:
    def on_stale(item: Item) -> None:
        if log is not None:
            log.append(item.name)

    return RolloutBuffer(capacity, policy_version=by_version, max_staleness=max_staleness, on_stale=on_stale)


def fill(buffer: RolloutBuffer[Item], items: str) -> None:
    """Add items written like `"3c 1a"`."""
    for item in items.split():
        buffer.add(Item(int(item[0]), item[1:]), timeout=0)


def names(items: list[Item]) -> str:
    return " ".join(item.name for item in items)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.001)


def in_the_background(pool: ThreadPoolExecutor, call: Callable[[], Any], condition: threading.Condition) -> Future[Any]:
    """Start a call that is going to wait on the condition, and return once it does."""
    waiters = condition._waiters  # type: ignore[attr-defined]
    before = len(waiters)
    future = pool.submit(call)
    wait_until(lambda: len(waiters) > before or future.done())
    return future


def test_the_oldest_come_first_and_equals_in_order_of_arrival() -> None:
    buffer = new_buffer()
    fill(buffer, "3e 1b 2d 1c 0a")
    assert names(buffer.take(2, learner_version=9, timeout=0)) == "a b"
    assert names(buffer.take(3, learner_version=9, timeout=0)) == "c d e"
    assert buffer.counts() == BufferCounts(added=5, taken=5, stale=0, waiting=0)


def test_stale_items_are_reported_and_dropped_in_place_of_being_taken() -> None:
    log: list[str] = []
    buffer = new_buffer(max_staleness=1, log=log)
    fill(buffer, "4d 1a 5e 2b 3c")
    assert names(buffer.take(2, learner_version=4, timeout=0)) == "c d"
    assert log == ["a", "b"]
    assert buffer.counts() == BufferCounts(added=5, taken=2, stale=2, waiting=1)


def test_staleness_at_the_limit_is_trained_on() -> None:
    log: list[str] = []
    buffer = new_buffer(max_staleness=2, log=log)
    fill(buffer, "3a")
    assert names(buffer.take(1, learner_version=5, timeout=0)) == "a"
    assert log == []


def test_without_a_limit_nothing_is_stale() -> None:
    buffer = RolloutBuffer[Item](4, policy_version=by_version, max_staleness=None)
    fill(buffer, "0a")
    assert names(buffer.take(1, learner_version=1000, timeout=0)) == "a"


def test_take_is_all_or_none_and_says_what_was_missing() -> None:
    buffer = new_buffer(max_staleness=0)
    fill(buffer, "1a 2b 2c")
    with pytest.raises(TimeoutError, match=r"take waited 0.01 s for 3 items: 2 are there that version 2 may train on"):
        buffer.take(3, learner_version=2, timeout=0.01)
    assert names(buffer.take(2, learner_version=2, timeout=0)) == "b c"


def test_a_full_buffer_refuses_or_waits_until_the_deadline() -> None:
    buffer = new_buffer(2)
    fill(buffer, "3b 1a")
    assert buffer.try_add(Item(0, "c")) is False
    with pytest.raises(TimeoutError, match=r"add waited 0.01 s for room: all 2 places are taken, .* version 1"):
        buffer.add(Item(0, "c"), timeout=0.01)
    assert names(buffer.take(2, learner_version=3, timeout=0)) == "a b"
    assert buffer.try_add(Item(0, "c")) is True
    assert len(buffer) == 1


def test_take_wakes_when_enough_is_there(pool: ThreadPoolExecutor) -> None:
    buffer = new_buffer()
    take = in_the_background(pool, lambda: buffer.take(3, learner_version=0, timeout=30), buffer._items)
    fill(buffer, "0a 0b")
    assert not take.done()
    fill(buffer, "0c")
    assert names(take.result(timeout=30)) == "a b c"


def test_add_wakes_when_there_is_room(pool: ThreadPoolExecutor) -> None:
    buffer = new_buffer(1)
    fill(buffer, "0a")
    add = in_the_background(pool, lambda: buffer.add(Item(0, "b"), timeout=30), buffer._room)
    assert names(buffer.take(1, learner_version=0, timeout=0)) == "a"
    add.result(timeout=30)
    assert names(buffer.take(1, learner_version=0, timeout=0)) == "b"


def test_dropping_stale_items_makes_room_for_who_waits(pool: ThreadPoolExecutor) -> None:
    log: list[str] = []
    buffer = new_buffer(2, max_staleness=0, log=log)
    fill(buffer, "0a 0b")
    adds = [
        in_the_background(pool, lambda name=name: buffer.add(Item(1, name), timeout=30), buffer._room)  # type: ignore[misc]
        for name in ("c", "d")
    ]
    assert sorted(names(buffer.take(2, learner_version=1, timeout=30)).split()) == ["c", "d"]
    assert log == ["a", "b"]
    for add in adds:
        add.result(timeout=30)


def test_close_ends_every_wait_and_what_is_left_can_be_drained(pool: ThreadPoolExecutor) -> None:
    buffer = new_buffer(2)
    fill(buffer, "2b 1a")
    add = in_the_background(pool, lambda: buffer.add(Item(0, "c"), timeout=30), buffer._room)
    buffer.close()
    buffer.close()
    with pytest.raises(BufferClosed, match="was not added"):
        add.result(timeout=30)
    with pytest.raises(BufferClosed):
        buffer.try_add(Item(0, "c"))
    assert names(buffer.take(1, learner_version=0, timeout=0)) == "a"
    with pytest.raises(BufferClosed, match="1 items are left, fewer than 2"):
        buffer.take(2, learner_version=0, timeout=30)
    assert names(buffer.drain()) == "b"
    assert buffer.drain() == []
    assert buffer.counts() == BufferCounts(added=2, taken=2, stale=0, waiting=0)


def test_close_wakes_a_waiting_take(pool: ThreadPoolExecutor) -> None:
    buffer = new_buffer()
    take = in_the_background(pool, lambda: buffer.take(1, learner_version=0, timeout=30), buffer._items)
    buffer.close()
    with pytest.raises(BufferClosed):
        take.result(timeout=30)


def test_drain_gives_room_and_ignores_staleness(pool: ThreadPoolExecutor) -> None:
    log: list[str] = []
    buffer = new_buffer(2, max_staleness=0, log=log)
    fill(buffer, "5b 0a")
    add = in_the_background(pool, lambda: buffer.add(Item(9, "c"), timeout=30), buffer._room)
    assert names(buffer.drain()) == "a b"
    add.result(timeout=30)
    assert names(buffer.drain()) == "c"
    assert log == []


def test_an_item_whose_report_fails_is_not_lost() -> None:
    reports: list[Item] = []

    def on_stale(item: Item) -> None:
        reports.append(item)
        if len(reports) == 1:
            raise OSError("the disk is full")

    buffer = RolloutBuffer[Item](4, policy_version=by_version, max_staleness=0, on_stale=on_stale)
    fill(buffer, "0a 1b")
    with pytest.raises(OSError, match="the disk is full"):
        buffer.take(1, learner_version=1, timeout=0)
    assert len(buffer) == 2
    assert names(buffer.take(1, learner_version=1, timeout=0)) == "b"
    assert [item.name for item in reports] == ["a", "a"]


def test_with_a_ledger_every_sample_is_accounted_for(tmp_path: Any) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        buffer = RolloutBuffer[tuple[int, int]](
            16,
            policy_version=lambda item: item[1],
            max_staleness=1,
            on_stale=lambda item: ledger.end(item[0], "stale", reason=f"sampled with version {item[1]}"),
        )
        for sample_id in range(12):
            ledger.issue(sample_id)
            buffer.add((sample_id, sample_id // 3), timeout=0)
        for sample_id, _ in buffer.take(4, learner_version=2, timeout=0):
            ledger.end(sample_id, "trained")
        buffer.close()
        for sample_id, _ in buffer.drain():
            ledger.end(sample_id, "failed", reason="the run ended")
        found = ledger.check()
        assert (found.issued, found.stale, found.trained, found.failed, found.in_flight) == (12, 3, 4, 5, 0)


class Fields(NamedTuple):
    version: int
    a: int
    b: tuple[int, ...]


def test_writers_and_readers_do_not_tear_repeat_or_lose_items(pool: ThreadPoolExecutor) -> None:
    """100,000 items through 8 places: 2 writers, 2 readers."""
    buffer = RolloutBuffer[Fields](8, policy_version=lambda item: item.version, max_staleness=None)
    total = 100_000

    def write(ids: range) -> None:
        for i in ids:
            buffer.add(Fields(i, i, (i, i, i)), timeout=60)

    def read() -> list[Fields]:
        kept: list[Fields] = []
        while True:
            try:
                kept += buffer.take(2, learner_version=0, timeout=60)
            except BufferClosed:
                return kept

    readers = [pool.submit(read) for _ in range(2)]
    writers = [pool.submit(write, range(start, total, 2)) for start in range(2)]
    for writer in writers:
        writer.result(timeout=120)
    buffer.close()
    items = [item for reader in readers for item in reader.result(timeout=120)] + buffer.drain()
    assert all(item.version == item.a == item.b[0] == item.b[1] == item.b[2] for item in items)
    assert sorted(item.a for item in items) == list(range(total))
    assert buffer.counts() == BufferCounts(added=total, taken=total, stale=0, waiting=0)


def test_slow_prompts_are_trained_at_their_share() -> None:
    """Half of the prompts take one step to sample and half take four; a learner takes two a step, 200 steps long."""
    log: list[str] = []
    buffer = new_buffer(64, max_staleness=4, log=log)
    underway: list[tuple[int, Item]] = []
    trained: list[Item] = []
    for step in range(200):
        underway += [(step + 1, Item(step, "fast")), (step + 4, Item(step, "slow"))]
        for item in [item for done, item in underway if done <= step]:
            buffer.add(item, timeout=0)
        underway = [(done, item) for done, item in underway if done > step]
        if len(buffer) >= 2:
            trained += buffer.take(2, learner_version=step, timeout=0)
    slow = sum(item.name == "slow" for item in trained) / len(trained)
    assert slow == pytest.approx(0.5, abs=0.02)
    assert len(trained) > 380
    assert log == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0, "max_staleness": None}, "capacity=0"),
        ({"capacity": 1, "max_staleness": -1}, "max_staleness=-1"),
        ({"capacity": 1, "max_staleness": 1}, "pass on_stale"),
    ],
)
def test_settings_that_lose_items_or_hold_none_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutBuffer(**arguments, policy_version=by_version)


def test_waits_that_cannot_end_are_refused() -> None:
    buffer = new_buffer(2)
    with pytest.raises(ValueError, match="n=3 must lie between 1 and the capacity, 2"):
        buffer.take(3, learner_version=0, timeout=1)
    with pytest.raises(ValueError, match="n=0"):
        buffer.take(0, learner_version=0, timeout=1)
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout="):
            buffer.take(1, learner_version=0, timeout=timeout)
        with pytest.raises(ValueError, match="timeout="):
            buffer.add(Item(0, "a"), timeout=timeout)


def test_take_fresh_leaves_the_stale_out_and_waits_for_nothing() -> None:
    stale: list[tuple[int, str]] = []
    buffer = RolloutBuffer[tuple[int, str]](
        4, policy_version=lambda item: item[0], max_staleness=1, on_stale=stale.append
    )
    assert buffer.take_fresh(learner_version=3) == []
    for item in [(3, "c"), (1, "a"), (2, "b")]:
        buffer.add(item, timeout=1.0)
    assert buffer.take_fresh(learner_version=3) == [(2, "b"), (3, "c")]
    assert stale == [(1, "a")]
    counts = buffer.counts()
    assert (counts.added, counts.taken, counts.stale, counts.waiting) == (3, 2, 1, 0)
