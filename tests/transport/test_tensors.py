"""Tensors through frames: every dtype and every layout, bit for bit, for torch and for numpy."""

import ctypes
import gc

import msgspec
import numpy as np
import pytest
import torch
from drivetrain_transport import FrameError, decode, encode

TORCH_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]

LAYOUTS = {
    "scalar": lambda t: t[0, 0],
    "empty": lambda t: t[0, :0],
    "empty_matrix": lambda t: t[:0, :5],
    "matrix": lambda t: t[:3, :4],
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "every_second_row": lambda t: t[::2],
    "expanded": lambda t: t[:1, :].expand(4, 6) if isinstance(t, torch.Tensor) else np.broadcast_to(t[:1, :], (4, 6)),
}


def torch_values(dtype: torch.dtype) -> torch.Tensor:
    """A 6 by 6 tensor of arbitrary bit patterns, NaN payloads among them."""
    if dtype is torch.bool:
        return (torch.arange(36) % 3 == 0).reshape(6, 6)
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (36 * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(6, 6)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_torch_round_trip_keeps_every_bit(dtype: torch.dtype, layout: str) -> None:
    source = LAYOUTS[layout](torch_values(dtype))
    expected = bits(source)
    frames = encode(source)
    copy = decode(frames, torch.Tensor)
    assert copy.dtype is dtype
    assert copy.shape == source.shape
    assert bits(copy) == expected
    assert memoryview(frames[1]).nbytes == source.numel() * source.element_size()
    if source.numel():
        copy.reshape(-1).view(torch.uint8).bitwise_xor_(1)  # writable, and nobody else's memory
        assert bits(source) == expected
        assert bytes(frames[1]) == expected


def test_a_bfloat16_matrix_of_3_by_4_is_24_bytes_on_the_wire() -> None:
    frames = encode(torch.ones(3, 4, dtype=torch.bfloat16))
    assert bytes(frames[1]) == b"\x80\x3f" * 12


def test_nan_payload_survives() -> None:
    source = torch.tensor([0x7FC1, -64], dtype=torch.int16).view(torch.bfloat16)
    assert decode(encode(source), torch.Tensor).view(torch.int16).tolist() == [0x7FC1, -64]


def test_gradients_stay_at_home() -> None:
    source = torch.tensor([1.0, 2.0], requires_grad=True)
    for tensor in (source, torch.nn.Parameter(source.detach()), source * 2):
        copy = decode(encode(tensor), torch.Tensor)
        assert not copy.requires_grad
        assert copy.tolist() == tensor.tolist()


def test_conjugate_and_negative_views_are_resolved() -> None:
    source = torch.tensor([1 + 2j, 3 - 4j])
    assert decode(encode(source.conj()), torch.Tensor).tolist() == [1 - 2j, 3 + 4j]
    assert decode(encode(source.conj().imag), torch.Tensor).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int8", "uint16", "bool", "complex64"])
def test_numpy_round_trip_keeps_every_bit(dtype: str, layout: str) -> None:
    values = np.arange(36).reshape(6, 6)
    source = LAYOUTS[layout]((values % 3 == 0) if dtype == "bool" else values.astype(dtype))
    source = np.asarray(source)
    copy = decode(encode(source), np.ndarray)
    assert copy.dtype == source.dtype
    assert copy.shape == source.shape
    assert copy.tobytes() == source.tobytes()
    assert copy.flags.writeable
    assert not np.shares_memory(copy, source)


def test_big_endian_arrays_arrive_in_the_host_order() -> None:
    copy = decode(encode(np.array([1, 2], dtype=">i4")), np.ndarray)
    assert copy.dtype == np.dtype("int32")
    assert copy.tolist() == [1, 2]


def test_the_receiver_chooses_the_library() -> None:
    assert decode(encode(torch.arange(3)), np.ndarray).tolist() == [0, 1, 2]
    copy = decode(encode(np.array([[True, False]])), torch.Tensor)
    assert copy.dtype is torch.bool
    assert copy.tolist() == [[True, False]]
    with pytest.raises(FrameError, match=r"numpy .* has no dtype 'bfloat16'"):
        decode(encode(torch.ones(2, dtype=torch.bfloat16)), np.ndarray)


def test_contiguous_tensors_are_not_copied_and_stay_alive() -> None:
    source = torch.arange(1000)
    address = source.data_ptr()
    frames = encode(source)
    assert ctypes.addressof(ctypes.c_char.from_buffer(frames[1])) == address
    source[0] = 99
    assert decode(frames, torch.Tensor)[0] == 99
    del source
    gc.collect()
    assert decode(frames, torch.Tensor)[999] == 999


def test_without_copy_the_tensor_takes_over_aligned_writable_memory() -> None:
    head, body = encode(torch.arange(4))
    owned = bytearray(bytes(body))
    taken = decode([head, owned], torch.Tensor, copy=False)
    taken[0] = 7
    assert owned[0] == 7

    shifted = memoryview(bytearray(33))[1:]  # off the alignment of an int64
    shifted[:] = owned
    moved = decode([head, shifted], torch.Tensor, copy=False)
    moved[0] = 8
    assert shifted[0] == 7
    assert moved.tolist() == [8, 1, 2, 3]

    constant = decode([head, bytes(owned)], torch.Tensor, copy=False)
    constant[0] = 9
    assert constant.tolist() == [9, 1, 2, 3]


class Chunk(msgspec.Struct):
    named: list[tuple[str, torch.Tensor]]
    mask: torch.Tensor | None = None
    extra: dict[str, np.ndarray] = {}


def test_tensors_anywhere_in_a_struct() -> None:
    shared = torch.arange(3)
    frames = encode(Chunk(named=[("a", shared), ("b", shared)], extra={"x": np.zeros(2)}))
    assert len(frames) == 4
    copy = decode(frames, Chunk)
    copy.named[0][1][0] = 5
    assert copy.named[1][1].tolist() == [0, 1, 2]
    assert copy.mask is None
    assert copy.extra["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "only dense tensors"),
        (lambda: torch.empty(3, device="meta"), "on meta"),
        (lambda: np.array(["text"]), "numpy dtype <U4 cannot travel"),
        (lambda: np.array([object()]), "numpy dtype object cannot travel"),
        (lambda: np.array(["2020-01-01"], dtype="datetime64[D]"), "cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode(make())  # type: ignore[operator]


class Wrapper(torch.Tensor):
    """Has no data of its own, as DTensor has none."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{function} must not be reached")


def test_wrapper_tensors_are_refused() -> None:
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2, 3))
    with pytest.raises(ValueError, match=r"Wrapper of shape \(2, 3\) wraps other tensors"):
        encode(wrapper)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu_arrives_on_the_cpu() -> None:
    source = torch.arange(6, dtype=torch.bfloat16, device="cuda").reshape(2, 3).T
    copy = decode(encode(source), torch.Tensor)
    assert copy.device.type == "cpu"
    assert copy.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
