"""The last value for late joiners: before, with and after; slow, restarted, of another type; bounded waits."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from drivetrain_transport import FrameError, Publisher, RemoteError, Subscriber
from waiting import wait_until


class Ready(msgspec.Struct):
    step: int


class Weights(msgspec.Struct):
    step: int
    layer: torch.Tensor


PUBLISHER = """
import sys
import msgspec
from drivetrain_transport import Publisher

class Ready(msgspec.Struct):
    step: int

with Publisher.bind(sys.argv[1]) as publisher:
    for step in sys.argv[2:]:
        publisher.publish(Ready(int(step)))
    print("published", flush=True)
    sys.stdin.read()
"""


@contextmanager
def publishing(address: str, *steps: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-W", "error", "-c", PUBLISHER, address, *map(str, steps)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "published\n"
            yield process
        finally:
            process.kill()


@contextmanager
def pair(binds: str) -> Iterator[tuple[Publisher, Subscriber[Ready]]]:
    if binds == "publisher":
        with Publisher.bind() as publisher, Subscriber.connect(publisher.address, type=Ready) as subscriber:
            yield publisher, subscriber
    else:
        with Subscriber.bind(type=Ready) as subscriber, Publisher.connect(subscriber.address) as publisher:
            yield publisher, subscriber


@pytest.mark.parametrize("binds", ["publisher", "subscriber"])
def test_a_late_subscriber_gets_the_last_value_and_then_each_newer_one(binds: str) -> None:
    with pair(binds) as (publisher, subscriber):
        assert [publisher.publish(Ready(step)) for step in (10, 20, 30)] == [1, 2, 3]
        first = subscriber.next(timeout=20)
        assert (first.value, first.version, first.skipped, first.restarted) == (Ready(30), 3, 0, False)
        with pytest.raises(TimeoutError, match=r"published nothing of topic '' after version 3 in 0.2 s"):
            subscriber.next(timeout=0.2)
        assert subscriber.latest(timeout=20).version == 3
        publisher.publish(Ready(40))
        assert subscriber.next(timeout=20).value == Ready(40)
        publisher.publish(Ready(50))
        assert subscriber.next(after=3, timeout=20).skipped == 1
        assert subscriber.next(after=4, timeout=20).value == Ready(50)
        assert subscriber.skipped == 0


def test_a_waiting_subscriber_is_answered_when_there_is_something() -> None:
    with pair("publisher") as (publisher, subscriber):
        timer = threading.Timer(0.3, publisher.publish, [Ready(1)])
        timer.start()
        start = time.monotonic()
        assert subscriber.latest(timeout=20).value == Ready(1)
        assert 0.1 < time.monotonic() - start < 5
        timer.join()


def test_a_slow_subscriber_gets_the_newest_and_is_told_what_it_skipped() -> None:
    with pair("publisher") as (publisher, slow), Subscriber.connect(publisher.address, type=Ready) as quick:
        seen = []
        for step in range(100):
            publisher.publish(Ready(step))
            if step % 40 == 0:
                seen.append((slow.next(timeout=20).value.step, slow.skipped))
            assert quick.next(timeout=20).value.step == step
        assert seen == [(0, 0), (40, 39), (80, 78)]
        last = slow.next(timeout=20)
        assert (last.value.step, last.skipped, slow.skipped, quick.skipped) == (99, 18, 96, 0)
        assert publisher.stats.messages_sent == 104


def test_topics_are_apart() -> None:
    with pair("publisher") as (publisher, subscriber):
        publisher.publish(Ready(1), topic="one")
        publisher.publish(Ready(2), topic="two")
        publisher.publish(Ready(3), topic="two")
        assert subscriber.next(timeout=20, topic="one").version == 1
        assert subscriber.next(timeout=20, topic="two").version == 2
        with pytest.raises(TimeoutError, match=r"topic 'three' after version 0"):
            subscriber.next(timeout=0.2, topic="three")


def test_a_restarted_publisher_is_noticed_and_its_value_comes_whatever_its_version(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/p"
    with Subscriber.connect(address, type=Ready) as subscriber:
        with pytest.raises(TimeoutError, match=rf"no publisher is there, at {address}"):
            subscriber.latest(timeout=0.2)
        with publishing(address, 1, 2, 3) as process:
            assert subscriber.next(timeout=20).version == 3
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(TimeoutError):
                subscriber.next(timeout=0.3)
        with publishing(address, 7):
            again = subscriber.next(timeout=20)
            assert (again.value, again.version, again.skipped, again.restarted) == (Ready(7), 1, 0, True)


def test_a_value_is_a_snapshot_and_each_subscriber_has_its_own() -> None:
    with Publisher.bind() as publisher:
        layer = torch.zeros(1 << 18)
        publisher.publish(Weights(0, layer))
        layer.fill_(5)
        for _ in range(2):
            with Subscriber.connect(publisher.address, type=Weights) as subscriber:
                got = subscriber.latest(timeout=20).value
                assert (got.layer.min(), got.layer.max()) == (0, 0)
                got.layer.fill_(9)


def test_a_value_of_another_type_is_an_error_once() -> None:
    with pair("publisher") as (publisher, subscriber):
        publisher.publish("no Ready")
        with pytest.raises(FrameError, match=r"Expected `object`, got `str`"):
            subscriber.next(timeout=20)
        assert subscriber.stats.refused == 1
        publisher.publish(Ready(1))
        assert subscriber.next(timeout=20).value == Ready(1)


def test_waiting_until_a_value_is_taken() -> None:
    with pair("publisher") as (publisher, subscriber):
        publisher.publish(Ready(1))
        with pytest.raises(TimeoutError, match=r"0 of 1 subscribers took the newest value of topic ''"):
            publisher.wait_taken(1, timeout=0.1)
        thread = threading.Thread(target=subscriber.latest, kwargs={"timeout": 20})
        thread.start()
        publisher.wait_taken(1, timeout=20)
        publisher.close()  # what was begun arrives
        thread.join(20)
        assert subscriber.stats.messages_received == 1


def connect_again(subscriber: Subscriber[Ready]) -> None:
    """Break the connection as a network would, and wait for the next one."""
    links = subscriber._engine.links
    (core,), before = links._cores.values(), links.peers
    core.post(core._leave)
    wait_until(lambda: links.peers not in ((), before), "another connection")


def test_subscribers_are_counted_that_have_the_value_and_not_their_connections() -> None:
    with pair("publisher") as (publisher, one), Subscriber.connect(publisher.address, type=str) as wrong:
        publisher.publish(Ready(1))
        for _ in range(3):
            assert one.latest(timeout=20).value == Ready(1)
            connect_again(one)
        assert one.latest(timeout=20).value == Ready(1)
        with pytest.raises(FrameError):
            wrong.latest(timeout=20)
        with pytest.raises(TimeoutError, match=r"1 of 2 subscribers took the newest value of topic ''"):
            publisher.wait_taken(2, timeout=0.3)
        with Subscriber.connect(publisher.address, type=Ready) as other:
            assert other.latest(timeout=20).value == Ready(1)
        publisher.wait_taken(2, timeout=20)  # also those that have left
        assert all(isinstance(taker, bytes) for taker in publisher._engine.topics[""].takers)  # nobody's connection
        publisher.publish(Ready(2))
        with pytest.raises(TimeoutError, match=r"0 of 1 subscribers"):
            publisher.wait_taken(1, timeout=0)


def test_a_value_that_was_lost_on_its_way_is_not_taken() -> None:
    script = """
