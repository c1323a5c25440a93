"""Records through shared memory: what arrives, in which order, how often, and what is refused."""

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch
from drivetrain_transport import FrameError, Ring


class Batch(msgspec.Struct):
    step: int
    tokens: torch.Tensor
    mask: np.ndarray


class Note(msgspec.Struct):
    text: str


def batch(step: int, size: int = 1000) -> Batch:
    return Batch(step=step, tokens=torch.full((size,), step), mask=np.full((3, 2), step % 2 == 0))


@contextmanager
def pair(capacity: int = 1 << 16, **options: int) -> Iterator[tuple[Ring, Ring]]:
    with Ring.create("pair", capacity, **options) as one, Ring.attach(one.address) as other:
        yield one, other


def test_typed_messages_and_tensors_go_to_another_process_and_come_back() -> None:
    code = """
    import sys, msgspec, torch, numpy
    from drivetrain_transport import Ring
    class Batch(msgspec.Struct):
        step: int
        tokens: torch.Tensor
        mask: numpy.ndarray
    with Ring.attach(sys.argv[1]) as there, Ring.attach(sys.argv[2]) as back:
        for _ in range(50):
            with there.receive(Batch, timeout=30) as lease:
                batch = lease.copy()
            batch.tokens += 1
            back.send(batch, timeout=30)
    """
    with Ring.create("there", 100_000) as there, Ring.create("back", 100_000) as back:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), there.address, back.address]
        process = subprocess.Popen(command)
        try:
            for step in range(50):
                there.send(batch(step, size=1 + 97 * step), timeout=30)
                with back.receive(Batch, timeout=30) as lease:
                    assert lease.message.step == step
                    assert torch.equal(lease.message.tokens, torch.full((1 + 97 * step,), step + 1))
                    assert lease.message.mask.tolist() == [[step % 2 == 0] * 2] * 3
                    assert not lease.redelivered
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.wait()
        assert there.stats.messages_sent == back.stats.messages_received == 50
        assert there.stats.bytes_sent > sum(8 * (1 + 97 * step) for step in range(50))
        assert (there.processes, there.stats.queued, there.stats.queued_high_water) == ([os.getpid()], 0, 1)


def test_every_record_goes_to_one_of_many_consumers_in_the_order_of_its_producer() -> None:
    producers, consumers, count = 4, 3, 300
    with Ring.create("many", 20_000, max_records=16) as ring:

        def produce(name: int) -> None:
            with Ring.attach(ring.address) as own:
                for number in range(count):
                    own.send([name, number, "x" * (number % 700)], timeout=30)

        def consume() -> list[tuple[int, int]]:
            got = []
            with Ring.attach(ring.address) as own:
                while True:
                    with own.receive(list[int | str], timeout=30) as lease:
                        name, number, text = lease.message
                        if name == -1:
                            return got
                        assert text == "x" * (number % 700)
                        got.append((name, number))

        with ThreadPoolExecutor(producers + consumers) as pool:
            eaten = [pool.submit(consume) for _ in range(consumers)]
            list(pool.map(produce, range(producers)))
            for _ in range(consumers):
                ring.send([-1, 0, ""], timeout=30)
            got = [future.result() for future in eaten]
        assert sorted(itertools.chain(*got)) == [(name, number) for name in range(producers) for number in range(count)]
        for part in got:
            for name in range(producers):
                numbers = [number for whose, number in part if whose == name]
                assert numbers == sorted(numbers)


def test_the_tensors_of_a_lease_lie_in_the_ring_and_those_of_a_copy_do_not() -> None:
    with pair() as (sender, receiver):
        source = batch(1)
        sender.send(source, timeout=1)
        source.tokens.fill_(99)  # sent is sent
        with receiver.receive(Batch, timeout=1) as lease:
            message, copy = lease.message, lease.copy()
            again = Ring.attach(sender.address)
            shown = [bytes(frame) for frame in lease.frames]
            assert message.tokens.tolist() == copy.tokens.tolist() == [1] * 1000
            assert message.tokens.data_ptr() % 64 == 0
            start = message.tokens.data_ptr()
            assert start == np.frombuffer(lease.frames[1], np.uint8).ctypes.data
            assert not start <= copy.tokens.data_ptr() < start + 8000
            copy.tokens.fill_(5)
            assert [bytes(frame) for frame in lease.frames] == shown
            assert all(frame.readonly for frame in lease.frames)
            again.close()
        assert copy.tokens.tolist() == [5] * 1000


