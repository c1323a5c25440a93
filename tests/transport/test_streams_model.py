"""The two sides' books without a network: whatever is cut, killed or handed back, nothing is lost or handled twice."""

import random
from collections import deque
from typing import Any

import pytest
from drivetrain_transport import FrameError, StreamTaken
from drivetrain_transport._stats import Counters
from drivetrain_transport._streams.inbox import Entry, Inbox
from drivetrain_transport._streams.numbers import Numbers, check, each, to_ranges
from drivetrain_transport._streams.window import Lane, Window
from drivetrain_transport._streams.wire import SPAN, Item, Join, Push, Settle
from hypothesis import given, settings
from hypothesis import strategies as st

CREDIT = 4


class Host:
    """One receiver: it lives many times, and has a connection to the sender or has not."""

    def __init__(self, index: int) -> None:
        self.name = f"host {index}"
        self.handled: list[list[int]] = []
        self.peer: Any = None
        self.lane: Lane | None = None
        self.start()

    def start(self) -> None:
        self.inbox = Inbox(Counters(), name=self.name, credit=CREDIT, credit_bytes=100)
        self.handled.append([])
        self.hands: deque[Entry] = deque()
        self.there: deque[Push] = deque()
        self.back: deque[Settle] = deque()


class World:
    """A sender, two receivers, and messages between them that are under way until they are moved."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.window = Window(self.counters)
        self.hosts = [Host(0), Host(1)]
        self.sent = 0

    def join(self, host: Host) -> None:
        if host.lane is not None:
            return
        host.peer = object()
        join = Join(stream="s", life=b"1", floor=self.window.settled.below)
        offer = host.inbox.join(join, host.peer, lambda: None, None)
        host.lane = Lane(host.name, offer.credit, offer.credit_bytes, lambda: None)
        self.window.offer(host.lane, offer)

    def cut(self, host: Host) -> None:
        if host.lane is not None:
            self.window.lose(host.lane)
            host.inbox.leave(host.peer)
            host.lane = None
            host.there.clear()
            host.back.clear()

    def kill(self, host: Host) -> None:
        self.cut(host)
        host.start()

    def send(self, host: Host) -> None:
        if self.window.place(self.sent, b"x" * (1 + self.sent % 40), [], 1 + self.sent % 40):
            self.sent += 1

    def transmit(self, host: Host) -> None:
        if host.lane is not None and (batch := self.window.take(host.lane, 2, 60)):
            items = [Item(message.number, message.redelivered, message.head) for message in batch]
            host.there.append(Push(stream="s", life=b"1", floor=self.window.settled.below, items=items))

    def arrive(self, host: Host) -> None:
        if host.there:
            host.inbox.take(host.there.popleft(), host.peer)

    def receive(self, host: Host) -> None:
        if (entry := host.inbox.pop()) is not None:
            host.hands.append(entry)

    def ack(self, host: Host) -> None:
        if host.hands:
            entry = host.hands.popleft()
            host.handled[-1].append(entry.number)
            host.inbox.settle(entry)

    def reject(self, host: Host) -> None:
        if host.hands:
            host.inbox.reject(host.hands.pop())

    def report(self, host: Host) -> None:
        if host.lane is not None and (settle := host.inbox.owed(host.inbox.sources["s"])) is not None:
            host.back.append(settle)

    def hear(self, host: Host) -> None:
        if host.back and host.lane is not None:
            self.window.settle(host.lane, host.back.popleft())

    def check(self) -> None:
        for host in self.hosts:
            assert len(host.handled[-1]) == len(set(host.handled[-1]))  # once per life of a receiver
            if host.lane is not None:
                assert len(host.lane.window) <= CREDIT * 2
                assert host.lane.bytes == sum(host.lane.window.values())


USUAL = ["send", "send", "send", "transmit", "transmit", "arrive", "receive", "ack", "report", "hear", "join"]


@pytest.mark.parametrize("unusual", [[], ["cut"], ["cut", "reject"], ["cut", "kill", "reject"]])
@pytest.mark.parametrize("seed", range(40))
def test_every_message_is_handled_and_none_twice_by_one_receiver(unusual: list[str], seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    for _ in range(1500):
        step = chance.choice(USUAL * 2 + unusual)
        getattr(world, step)(chance.choice(world.hosts))
        world.check()
    assert world.sent > 5
    for turn in range(400):  # now all is well, for as long as it takes
        for host in world.hosts:
            for step in ("send", "join", "transmit", "arrive", "receive", "ack", "report", "hear")[turn > 50 :]:
                getattr(world, step)(host)
    world.check()
    handled = [number for host in world.hosts for life in host.handled for number in life]
    assert set(handled) == set(range(world.sent))
    if "cut" not in unusual:
        assert len(handled) == world.sent
    assert not world.window.unsettled
    assert world.window.settled.below == world.sent
    assert world.counters.queued == 0
    for host in world.hosts:
        assert host.lane is not None
        known = host.inbox.sources["s"].handled
        assert len(known) - known.below < 3 * CREDIT  # the gaps are other receivers' messages: forgotten
        assert (host.lane.window, host.lane.bytes, host.inbox.held, host.inbox.held_bytes) == ({}, 0, 0, 0)


def test_an_acknowledgement_that_overtakes_the_offer_leaves_no_credit_behind() -> None:
    window, inbox = Window(Counters()), Inbox(Counters(), name="r", credit=10, credit_bytes=1000)
    join = Join(stream="s", life=b"1", floor=0)
    first = Lane("r", 10, 1000, lambda: None)
    window.offer(first, inbox.join(join, PEERS[0], lambda: None, None))
    assert window.place(0, b"", [], 5)
    inbox.take(push(0), PEERS[0])
    entry = inbox.pop()
    assert entry is not None
    window.lose(first)
    offer = inbox.join(join, PEERS[1], lambda: None, None)  # it holds 0
    inbox.settle(entry)
    again = Lane("r", 10, 1000, lambda: None)
    settle = inbox.owed(inbox.sources["s"])
    assert settle is not None
    window.settle(again, settle)
    window.offer(again, offer)
    assert (again.window, again.bytes, window.unsettled) == ({}, 0, {})


def test_a_message_that_comes_once_more_is_dropped_and_acknowledged_again() -> None:
    counters = Counters()
    inbox = Inbox(counters, name="r", credit=10, credit_bytes=1000)
    inbox.join(Join(stream="s", life=b"1", floor=0), PEERS[0], lambda: None, None)
    source = inbox.sources["s"]
    for _ in range(2):
        inbox.take(push(1), PEERS[0])
    assert counters.duplicates == 1
    entry = inbox.pop()
    assert entry is not None
    assert inbox.pop() is None
    for _ in range(2):
        inbox.settle(entry)
    assert inbox.owed(source) == Settle(stream="s", handled=((1, 2),))
    inbox.take(push(1), PEERS[0])
    assert inbox.pop() is None
    assert inbox.owed(source) == Settle(stream="s", handled=((1, 2),))
    assert (counters.duplicates, counters.messages_received, inbox.held) == (2, 3, 0)
    inbox.take(push(2), PEERS[0])
    inbox.take(push(3, floor=3), PEERS[0])  # 2 was handled elsewhere meanwhile
    last = inbox.pop()
    assert last is not None
    assert last.number == 3


def test_messages_over_a_connection_that_has_not_joined_are_refused() -> None:
    inbox = Inbox(Counters(), name="r", credit=10, credit_bytes=1000)
    with pytest.raises(FrameError, match=r"messages of stream 's' over a connection where it did not join"):
        inbox.take(push(0), PEERS[0])
    inbox.join(Join(stream="s", life=b"1", floor=0), PEERS[0], lambda: None, None)
    inbox.join(Join(stream="s", life=b"2", floor=0), PEERS[1], lambda: None, None)
    with pytest.raises(StreamTaken, match=r"another sender has taken stream 's' over"):
        inbox.take(push(0), PEERS[0])
    with pytest.raises(StreamTaken):
        inbox.join(Join(stream="s", life=b"1", floor=0), PEERS[0], lambda: None, None)


def test_idle_streams_are_forgotten_at_last() -> None:
    inbox = Inbox(Counters(), name="r", credit=10, credit_bytes=1000)
    for number in range(5000):
        inbox.join(Join(stream=f"s{number}", life=b"1", floor=0), PEERS[0], lambda: None, None)
        inbox.leave(PEERS[0]) if number % 100 == 0 else None
    assert len(inbox.sources) < 4300


PEERS: list[Any] = [object(), object()]


def push(number: int, floor: int = 0) -> Push:
    return Push(stream="s", life=b"1", floor=floor, items=[Item(number, False, b"12345")])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 60), max_size=80), st.integers(0, 40), st.integers(0, 70))
def test_numbers_are_the_set_that_they_stand_for(added: list[int], below: int, stop: int) -> None:
    numbers = Numbers()
    for number in added[::2]:
        numbers.add(number)
    numbers.raise_to(below)
    for number in added[1::2]:
        numbers.add(number)
    expected = set(added) | set(range(below))
    assert {number for number in range(200) if number in numbers} == expected
    assert len(numbers) == len(expected)
    assert numbers.top == max(expected, default=-1) + 1
    assert numbers.below not in expected
    assert set(each(numbers.missing(stop))) == set(range(stop)) - expected
    again = Numbers(numbers.below, numbers.ranges())
    assert repr(again) == repr(numbers)
    assert set(each(to_ranges(set(added)))) == set(added)


def test_ranges_that_would_fill_the_memory_are_refused() -> None:
    check(((0, 5), (7, 9)), ((1, 2),), limit=8)
    with pytest.raises(FrameError, match=r"ranges of 1152921504606846976 numbers, at most 8"):
        check(((0, 1 << 60),), limit=8)
    with pytest.raises(FrameError, match=r"no range of numbers begins at 5 and ends before 5"):
        check(((5, 5),), limit=8)


def test_a_message_that_is_never_acknowledged_holds_the_sender_up_at_last() -> None:
    window = Window(Counters())
    lane = Lane("r", 10, 1000, lambda: None)
    inbox = Inbox(Counters(), name="r", credit=10, credit_bytes=1000)
    window.offer(lane, inbox.join(Join(stream="s", life=b"1", floor=0), object(), lambda: None, None))  # type: ignore[arg-type]
    assert window.place(0, b"", [], 0)
    for number in range(1, SPAN):
        assert window.place(number, b"", [], 0)
        window.take(lane, 10, 10)
        window.settle(lane, Settle(stream="s", handled=((number, number + 1),)))
    assert not window.place(SPAN, b"", [], 0)
    assert window.blocker(SPAN) == (
        "number 0 is at r and is not acknowledged, and 65536 numbers may be on their way at most"
    )
    window.settle(lane, Settle(stream="s", handled=((0, 1),)))
    assert window.place(SPAN, b"", [], 0)
    assert window.settled.ranges() == ()
