"""Work streams: credit, acknowledgement, redelivery, restarts, refusals, bounded waits."""

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy
import pytest
import torch
from drivetrain_transport import (
    Endpoint,
    FrameError,
    Journal,
    PeerRefused,
    Protocol,
    StreamTaken,
    WorkReceiver,
    WorkSender,
    make_keys,
)
from waiting import wait_until


class Sample(msgspec.Struct):
    number: int
    data: bytes = b""


class Block(msgspec.Struct):
    number: int
    weights: torch.Tensor
    mask: numpy.ndarray


RECEIVER = """
import sys
import msgspec
from drivetrain_transport import WorkReceiver

class Sample(msgspec.Struct):
    number: int
    data: bytes = b""

with WorkReceiver.bind(sys.argv[1], type=Sample, credit=int(sys.argv[2])) as receiver:
    print("listening", flush=True)
    for index in range(int(sys.argv[3])):
        delivery = receiver.receive(timeout=30)
        delivery.ack()
        print(delivery.number, delivery.redelivered, flush=True)
    receiver.receive(timeout=30)
    print("holds one", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    running = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def line(running: "subprocess.Popen[str]") -> str:
    assert running.stdout is not None
    text = running.stdout.readline().strip()
    assert text, "the process ended"
    return text


def numbers(receiver: WorkReceiver[Sample], count: int) -> list[int]:
    """The next messages, acknowledged."""
    got = []
    for _ in range(count):
        with receiver.receive(timeout=20) as delivery:
            assert delivery.value.number == delivery.number
            got.append(delivery.number)
    return got


@pytest.mark.parametrize("binds", ["sender", "receiver"])
def test_messages_arrive_in_order_and_are_acknowledged(binds: str) -> None:
    with pair(binds, credit=500) as (sender, receiver):
        assert [sender.send(Sample(number), timeout=20) for number in range(500)] == list(range(500))
        assert numbers(receiver, 500) == list(range(500))
        sender.flush(timeout=20)
        assert sender.unacknowledged == 0
        assert (sender.stats.messages_sent, receiver.stats.messages_received) == (500, 500)
        assert sender.stats.bytes_sent == receiver.stats.bytes_received > 500
        assert (sender.stats.redelivered, receiver.stats.duplicates) == (0, 0)


@contextmanager
def pair(binds: str, credit: int = 64) -> Iterator[tuple[WorkSender, WorkReceiver[Sample]]]:
    if binds == "sender":
        with WorkSender.bind(stream="a") as sender:
            with WorkReceiver.connect(sender.address, type=Sample, credit=credit) as receiver:
                yield sender, receiver
    else:
        with WorkReceiver.bind(type=Sample, credit=credit) as receiver:
            with WorkSender.connect(receiver.address, stream="a") as sender:
                yield sender, receiver


def test_without_credit_send_waits_until_its_deadline_and_says_who_holds_what() -> None:
    with pair("receiver", credit=3) as (sender, receiver):
        for number in range(3):
            sender.send(Sample(number), timeout=20)
        start = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"no receiver took a Sample of stream 'a' within 0.3 s: .* holds 3 of 3"
        ):
            sender.send(Sample(3), timeout=0.3)
        assert 0.3 <= time.monotonic() - start < 5
        first = receiver.receive(timeout=20)
        with pytest.raises(TimeoutError):  # received is not handled
            sender.send(Sample(3), timeout=0.2)
        first.ack()
        assert sender.send(Sample(3), timeout=20) == 3  # the one that failed has used no number
        assert sender.stats.queued_high_water == receiver.stats.queued_high_water == 3
        assert sender.stats.waits >= 2
        assert sender.stats.wait_seconds >= 0.5
        assert numbers(receiver, 3) == [1, 2, 3]


def test_credit_in_bytes_bounds_memory_and_lets_a_larger_message_pass_alone() -> None:
    with WorkReceiver.bind(type=Sample, credit_bytes=10_000) as receiver:
        with WorkSender.connect(receiver.address) as sender:
            sender.send(Sample(0, bytes(6_000)), timeout=20)
            with pytest.raises(TimeoutError, match=r"1 of 1024 messages, 60\d\d of 10000 bytes"):
                sender.send(Sample(1, bytes(6_000)), timeout=0.2)
            sender.send(Sample(1, bytes(3_000)), timeout=20)
            assert numbers(receiver, 2) == [0, 1]
            sender.send(Sample(2, bytes(1_000_000)), timeout=20)
            with pytest.raises(TimeoutError):
                sender.send(Sample(3), timeout=0.2)
            assert numbers(receiver, 1) == [2]
            assert 1_000_000 < receiver.held_bytes_high_water < 1_001_000


def test_a_sender_without_receivers_says_that_nobody_is_there(tmp_path: Path) -> None:
    with WorkSender.connect(f"ipc://{tmp_path}/nobody", stream="a") as sender:
        with pytest.raises(TimeoutError, match=rf"no receiver is there, at ipc://{tmp_path}/nobody"):
            sender.send(Sample(0), timeout=0.2)
        with pytest.raises(TimeoutError, match=r"no receiver took a question \(1 asked\)"):
            sender.resume(timeout=0.1)
    with WorkReceiver.connect(f"ipc://{tmp_path}/nobody", type=Sample) as receiver:
        with pytest.raises(TimeoutError, match=r"no Sample arrived within 0.2 s: no sender is there"):
            receiver.receive(timeout=0.2)


def test_tensors_are_snapshots_and_arrive_as_the_receivers_own() -> None:
    with WorkReceiver.bind(type=Block) as receiver, WorkSender.connect(receiver.address) as sender:
        weights, mask = torch.zeros(300_000), numpy.zeros(5_000, dtype=bool)
        for number in range(20):
            weights.fill_(number)
            mask[:] = number % 2
            sender.send(Block(number, weights, mask), timeout=20)
        for number in range(20):
            with receiver.receive(timeout=20) as delivery:
                block = delivery.value
                assert (block.number, block.weights.min(), block.weights.max()) == (number, number, number)
                assert block.mask.all() == block.mask.any() == number % 2
                block.weights.add_(1)
        sender.flush(timeout=20)


def test_two_receivers_share_the_work_and_the_one_that_closes_leaves_its_share_to_the_other() -> None:
    with WorkReceiver.bind(type=Sample, credit=50) as first, WorkReceiver.bind(type=Sample, credit=50) as second:
        with WorkSender.connect([first.address, second.address], stream="a") as sender:
            sender.resume(timeout=20, receivers=2)
            for number in range(100):
                sender.send(Sample(number), timeout=20)
            wait_until(lambda: first.stats.queued == second.stats.queued == 50, "half for each")
            handled = numbers(first, 10)
            assert first.close() == 40
            rest = []
            for _ in range(90):
                with second.receive(timeout=20) as delivery:
                    rest.append((delivery.number, delivery.redelivered))
            sender.flush(timeout=20)
        assert sorted(handled + [number for number, _ in rest]) == list(range(100))
        assert sum(again for _, again in rest) == 40 == sender.stats.redelivered
        again = [number for number, redelivered in rest if redelivered]
        assert again == sorted(again)


@pytest.mark.parametrize("other", [True, False])
def test_what_a_killed_receiver_had_not_acknowledged_comes_again(tmp_path: Path, other: bool) -> None:
    """To another receiver that is there, or to the killed one when it returns."""
    address = f"ipc://{tmp_path}/killed"
    addresses = [address, f"ipc://{tmp_path}/other"]
    with process(RECEIVER, address, 8, 3) as victim, WorkSender.connect(addresses, stream="a") as sender:
        assert line(victim) == "listening"
        for number in range(8):
            sender.send(Sample(number), timeout=20)
        assert [line(victim) for _ in range(3)] == ["0 False", "1 False", "2 False"]
        assert line(victim) == "holds one"
        wait_until(lambda: sender.unacknowledged == 5, "three acknowledgements")
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        with WorkReceiver.bind(addresses[other], type=Sample) as receiver:
            got = []
            for _ in range(5):
                with receiver.receive(timeout=20) as delivery:
                    got.append((delivery.number, delivery.redelivered))
            assert got == [(number, True) for number in range(3, 8)]
            sender.flush(timeout=20)
            assert sender.stats.redelivered == 5


def test_a_connection_that_breaks_costs_no_duplicate_and_no_acknowledgement(tmp_path: Path) -> None:
    """The receiver lives: what it has handled, and what it holds, is not sent to it again."""
    with WorkReceiver.bind(f"ipc://{tmp_path}/r", type=Sample, credit=10) as receiver:
        with WorkSender.connect(receiver.address, stream="a") as sender:
            for number in range(10):
                sender.send(Sample(number), timeout=20)
            in_hand = [receiver.receive(timeout=20) for _ in range(4)]
            cut(sender)
            for delivery in in_hand[:2]:
                delivery.ack()  # nobody is there to be told
            assert numbers(receiver, 6) == [4, 5, 6, 7, 8, 9]
            in_hand[2].ack()
            in_hand[3].ack()
            sender.flush(timeout=20)
            sender.send(Sample(10), timeout=20)
            assert numbers(receiver, 1) == [10]
            assert receiver.stats.duplicates == 0
            assert receiver.stats.messages_received == 11


def cut(sender: WorkSender) -> None:
    """Break the sender's connections as a network would: the peers are lost, and found again."""
    links = sender._engine.links
    before = links.peers
    for core in list(links._cores.values()):
        core.post(lambda core=core: core._leave())
    wait_until(lambda: all(peer.state == "lost" for peer in before), "the end of the connections")


