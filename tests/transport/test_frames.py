"""Frames that are no message, or not the expected one, are refused by name and before anything is allocated."""

import random
import subprocess
import sys
import textwrap
import time
import tracemalloc
from typing import Any

import msgspec
import numpy as np
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
        ([message(reference("float32", [1] * 65, 1)), bytes(4)], "Expected `array` of length <= 64"),
        ([message(reference("float33", [2], 1)), bytes(8)], "no dtype 'float33'"),
        ([message(reference("Tensor", [2], 1)), bytes(8)], "no dtype 'Tensor'"),
        ([message(reference("qint8", [8], 1)), bytes(8)], "'qint8' has no dense tensors"),
        ([message(reference("bool", [2], 1)), b"\x01\x02"], "bytes other than 0 and 1"),
        ([message(reference("float32", 2, 1)), bytes(8)], "Expected `array`, got `int`"),
        ([message(reference("float32", [2], 1), "one"), bytes(8)], r"Expected `int`, got `str` - at `\$.x`"),
        ([message(reference("float32" * 9, [2], 1)), bytes(8)], "Expected `str` of length <= 32"),
        ([message([1.0, 2.0])], "expected Tensor, got list"),
        ([message(msgspec.msgpack.Ext(5, b""))], "extension 5 has no meaning"),
        ([message(reference("float32", [2], 1)), bytes(8), b"more"], "1 tensors, of 2 frames, belong to no field"),
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


def test_a_tensor_in_a_field_of_any_type_is_refused() -> None:
    with pytest.raises(FrameError, match=r"belong to no field"):
        decode(encode({"x": torch.ones(1)}), Any)
    with pytest.raises(FrameError, match=r"1 tensors, of 0 frames, belong to no field"):
        decode([b"DT<\x01" + msgspec.msgpack.encode({"x": reference("float32", [0], 7)})], dict[str, Any])


class Update(msgspec.Struct, tag=True, frozen=True):
    """As a learner sends it to engines."""

    version: int
    weights: dict[str, torch.Tensor]
    steps: tuple[np.ndarray, ...] = ()


def update(value: float = 2.0, **other: torch.Tensor) -> list[bytes]:
    weights = {"layer.0": torch.full((3, 4), value, dtype=torch.bfloat16), "bias": torch.full((2,), value), **other}
    return [bytes(frame) for frame in encode(Update(version=3, weights=weights, steps=(np.full(2, 8),)))]


def memory() -> dict[str, Any]:
    return {
        "weights.layer.0": torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16).T),
        "weights.bias": torch.zeros(2),
        "steps.0": np.zeros(2, dtype=np.int64),
        "weights.other": torch.zeros(1),
    }


@pytest.mark.parametrize("writable", [True, False])
def test_tensors_are_decoded_into_memory_that_is_there(writable: bool) -> None:
    into = memory()
    addresses = [into[path].data_ptr() for path in ("weights.layer.0", "weights.bias")]
    for value in (2.0, 5.0):
        frames = [bytearray(frame) for frame in update(value)] if writable else update(value)
        message = decode(frames, Update, into=into)
        assert message.version == 3
        assert message.weights["layer.0"] is into["weights.layer.0"]
        assert message.weights["bias"] is into["weights.bias"]
        assert message.steps[0] is into["steps.0"]
        assert (into["weights.layer.0"] == value).all()
        assert into["weights.bias"].tolist() == [value] * 2
        assert into["steps.0"].tolist() == [8, 8]
        assert into["weights.other"].tolist() == [0.0]
    assert [into[path].data_ptr() for path in ("weights.layer.0", "weights.bias")] == addresses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_are_decoded_into_the_memory_of_a_gpu() -> None:
    into = {"weights.layer.0": torch.zeros(4, 3, dtype=torch.bfloat16, device="cuda").T}
    message = decode(update(3.0), Update, into=into)
    assert message.weights["layer.0"] is into["weights.layer.0"]
    assert (into["weights.layer.0"] == 3.0).all()
    numbers = torch.zeros(4, dtype=torch.uint8, device="cuda").view(torch.int4)
    sent = torch.tensor([1, 2, 3, 4], dtype=torch.uint8).view(torch.int4)
    decode(encode([sent]), list[torch.Tensor], into={"0": numbers})
    assert numbers.view(torch.uint8).tolist() == [1, 2, 3, 4]


