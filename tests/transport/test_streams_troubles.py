"""Work streams when something goes wrong between the two sides: failed calls, refusals, keys, credit in one's hands."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drivetrain_transport import (
    Endpoint,
    Journal,
    PeerRefused,
    Protocol,
    StreamTaken,
    Subscriber,
    WorkReceiver,
    WorkSender,
    make_keys,
)
from drivetrain_transport._streams.numbers import Numbers
from drivetrain_transport._streams.wire import SPAN, Settle
from waiting import wait_until


class Sample(msgspec.Struct):
    number: int


class Other(msgspec.Struct):
    text: str


STRANGER = Protocol(requests=Other, replies=Other)


class FailsOnce(Journal):
    """A journal that cannot be read the first time it is asked."""

    asked = 0

    def handled(self, stream: str) -> Numbers:
        self.asked += 1
        if self.asked == 1:
            raise OSError("the disk is away for a moment")
        return super().handled(stream)


@contextmanager
def pair(binds: str, **options: Any) -> Iterator[tuple[WorkSender, WorkReceiver[Sample]]]:
    with ExitStack() as stack:
        if binds == "sender":
            sender = stack.enter_context(WorkSender.bind(stream="a"))
            receiver = stack.enter_context(WorkReceiver.connect(sender.address, type=Sample, **options))
        else:
            receiver = stack.enter_context(WorkReceiver.bind(type=Sample, **options))
            sender = stack.enter_context(WorkSender.connect(receiver.address, stream="a"))
        yield sender, receiver


@pytest.mark.parametrize("binds", ["sender", "receiver"])
def test_a_join_that_failed_once_is_made_again_counted_and_logged(
    binds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FailsOnce(tmp_path / "journal") as journal, pair(binds, journal=journal) as (sender, receiver):
        assert sender.send(Sample(0), timeout=20) == 0
        with receiver.receive(timeout=20) as delivery:
            assert delivery.value == Sample(0)
        sender.flush(timeout=20)
        assert (journal.asked, sender.stats.connections_dropped) == (2, 1)
    assert "is ended, to be made again: stream 'a': " in caplog.text
    assert "the disk is away for a moment" in caplog.text


@pytest.mark.parametrize("binds", ["sender", "receiver"])
def test_acknowledgements_that_the_sender_failed_to_take_are_told_over_the_next_connection(
    binds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(binds) as (sender, receiver):
        window, failed = sender._engine.window, list[Settle]()
        settle = window.settle

        def fails_once(lane: Any, message: Settle) -> None:
            if not failed:
                failed.append(message)
                raise OSError("not now")
            settle(lane, message)

        monkeypatch.setattr(window, "settle", fails_once)
        sender.send(Sample(0), timeout=20)
        receiver.receive(timeout=20).ack()
        sender.flush(timeout=20)
        assert failed == [Settle(stream="a", handled=((0, 1),))]
        assert receiver.stats.connections_dropped == 1
        assert receiver.stats.duplicates == 0
        sender.send(Sample(1), timeout=20)
        receiver.receive(timeout=20).ack()


def test_a_sender_whose_stream_was_taken_does_not_join_again_however_many_came_after_it() -> None:
    with WorkReceiver.bind(type=Sample) as receiver:
        old = WorkSender.connect(receiver.address, stream="a")
        old.resume(timeout=20)
        with WorkSender.connect(receiver.address, stream="a") as new:
            new.resume(timeout=20)
            with pytest.raises(StreamTaken):
                for number in range(1, 1000):
                    old.send(Sample(number), timeout=20)
                    time.sleep(0.005)
        for _ in range(20):  # more than the receiver remembers
            with WorkSender.connect(receiver.address, stream="a") as new:
                new.resume(timeout=20)
        links, lost = old._engine.links, old._engine.links.peers
        for core in list(links._cores.values()):
            core.post(lambda core=core: core._leave())
        wait_until(lambda: links.peers not in ((), lost), "the next connection")
        with WorkSender.connect(receiver.address, stream="a") as new:
            new.resume(timeout=20)
            new.send(Sample(0), timeout=20)
            receiver.receive(timeout=20).ack()
            new.flush(timeout=20)
        assert old.close(timeout=0) > 0


def test_a_refusal_is_the_answer_only_when_every_address_has_refused(tmp_path: Path) -> None:
    later = f"ipc://{tmp_path}/later"
    with Endpoint.bind(protocol=STRANGER) as stranger, WorkSender.connect([stranger.address, later]) as sender:
        wait_until(lambda: "refused us" in sender._engine.links.describe(), "the refusal")
        with pytest.raises(
            TimeoutError, match=rf"no receiver is there, at {stranger.address} \(.* refused us: .*later"
        ):
            sender.send(Sample(0), timeout=0.1)
        with WorkReceiver.bind(later, type=Sample) as receiver:
            sender.send(Sample(0), timeout=20)
            receiver.receive(timeout=20).ack()
            sender.flush(timeout=20)
        with Endpoint.bind(later, protocol=STRANGER):
            with pytest.raises(PeerRefused, match=rf"{stranger.address} refused us: .*; {later} refused us: "):
                sender.send(Sample(1), timeout=20)
        with WorkReceiver.bind(later, type=Sample) as receiver:  # and it is no answer for ever
            wait_until(lambda: bool(receiver.streams), "the sender")
            sender.send(Sample(1), timeout=20)
            receiver.receive(timeout=20).ack()


def test_a_receiver_is_told_of_a_refusal_as_well() -> None:
    with Endpoint.bind(protocol=STRANGER) as stranger:
        with WorkReceiver.connect(stranger.address, type=Sample) as receiver:
            with pytest.raises(PeerRefused, match=r"the protocol here is version '1', yours is 'work stream 1'"):
                receiver.receive(timeout=20)


def test_keys_that_do_not_fit_are_suspected_at_once_and_keys_on_one_side_are_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, others = make_keys(tmp_path / "a"), make_keys(tmp_path / "b")
    with WorkReceiver.bind(type=Sample, keys=keys) as receiver:
        with WorkSender.connect(receiver.address, keys=others) as sender:
            wait_until(lambda: "are the keys the same?" in caplog.text, "the warning", timeout=3)
            with pytest.raises(TimeoutError, match=r"the connection was made and broken, .*: are the keys the same\?"):
                sender.send(Sample(0), timeout=0.1)
        with WorkSender.connect(receiver.address) as sender:
            with pytest.raises(PeerRefused, match=r"it has keys, and we have none: pass keys=load_keys\(folder\)"):
                sender.send(Sample(0), timeout=20)
    with WorkReceiver.bind(type=Sample) as receiver:
        with Subscriber.connect(receiver.address, type=Sample, keys=keys) as subscriber:
            with pytest.raises(PeerRefused, match=r"we have keys, and it has none"):
                subscriber.next(timeout=20)


def test_deliveries_in_ones_hands_take_up_the_credit_and_the_timeout_says_so() -> None:
    with pair("receiver", credit=3) as (sender, receiver):
        with pytest.raises(TimeoutError, match=r"within 0.1 s: (connected are a|no sender is there, at .*)$"):
            receiver.receive(timeout=0.1)
        for number in range(3):
            sender.send(Sample(number), timeout=20)
        in_hand = [receiver.receive(timeout=20) for _ in range(3)]
        with pytest.raises(
            TimeoutError,
            match=r"connected are a; in your hands, not acknowledged and counted against the credit: "
            r"3 of 3 messages and \d+ of 268435456 bytes of stream 'a'$",
        ):
            receiver.receive(timeout=0.1)
        for delivery in in_hand:
            delivery.ack()
        sender.send(Sample(3), timeout=20)
        with receiver.receive(timeout=20) as delivery:
            assert delivery.number == 3


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_wait_without_an_end_is_refused(seconds: float, tmp_path: Path) -> None:
    said = rf"timeout is {seconds}: every wait has an end".replace("+", r"\+")
    with pair("receiver") as (sender, receiver):
        uses = [
            lambda: sender.send(Sample(0), timeout=seconds),
            lambda: sender.flush(timeout=seconds),
            lambda: sender.resume(timeout=seconds),
            lambda: sender.close(timeout=seconds),
            lambda: receiver.receive(timeout=seconds),
            lambda: next(receiver.deliveries(timeout=seconds)),
            lambda: receiver.close(timeout=seconds),
            lambda: Journal(tmp_path / "journal", timeout=seconds),
        ]
        for use in uses:
            with pytest.raises(ValueError, match=said):
                use()
        sender.send(Sample(0), timeout=20)  # all is as it was
        receiver.receive(timeout=20).ack()


def test_who_gives_a_number_is_told_what_holds_up_that_number() -> None:
    with pair("receiver") as (sender, receiver):
        sender.send(Sample(0), timeout=20)
        with pytest.raises(TimeoutError, match=r"number 0 is at .* and is not acknowledged, and 65536 numbers"):
            sender.send(Sample(1), number=SPAN, timeout=0.1)
        receiver.receive(timeout=20).ack()
        sender.flush(timeout=20)
