"""Frames that are no message, or not the expected one, are refused by name and before anything is allocated."""

import random
import subprocess
import sys
import textwrap
import tracemalloc

import msgspec
import pytest
import torch
from drivetrain_transport import FrameError, decode, encode


class Point(msgspec.Struct):
    x: int
    tensor: torch.Tensor


class Count(msgspec.Struct):
    x: int


def reference(dtype: object, shape: object, frame: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(0x54, msgspec.msgpack.encode([dtype, shape, frame]))


def message(tensor: object, x: object = 1) -> bytes:
    return b"DT<\x01" + msgspec.msgpack.encode({"x": x, "tensor": tensor})


def test_a_struct_comes_back() -> None:
    frames = encode(Point(x=3, tensor=torch.tensor([1.5])))
    assert bytes(frames[0])[:4] == b"DT<\x01"
    point = decode(frames, Point)
    assert (point.x, point.tensor.tolist()) == (3, [1.5])


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "at least one frame"),
        ([b""], "starts with b''"),
        ([b"DT<"], "starts with b'DT<'"),
        ([b"\x80\x04\x95pickle"], "starts with"),
        ([b"DT>\x01\x80"], "other byte order"),
        ([b"DT<\x02\x80"], "format 2, this is format 1"),
        ([b"DT<\x01"], "truncated"),
        ([b"DT<\x01\xc1"], "MessagePack data is malformed"),
        ([message(reference("float32", [2], 1))], "frame 1 is missing"),
        ([message(reference("float32", [2], 0)), bytes(8)], "frame 0 is missing"),
        ([message(reference("float32", [2], -1)), bytes(8)], "frame -1 is missing"),
        ([message(reference("float32", [2], 1)), bytes(7)], "has 8 bytes, its frame has 7 - at `\\$.tensor`"),
        ([message(reference("float32", [-2], 1)), bytes(8)], r"no tensor has the shape \(-2,\)"),
        ([message(reference("float32", [2**62, 2**62], 1)), bytes(8)], "no tensor has the shape"),
        ([message(reference("float32", [0, 2**62], 1)), b""], "no tensor has the shape"),
        ([message(reference("float32", [1] * 65, 1)), bytes(4)], "no tensor has the shape"),
        ([message(reference("float33", [2], 1)), bytes(8)], "no dtype 'float33'"),
        ([message(reference("Tensor", [2], 1)), bytes(8)], "no dtype 'Tensor'"),
        ([message(reference("bool", [2], 1)), b"\x01\x02"], "bytes other than 0 and 1"),
        ([message(reference("float32", 2, 1)), bytes(8)], "Expected `array`, got `int`"),
        ([message(reference("float32", [2], 1), "one"), bytes(8)], r"Expected `int`, got `str` - at `\$.x`"),
        ([message([1.0, 2.0])], "expected Tensor, got list"),
        ([message(msgspec.msgpack.Ext(5, b""))], "extension 5 has no meaning"),
        ([message(reference("float32", [2], 1)), bytes(8), b"more"], "1 of 2 tensor frames belong to no field"),
    ],
)
def test_a_broken_message_is_refused_by_name(frames: list[bytes], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode(frames, Point)


def test_one_frame_cannot_be_two_tensors() -> None:
    pair = [reference("uint8", [2], 1), reference("uint8", [2], 1)]
    with pytest.raises(FrameError, match=r"claimed by two"):
        decode([b"DT<\x01" + msgspec.msgpack.encode(pair), b"ab"], list[torch.Tensor])


def test_a_tensor_in_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(FrameError, match=r"Expected `int`, got `ext`"):
        decode(encode({"x": torch.ones(1)}), Count)
    with pytest.raises(FrameError, match=r"belong to no field"):
        decode(encode({"x": 1, "unknown": torch.ones(1)}), Count)


def test_the_size_limit_holds_on_both_sides() -> None:
    point = Point(x=1, tensor=torch.zeros(1000, dtype=torch.uint8))
    frames = encode(point)
    size = sum(memoryview(frame).nbytes for frame in frames)
    assert decode(encode(point, max_bytes=size), Point, max_bytes=size).x == 1
    with pytest.raises(ValueError, match=f"a Point of {size} bytes is over the limit of {size - 1}"):
        encode(point, max_bytes=size - 1)
    with pytest.raises(FrameError, match=f"{size} bytes is over the limit of {size - 1}"):
        decode(frames, Point, max_bytes=size - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # a string of 4 GiB
        b"\x91" * 100_000,  # nested 100,000 deep
    ],
)
def test_lengths_that_lie_allocate_nothing(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode([b"DT<\x01" + body], list)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_noise_is_a_frame_error_or_a_message() -> None:
    noise = random.Random(0)
    whole = [bytes(frame) for frame in encode(Point(x=3, tensor=torch.arange(5)))]
    refused = 0
    for _ in range(3000):
        frames = [bytearray(frame) for frame in whole]
        for _ in range(noise.randint(1, 4)):
            frame = frames[noise.randrange(2)]
            if frame:
                frame[noise.randrange(len(frame))] = noise.randrange(256)
        if noise.random() < 0.3:
            del frames[0][noise.randrange(len(frames[0])) :]
        try:
            assert isinstance(decode(frames, Point), Point)
        except FrameError:
            refused += 1
    assert refused > 1000


def test_objects_that_are_no_data_are_refused() -> None:
    with pytest.raises(TypeError, match=r"objects of type object cannot travel"):
        encode({"x": object()})


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_tensor_library() -> None:
    out = run(
        """
        import sys, threading
        import drivetrain_transport
        print([name for name in ("torch", "numpy", "vllm", "ray", "transformers") if name in sys.modules])
        print(threading.active_count())
        """
    )
    assert out == "[]\n1\n"


def test_numpy_arrays_travel_where_there_is_no_torch() -> None:
    out = run(
        """
        import sys
        sys.modules["torch"] = None
        import numpy
        from drivetrain_transport import decode, encode
        print(decode(encode({"a": numpy.arange(3)}), dict[str, numpy.ndarray])["a"].tolist())
        """
    )
    assert out == "[0, 1, 2]\n"


def test_torch_tensors_travel_where_there_is_no_numpy() -> None:
    out = run(
        """
        import sys, warnings
        sys.modules["numpy"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it found no numpy
            import torch
        from drivetrain_transport import decode, encode
        frames = encode({"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(True)})
        print({name: tensor.tolist() for name, tensor in decode(frames, dict[str, torch.Tensor]).items()})
        """
    )
    assert out == "{'a': [0, 1, 2], 'b': [1.0, 1.0], 'c': True}\n"
