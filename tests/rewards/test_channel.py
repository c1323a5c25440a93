import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
from drivetrain_rewards._channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    reader, their_writer = os.pipe()
    their_reader, writer = os.pipe()
    ours, theirs = Channel(reader, writer), Channel(their_reader, their_writer)
    yield ours, theirs
    for end in (ours, theirs):
        with contextlib.suppress(OSError):  # a test may have closed it
            end.close()


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


def test_messages_larger_than_a_pipe_arrive_whole(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    messages = [b"", b"x", bytes(range(256)) * 10_000]
    sending = threading.Thread(target=lambda: [ours.send(message, soon()) for message in messages])
    sending.start()
    assert [theirs.receive(soon()) for _ in messages] == messages
    sending.join(timeout=10)


def test_deadlines_hold_for_reading_and_for_writing(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.receive(soon(0.05))
    with pytest.raises(TimeoutError):
        ours.send(bytes(1 << 20), soon(0.05))


def test_a_closed_end_is_noticed(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(EOFError, match=r"the other end is gone"):
        ours.receive(soon())
    with pytest.raises(BrokenPipeError):
        ours.send(b"x", soon())


def test_a_length_that_lies_is_refused_before_it_is_allocated() -> None:
    reader, writer = os.pipe()
    other_reader, other_writer = os.pipe()
    channel = Channel(reader, other_writer)
    os.write(writer, b"\xff\xff\xff\xff")
    with pytest.raises(EOFError, match=r"a length of 4294967295 bytes is over the limit"):
        channel.receive(soon())
    channel.close()
    os.close(writer)
    os.close(other_reader)
