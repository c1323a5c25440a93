"""Real messages, damaged: the decoder answers with a message or a FrameError, and takes no memory out of proportion."""

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from drivetrain_transport import FrameError, decode, encode
from drivetrain_transport._endpoints.envelopes import Request, pack, unpack
from drivetrain_transport._endpoints.pieces import join
from hypothesis import example, given, settings
from hypothesis import strategies as st


class Leaf(msgspec.Struct, tag=True):
    name: str
    tensor: torch.Tensor
    data: bytes = b""


class Node(msgspec.Struct, tag=True):
    children: list["Leaf | Node"] = []
    arrays: dict[str, np.ndarray] = {}
    anything: Any = None


MESSAGES = [
    Leaf(name="weights", tensor=torch.ones(2, 3, dtype=torch.bfloat16), data=bytes(range(9))),
    Node(children=[Node(arrays={"a": np.arange(4)}, anything=[1, None, {"k": 2.5}]), Leaf("", torch.tensor(True))]),
    Node(arrays={"empty": np.zeros((0, 5)), "complex": np.array([1j])}, anything=2**64 - 1),
]
REAL = [[bytes(frame) for frame in encode(message)] for message in MESSAGES]
KINDS: list[Any] = [Leaf | Node, Leaf, Node, Any, list[Leaf], dict[str, torch.Tensor], msgspec.Raw]
FEW = settings(deadline=None, derandomize=True, max_examples=150, database=None)

# Bytes that MessagePack reads as the start of something long, deep or of another type.
HEADERS = st.sampled_from(
    [
        *(kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
        *(b"\x91" * 5000, b"\x81\xa1a" * 5000, b"\xcf" + b"\xff" * 8),
        *(b"\xc0", b"\xc1", b"\xd6\xff", b"\xd6T", b"\xcb\x7f\xf8"),
    ]
)


@st.composite
def damage(draw: Callable[..., Any]) -> list[bytes]:
    """A real message with one to four wounds."""
    frames = list(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 4))):
        which = draw(st.integers(0, len(frames) - 1))
        frame = frames[which]
        at = draw(st.integers(0, len(frame)))
        wound = draw(st.sampled_from(["cut", "flip", "put", "take", "splice", "swap", "lose", "repeat"]))
        if wound == "cut":
            frames[which] = frame[:at]
        elif wound == "flip" and at < len(frame):
            frames[which] = frame[:at] + bytes([frame[at] ^ draw(st.integers(1, 255))]) + frame[at + 1 :]
        elif wound == "put":
            frames[which] = frame[:at] + draw(HEADERS | st.binary(min_size=1, max_size=9)) + frame[at:]
        elif wound == "take":
            frames[which] = frame[:at] + frame[at + draw(st.integers(1, 9)) :]
        elif wound == "splice":
            frames[which] = frame[:at] + draw(st.sampled_from(REAL))[0][at:]
        elif wound == "swap":
            frames[which], frames[0] = frames[0], frame
        elif wound == "lose" and len(frames) > 1:
            del frames[which]
        elif wound == "repeat":
            frames.append(frame)
    return frames


def same(message: Leaf | Node, other: Leaf | Node) -> bool:
    return [bytes(frame) for frame in encode(message)] == [bytes(frame) for frame in encode(other)]


@FEW
@given(frames=damage(), kind=st.sampled_from(KINDS), copy=st.booleans())
@example(frames=[b"DT<\x01" + b"\x91" * 100_000], kind=Any, copy=True)
@example(frames=[b"DT<\x01" + b"\x81\xa8children\x91" * 20_000], kind=Node, copy=True)
@example(frames=[b"DT<\x01\xc7\x0cT\x93\xa7float32\x91\x02\x01", bytes(8)], kind=Any, copy=True)
def test_a_damaged_message_is_a_message_or_a_frame_error(frames: list[bytes], kind: Any, copy: bool) -> None:
    size = sum(len(frame) for frame in frames)
    tracemalloc.start()
    try:
        message = decode(frames, kind, copy=copy)
    except FrameError:
        message = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (1 << 20) + 100 * size  # a byte of MessagePack is an empty map at most: 64 bytes
    if message is not None and kind is not msgspec.Raw:
        encode(message)  # what was let in holds nothing but data
    for number, real in enumerate(REAL):
        assert same(decode(real, Leaf | Node), MESSAGES[number])


@FEW
@given(frames=damage())
def test_a_damaged_message_leaves_given_memory_alone(frames: list[bytes]) -> None:
    memory = torch.full((2, 3), 7.0, dtype=torch.bfloat16)
    try:
        message = decode(frames, Leaf | Node, into={"tensor": memory})
    except FrameError:
        assert bool((memory == 7).all())
    else:
        if isinstance(message, Leaf):
            assert message.tensor is memory


@FEW
@given(noise=st.binary(max_size=60), counts=st.lists(st.integers(-2, 9), max_size=5))
def test_envelopes_and_pieces_of_noise_are_frame_errors(noise: bytes, counts: list[int]) -> None:
    real = pack(Request(call=1, pieces=(2, 3)))
    for frame in (noise, real[:4] + noise, real[: len(noise)], real + noise):
        with contextlib.suppress(FrameError):
            unpack(frame)
    try:
        joined = join([noise] * 4, counts)
    except FrameError:
        return
    assert b"".join(bytes(frame) for frame in joined) == noise * 4