def test_a_rejected_message_comes_again_and_a_block_that_raises_rejects() -> None:
    with pair("receiver") as (sender, receiver):
        sender.send(Sample(0), timeout=20)
        with pytest.raises(ZeroDivisionError):
            with receiver.receive(timeout=20) as delivery:
                delivery.value.number // 0
        with pytest.raises(RuntimeError, match=r"<Delivery 0 of 'a'> was rejected already"):
            delivery.ack()
        again = receiver.receive(timeout=20)
        assert (again.number, again.redelivered) == (0, True)
        again.ack()
        again.ack()
        with pytest.raises(RuntimeError, match=r"<Delivery 0 of 'a' again> was acknowledged already"):
            again.reject()
        sender.flush(timeout=20)


def test_auto_ack_acknowledges_with_the_next_receive_and_at_the_end() -> None:
    with WorkReceiver.bind(type=Sample, auto_ack=True) as receiver:
        with WorkSender.connect(receiver.address) as sender:
            for number in range(3):
                sender.send(Sample(number), timeout=20)
            assert receiver.receive(timeout=20).number == 0
            assert sender.unacknowledged == 3
            assert [delivery.number for delivery in receiver.deliveries(timeout=0.2)] == [1, 2]
            sender.flush(timeout=20)
            sender.send(Sample(3), timeout=20)
            assert receiver.receive(timeout=20).number == 3
            assert receiver.close() == 0
            sender.flush(timeout=20)