def test_decoding_into_memory_allocates_none() -> None:
    big = torch.arange(1 << 20, dtype=torch.int32)
    frames = [memoryview(bytes(frame)) for frame in encode({"big": big})]
    target = torch.zeros_like(big)
    tracemalloc.start()
    try:
        decode(frames, dict[str, torch.Tensor], into={"big": target})
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
        decode(frames, dict[str, torch.Tensor])
        assert tracemalloc.get_traced_memory()[1] > big.nbytes  # as it would be without
    finally:
        tracemalloc.stop()
    assert torch.equal(target, big)


@pytest.mark.parametrize(
    ("path", "target", "says"),
    [
        ("weights.bias", torch.zeros(3), r"weights.bias: a float32 tensor of shape \(2,\) arrived for .*, \(3,\)"),
        ("weights.bias", torch.zeros(2, dtype=torch.float16), r"weights.bias: .* for memory of float16, \(2,\)"),
        ("steps.0", np.zeros((2, 1), dtype=np.int64), r"steps.0: a int64 .* int64, \(2, 1\) - at `\$.steps\[0\]`"),
    ],
)
def test_memory_of_another_form_is_named_and_nothing_is_written(path: str, target: object, says: str) -> None:
    into = {**memory(), path: target}
    with pytest.raises(FrameError, match=says):
        decode(update(), Update, into=into)
    for tensor in into.values():
        assert not tensor.any()


def test_a_message_that_breaks_off_leaves_given_memory_alone() -> None:
    into = memory()
    with pytest.raises(FrameError, match=r"has 16 bytes, its frame has 15 - at `\$.steps"):
        decode([*update()[:-1], bytes(15)], Update, into=into)
    with pytest.raises(FrameError, match=r"belong to no field"):
        decode([*update(), b"more"], Update, into=into)
    for tensor in into.values():
        assert not tensor.any()


def test_two_tensors_of_one_path_are_refused() -> None:
    frames = encode({"a": {"b": torch.ones(1)}, "a.b": {"c": torch.ones(1)}, "a.b.c": {"": torch.ones(1)}})
    assert decode(frames, dict[str, dict[str, torch.Tensor]], into={"a.b": torch.zeros(1)})["a"]["b"] == 1
    frames = encode({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}})
    with pytest.raises(FrameError, match=r"two tensors of the message have the path 'a.b.c'"):
        decode(frames, dict[str, dict[str, torch.Tensor]], into={"a.b.c": torch.zeros(1)})


def test_memory_that_cannot_be_written_is_named() -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for target, says in (
        (fixed, "read-only"),
        (bytearray(8), "a bytearray: give a"),
        (torch.eye(2).to_sparse(), "dense"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            decode(update(), Update, into={"weights.bias": target})
        assert not isinstance(caught.value, FrameError)


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


def test_a_shape_of_a_million_dimensions_costs_nothing() -> None:
    start = time.monotonic()
    with pytest.raises(FrameError, match=r"of length <= 64") as caught:
        decode([message(reference("float32", [2**62] * 1_000_000, 1)), bytes(8)], Point)
    assert time.monotonic() - start < 5
    assert len(str(caught.value)) < 200


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


def test_endpoints_need_neither_torch_nor_numpy() -> None:
    out = run(
        """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        import msgspec
        from drivetrain_transport import Endpoint, Protocol

        class Ask(msgspec.Struct, tag=True):
            data: bytes

        async def answer(peer, request):
            return Ask(data=request.data[::-1])

        protocol = Protocol(requests=Ask, replies=Ask)
        with Endpoint.bind(protocol=protocol, handler=answer) as server:
            with Endpoint.connect(server.address, protocol=protocol) as client:
                print(client.peer.call(Ask(data=b"abc"), timeout=10).data, client.stats.waits)
        """
    )
    assert out == "b'cba' 1\n"


def test_arrays_are_called_for_where_there_is_no_torch() -> None:
    out = run(
        """
        import sys
        sys.modules["torch"] = None
        import msgspec, numpy
        from drivetrain_transport import Endpoint, Protocol, decode, encode

        class Ask(msgspec.Struct, tag=True):
            array: numpy.ndarray

        async def answer(peer, request):
            return Ask(array=request.array + 1)

        protocol = Protocol(requests=Ask, replies=Ask)
        with Endpoint.bind(protocol=protocol, handler=answer) as server:
            with Endpoint.connect(server.address, protocol=protocol) as client:
                print(client.peer.call(Ask(array=numpy.arange(3.0)), timeout=10).array)
        memory = numpy.zeros(2)
        decode(encode(Ask(array=numpy.ones(2))), Ask, into={"array": memory})
        print(memory)
        """
    )
    assert out == "[1. 2. 3.]\n[1. 1.]\n"


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
