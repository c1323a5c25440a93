"""Coverage-guided fuzzing of the decoder, without end and outside of the tests.

    python -m venv fuzz && fuzz/bin/pip install atheris numpy packages/transport
    fuzz/bin/python tests/transport/fuzz_frames.py -max_total_time=180 [CORPUS]

Whatever the bytes are, decoding them ends in a message or in a FrameError, and never takes memory out of proportion.
"""

import contextlib
import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["drivetrain_transport"]):
    import msgspec
    import numpy as np
    from drivetrain_transport import FrameError, decode, encode
    from drivetrain_transport._endpoints.envelopes import unpack
    from drivetrain_transport._endpoints.pieces import join


class Leaf(msgspec.Struct, tag=True):
    name: str
    array: np.ndarray
    data: bytes = b""


class Node(msgspec.Struct, tag=True):
    children: list["Leaf | Node"] = []
    arrays: dict[str, np.ndarray] = {}
    anything: Any = None


ANYTHING = Leaf | Node


REAL = [
    [bytes(frame) for frame in encode(message)]
    for message in (
        Leaf(name="weights", array=np.ones((2, 3), dtype=np.float32), data=bytes(9)),
        Node(children=[Node(arrays={"a": np.arange(4)}, anything=[1, None, {"k": 2.5}]), Leaf("", np.array(True))]),
        [np.zeros((0, 5)), {"array": np.ones(3, dtype=np.float32)}, "text", -1, 2**64 - 1],
    )
]


def damaged(provider: atheris.FuzzedDataProvider) -> list[bytes]:
    """A real message with bytes written over, put in, taken out, and frames lost or exchanged; or plain noise."""
    choice = provider.ConsumeIntInRange(0, len(REAL))
    if choice == len(REAL):
        frames = [b"DT<\x01" + provider.ConsumeBytes(provider.ConsumeIntInRange(0, 200)), provider.ConsumeBytes(8)]
    else:
        frames = list(REAL[choice])
    while provider.remaining_bytes():
        which = provider.ConsumeIntInRange(0, len(frames) - 1)
        frame = frames[which]
        at = provider.ConsumeIntInRange(0, len(frame))
        match provider.ConsumeIntInRange(0, 4):
            case 0:
                new = provider.ConsumeBytes(provider.ConsumeIntInRange(1, 9))
                frames[which] = frame[:at] + new + frame[at + len(new) :]
            case 1:
                frames[which] = frame[:at] + provider.ConsumeBytes(provider.ConsumeIntInRange(1, 9)) + frame[at:]
            case 2:
                frames[which] = frame[:at] + frame[at + provider.ConsumeIntInRange(1, 9) :]
            case 3:
                frames[which] = (frame[:at] * provider.ConsumeIntInRange(1, 99))[: 1 << 16]
            case 4:
                frames[which], frames[0] = frames[0], frame
    return frames


def test_one_input(data: bytes) -> None:
    frames = damaged(atheris.FuzzedDataProvider(data))
    memory = np.zeros(3, dtype=np.float32)
    for kind, options in ((ANYTHING, {}), (Any, {}), (ANYTHING, {"into": {"array": memory}}), (Leaf, {"copy": False})):
        try:
            message = decode(frames, kind, **options)
        except FrameError:
            continue
        encode(message)
    for action in (lambda: unpack(b"DTE\x01" + data), lambda: join(frames, tuple(data[:8]))):
        with contextlib.suppress(FrameError):
            action()


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