def test_a_restarted_sender_learns_what_is_handled_and_neither_skips_nor_repeats() -> None:
    with WorkReceiver.bind(type=Sample) as receiver:
        with pytest.raises(ZeroDivisionError):
            with WorkSender.connect(receiver.address, stream="a") as sender:
                for number in range(6):
                    sender.send(Sample(number), timeout=20)
                wait_until(lambda: receiver.stats.messages_received == 6, "six messages")
                held = [receiver.receive(timeout=20) for _ in range(4)]
                held[0].ack()
                held[2].ack()
                1 // 0  # noqa: B018  # it leaves without waiting, as one that is killed would
        with WorkSender.connect(receiver.address, stream="a") as sender:
            wait_until(lambda: receiver.streams == ("a",), "the sender")
            with pytest.raises(RuntimeError, match=r"number 5, from before this sender began. Call resume\(\) first"):
                sender.send(Sample(0), timeout=20)
            progress = sender.resume(timeout=20)
            assert (progress.next, progress.missing) == (6, ((1, 2), (3, 6)))
            assert list(progress.todo(8)) == [1, 3, 4, 5, 6, 7]
            held[1].ack()
            for number in progress.todo(8):
                assert sender.send(Sample(number), number=number, timeout=20) == number
            held[3].ack()
            assert numbers(receiver, 4) == [4, 5, 6, 7]
            sender.flush(timeout=20)
            assert receiver.stats.messages_received == 8  # those that were held there were not transmitted again
            with pytest.raises(TimeoutError):
                receiver.receive(timeout=0.2)