def test_a_record_is_delivered_again_unless_its_lease_was_released() -> None:
    with pair() as (sender, receiver):
        for number in range(6):
            sender.send(number, timeout=1)
        with pytest.raises(LookupError):
            with receiver.receive(int, timeout=1) as lease:
                assert (lease.message, lease.redelivered, lease.delivery) == (0, False, 1)
                raise LookupError
        lease = receiver.receive(int, timeout=1)
        assert (lease.message, lease.redelivered, lease.delivery) == (0, True, 2)
        lease.give_back()
        receiver.receive(int, timeout=1)  # dropped
        last = Ring.attach(sender.address)
        held = last.receive(int, timeout=1)
        assert (held.message, held.delivery) == (0, 4)
        with receiver.receive(int, timeout=1) as lease:
            assert lease.message == 1
        last.close()
        assert sender.processes == [os.getpid()] * 3  # until the lease is gone
        del held
        assert sender.processes == [os.getpid()] * 2
        for expected, delivery in [(0, 5), (2, 1), (3, 1)]:
            with receiver.receive(int, timeout=1) as lease:
                assert (lease.message, lease.delivery) == (expected, delivery)
        assert receiver.stats.redelivered == 3  # the closed handle had one
        assert sender.stats.queued == 2


def test_a_lease_that_has_ended_says_so() -> None:
    with pair() as (sender, receiver):
        sender.send(Note(text="a"), timeout=1)
        lease = receiver.receive(Note, timeout=1)
        lease.release()
        lease.release()
        uses: list[Callable[[], object]] = [lambda: lease.message, lambda: lease.frames, lease.copy, lease.give_back]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"of a lease that was released: its memory is ring pair's again"):
                use()
        sender.send(Note(text="a"), timeout=1)
        lease = receiver.receive(Note, timeout=1)
        lease.give_back()
        with pytest.raises(RuntimeError, match=r"release\(\) of a lease that was given back"):
            lease.release()


def test_a_message_of_the_wrong_type_is_dropped_by_name_and_the_next_one_comes() -> None:
    with pair(8192) as (sender, receiver):
        sender.send({"text": 5, "tensor": "x" * 5000}, timeout=1)
        with pytest.raises(FrameError, match=r"ring pair: a record was dropped: .*Expected `str`, got `int`") as caught:
            receiver.receive(Note, timeout=1)
        sender.send(torch.zeros(1000), timeout=0)  # there is room, although the error is still at hand
        with pytest.raises(FrameError, match="was dropped: not a message of the expected type"):
            receiver.receive(Note, timeout=1)
        sender.send_frames([b"noise"], timeout=0)
        with pytest.raises(FrameError, match="was dropped: not a message: it starts with"):
            receiver.receive(Note, timeout=1)
        sender.send_frames([], timeout=0)
        with pytest.raises(FrameError, match="at least one frame"):
            receiver.receive(Note, timeout=1)
        sender.send(Note(text="fine"), timeout=0)
        with receiver.receive(Note, timeout=0) as lease:
            assert lease.message == Note(text="fine")
        assert (receiver.stats.refused, receiver.stats.messages_received, sender.stats.queued) == (4, 1, 0)
        assert caught.value is not None


@pytest.mark.parametrize("index", [[0, 1 << 62], [1 << 63], [2, 40, 1 << 62], [1, 4], [1, 1000], [40]])
def test_a_record_with_false_sizes_is_refused(index: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (sender, receiver):
        false = np.array(index, dtype=np.uint64).tobytes()
        monkeypatch.setattr("drivetrain_transport._rings.ring.index", lambda sizes: false)
        sender.send_frames([bytes(100)], timeout=1)
        if index == [0, 1 << 62]:
            monkeypatch.undo()
        with pytest.raises(
            FrameError, match=r"ring pair: a record was dropped: a record of 164 bytes (cannot|does not)"
        ):
            receiver.receive_frames(timeout=1)
        assert sender.stats.queued == 0