import os, sys
import msgspec
from drivetrain_transport import Subscriber
from drivetrain_transport._broadcasts import subscriber
subscriber.from_frames = lambda *_: os._exit(3)  # it dies with the value before the application has it
Subscriber.connect(sys.argv[1], type=int).latest(timeout=20)
"""
    with Publisher.bind() as publisher:
        publisher.publish(1)
        done = subprocess.run([sys.executable, "-c", script, publisher.address], timeout=60)
        assert (done.returncode, publisher.stats.messages_sent) == (3, 1)
        with pytest.raises(TimeoutError, match=r"0 of 1 subscribers took"):
            publisher.wait_taken(1, timeout=0.1)


def test_a_closed_publisher_says_so_and_ends_the_waits_of_other_threads() -> None:
    publisher = Publisher.bind()
    publisher.publish(Ready(1))
    errors: list[str] = []

    def wait() -> None:
        try:
            publisher.wait_taken(1, timeout=60)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: bool(publisher._engine.gate._condition._waiters), "the wait")  # type: ignore[attr-defined]
    publisher.close()
    thread.join(5)
    assert errors == [f"the publisher at {publisher.address} is closed"]
    for use in (lambda: publisher.publish(Ready(2)), lambda: publisher.wait_taken(0, timeout=1)):
        with pytest.raises(RuntimeError, match=r"the publisher at .* is closed"):
            use()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_wait_without_an_end_is_refused(seconds: float) -> None:
    with pair("publisher") as (publisher, subscriber):
        for use in (
            lambda: publisher.wait_taken(1, timeout=seconds),
            lambda: subscriber.next(timeout=seconds),
            lambda: asyncio.run(subscriber.next_async(timeout=seconds)),
            lambda: subscriber.latest(timeout=seconds),
        ):
            with pytest.raises(ValueError, match=rf"timeout is {seconds}: every wait has an end"):
                use()


def test_asyncio_and_closing_while_somebody_waits() -> None:
    async def main() -> None:
        with pair("publisher") as (publisher, subscriber):
            waiting = asyncio.create_task(subscriber.next_async(timeout=20))
            await asyncio.sleep(0.05)
            publisher.publish(Ready(1))
            assert (await waiting).value == Ready(1)
            assert (await subscriber.latest_async(timeout=20)).version == 1
            waiting = asyncio.create_task(subscriber.next_async(timeout=20))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(subscriber.close)
            with pytest.raises(RuntimeError, match=r"the subscriber is closed"):
                await waiting

    asyncio.run(main())


def test_two_subscribers_that_meet_say_so() -> None:
    with Subscriber.bind(type=Ready) as one, Subscriber.connect(one.address, type=Ready) as other:
        with pytest.raises(RemoteError, match=r"this is a subscriber, as you are"):
            other.latest(timeout=20)