def test_a_stream_belongs_to_the_sender_that_came_last() -> None:
    with WorkReceiver.bind(type=Sample) as receiver:
        old = WorkSender.connect(receiver.address, stream="a")
        old.send(Sample(0), timeout=20)
        assert numbers(receiver, 1) == [0]
        with WorkSender.connect(receiver.address, stream="a") as new:
            assert new.resume(timeout=20).next == 1
            with pytest.raises(StreamTaken, match=r"another sender has taken stream 'a' over"):
                for number in range(1, 100):
                    old.send(Sample(number), timeout=20)
                    time.sleep(0.01)
            assert new.send(Sample(1), timeout=20) == 1
            assert numbers(receiver, 1) == [1]
        assert old.close(timeout=0) == 1


def test_a_message_of_another_type_is_refused_told_to_its_sender_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair("receiver") as (sender, receiver):
        sender.send("no sample", timeout=20)
        sender.send(Sample(1), timeout=20)
        assert numbers(receiver, 1) == [1]
        with pytest.raises(FrameError, match=r"stream 'a': message 0 was refused by .*Expected `object`, got `str`"):
            sender.flush(timeout=20)
        sender.flush(timeout=20)
        assert (sender.stats.refused, receiver.stats.refused) == (1, 1)
        sender.send(Sample(2), timeout=20)
        assert numbers(receiver, 1) == [2]
    assert "message 0 of stream 'a' is refused" in caplog.text


def test_a_message_over_the_limit_of_either_side_is_an_error_at_the_sender() -> None:
    with WorkReceiver.bind(type=Sample, max_message_bytes=1 << 20) as receiver:
        with WorkSender.connect(receiver.address, max_message_bytes=20 << 20) as sender:
            with pytest.raises(ValueError, match=r"over the limit of 20971520"):
                sender.send(Sample(0, bytes(21 << 20)), timeout=20)
            for size in (2 << 20, 10 << 20):  # the receiver refuses the one, its endpoint does not even get the other
                sender.send(Sample(0, bytes(size)), timeout=20)
                with pytest.raises(FrameError, match=r"was refused by .* over the limit of (1048576|6291456)"):
                    receiving(receiver, sender)
            sender.send(Sample(2), timeout=20)
            assert numbers(receiver, 1) == [2]
            sender.flush(timeout=20)


def receiving(receiver: WorkReceiver[Sample], sender: WorkSender) -> None:
    """Let the receiver look at what is there, which is not for it, until the sender has heard of that."""
    with pytest.raises(TimeoutError):
        receiver.receive(timeout=0.5)
    sender.flush(timeout=20)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"number": -1}, "number -1 of stream 'a' is negative or on its way"),
        ({"number": 0}, "number 0 of stream 'a' is negative or on its way"),
    ],
)
def test_a_number_that_cannot_be_sent_is_an_error(wrong: dict[str, int], text: str) -> None:
    with pair("receiver") as (sender, receiver):
        sender.send(Sample(0), timeout=20)
        with pytest.raises(ValueError, match=text):
            sender.send(Sample(0), timeout=20, **wrong)
        assert numbers(receiver, 1) == [0]
        sender.flush(timeout=20)
        assert sender.send(Sample(0), number=0, timeout=20) == 0  # handled already: not sent again
        assert sender.stats.duplicates == 1
        assert receiver.stats.messages_received == 1


def test_settings_that_cannot_work_are_errors() -> None:
    with pytest.raises(ValueError, match=r"credit is 0, credit_bytes 268435456: both must be at least 1"):
        WorkReceiver.bind(type=Sample, credit=0)
    with pytest.raises(ValueError, match=r"the addresses are \[\]: give one or more"):
        WorkSender.connect([])
    with pytest.raises(ValueError, match=r"not on this host, and there are no keys"):
        WorkSender.connect("tcp://10.0.0.1:5000")
    with pytest.raises(ValueError, match=r"stream is empty"):
        WorkSender.connect("tcp://127.0.0.1:5000", stream="")


def test_a_far_side_with_other_keys_or_another_protocol_is_named(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path / "a"), make_keys(tmp_path / "b")
    with WorkReceiver.bind(type=Sample, keys=keys) as receiver:
        with WorkSender.connect(receiver.address, keys=keys) as sender:
            sender.send(Sample(0), timeout=20)
            assert numbers(receiver, 1) == [0]
        with WorkSender.connect(receiver.address, keys=others) as sender:
            with pytest.raises(TimeoutError, match=r"no receiver is there"):
                sender.send(Sample(0), timeout=0.5)
    protocol = Protocol(requests=Sample, replies=Sample)
    with Endpoint.bind(protocol=protocol) as endpoint, WorkSender.connect(endpoint.address) as sender:
        with pytest.raises(PeerRefused, match=r"the protocol here is version '1', yours is 'work stream 1'"):
            sender.send(Sample(0), timeout=20)


def test_two_senders_that_meet_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with WorkSender.bind() as one, WorkSender.connect(one.address) as other:
        wait_until(lambda: "this is a sender, as you are" in caplog.text, "the error")
        with pytest.raises(TimeoutError, match=r"this is a sender, as you are"):
            other.send(Sample(0), timeout=0.5)


def test_asyncio_on_both_sides_with_cancellation() -> None:
    async def main() -> None:
        with WorkReceiver.bind(type=Sample, credit=2) as receiver:
            with WorkSender.connect(receiver.address) as sender:
                waiting = asyncio.create_task(receiver.receive_async(timeout=20))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

                async def produce() -> None:
                    for number in range(100):
                        await sender.send_async(Sample(number), timeout=20)
                    await sender.flush_async(timeout=20)

                producing = asyncio.create_task(produce())
                for number in range(100):
                    with await receiver.receive_async(timeout=20) as delivery:
                        assert delivery.number == number
                await producing
                with pytest.raises(TimeoutError, match=r"no Sample arrived within 0.1 s: connected are"):
                    await receiver.receive_async(timeout=0.1)

    asyncio.run(main())


def test_closing_waits_for_acknowledgements_within_bounds_and_says_how_many_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with WorkReceiver.bind(type=Sample) as receiver:
        sender = WorkSender.connect(receiver.address, stream="a")
        for number in range(5):
            sender.send(Sample(number), timeout=20)
        assert numbers(receiver, 2) == [0, 1]
        with pytest.raises(TimeoutError, match=r"messages of stream 'a' are not acknowledged after 0.3 s, .* number 2"):
            sender.flush(timeout=0.3)
        with caplog.at_level(logging.WARNING):
            assert sender.close(timeout=0.2) == 3
        assert "3 messages of stream 'a' are not acknowledged after 0.2 s, the first is number 2" in caplog.text
        with pytest.raises(RuntimeError, match=r"the sender of stream 'a' is closed"):
            sender.send(Sample(9), timeout=1)
        assert sender.close() == 3
        assert numbers(receiver, 3) == [2, 3, 4]  # what has arrived is not lost with its sender
        assert receiver.close() == 0
        with pytest.raises(RuntimeError, match=r"is closed"):
            receiver.receive(timeout=1)


def test_a_block_that_ends_well_with_messages_not_acknowledged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    close = WorkSender.close
    monkeypatch.setattr(WorkSender, "close", lambda self, timeout=0.2: close(self, timeout=min(timeout, 0.2)))
    with WorkReceiver.bind(type=Sample) as receiver:
        with pytest.raises(TimeoutError, match=r"1 messages of stream 'a' were not acknowledged when it closed"):
            with WorkSender.connect(receiver.address, stream="a") as sender:
                sender.send(Sample(0), timeout=20)


def test_an_acknowledgement_just_before_the_end_arrives() -> None:
    for _ in range(10):
        with WorkSender.bind() as sender:
            with WorkReceiver.connect(sender.address, type=Sample) as receiver:
                sender.send(Sample(0), timeout=20)
                receiver.receive(timeout=20).ack()
            wait_until(lambda: sender.unacknowledged == 0, "the acknowledgement", timeout=5)


def test_waiting_calls_end_when_their_channel_is_closed_and_no_thread_stays() -> None:
    before = threading.active_count()
    receiver = WorkReceiver.bind(type=Sample)
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.receive(timeout=60)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    sender = WorkSender.connect([receiver.address, "tcp://127.0.0.1:9"])
    wait_until(lambda: bool(receiver.streams), "the sender")
    receiver.close()
    thread.join(5)
    assert len(errors) == 1
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 5
    wait_until(lambda: threading.active_count() == before, "the end of the threads")


def test_a_forgotten_sender_with_messages_keeps_no_process_alive() -> None:
    script = """
import msgspec
from drivetrain_transport import WorkReceiver, WorkSender
receiver = WorkReceiver.bind(type=int)
sender = WorkSender.connect([receiver.address, "tcp://127.0.0.1:9"])
sender.send(1, timeout=20)
raise LookupError("the end")
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "LookupError: the end"
    assert "Exception" not in done.stderr
    assert time.monotonic() - start < 15


def test_memory_is_that_of_the_credit_not_of_the_stream() -> None:
    with WorkReceiver.bind(type=Sample, credit=50, auto_ack=True) as receiver:
        with WorkSender.connect(receiver.address) as sender:

            def exchange(count: int) -> None:
                for _ in range(count // 50):
                    for _ in range(49):
                        sender.send(Sample(0, bytes(4000)), timeout=20)
                    for _ in range(49):
                        receiver.receive(timeout=20)

            tracemalloc.start()
            exchange(500)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            exchange(3000)  # 12 MB
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert grown < 500_000
            assert sender._engine.window.settled.ranges() == ()
            assert receiver.stats.queued_high_water <= 50
            assert receiver.close() == 0


def test_redelivered_messages_that_the_journal_has_are_dropped_and_acknowledged(tmp_path: Path) -> None:
    """The receiver was killed between the end of its transaction and its acknowledgement."""
    with Journal(tmp_path / "journal") as journal:
        for number in (0, 2):
            journal.record("a", number)
        with WorkSender.bind(stream="a") as sender:
            with WorkReceiver.connect(sender.address, type=Sample) as forgetful:
                for number in range(4):
                    sender.send(Sample(number), timeout=20)
                assert forgetful.receive(timeout=20).number == 0
            with WorkReceiver.connect(sender.address, type=Sample, journal=journal) as receiver:
                assert numbers(receiver, 2) == [1, 3]
                sender.flush(timeout=20)
            assert (len(journal.handled("a")), journal.handled("a").top) == (4, 4)


def test_import_reaches_neither_torch_nor_numpy() -> None:
    script = "import sys, drivetrain_transport; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]"
