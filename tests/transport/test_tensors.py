"""Tensors through frames: every dtype and every layout, bit for bit, for torch and for numpy."""

import ctypes
import gc

import msgspec
import numpy as np
import pytest
import torch
from drivetrain_transport import FrameError, decode, encode
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint2x4, torch.quint4x2}
TORCH_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} - QUANTIZED, key=str)
"""All that this torch has: the float8 and float4 formats, complex32, int1 to uint7 and bits among them."""

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
    size = torch.zeros(1, dtype=torch.complex128).view(dtype).element_size()
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (36 * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(6, 6)


def bits(tensor: torch.Tensor) -> bytes:
    numbers = tensor.detach()
    if tensor.element_size() <= 8:
        numbers = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return bytes(numbers.contiguous().reshape(-1).view(torch.uint8).tolist())


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
@pytest.mark.parametrize(
    "dtype",
    [
        *("float64", "float32", "float16", "bool", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    ],
)
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


def test_the_dtypes_are_all_there() -> None:
    assert {torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.bfloat16, torch.complex32} < set(TORCH_DTYPES)
    assert {torch.uint16, torch.uint32, torch.uint64, torch.int4, torch.float4_e2m1fn_x2} < set(TORCH_DTYPES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_a_graph_leaves_it(layout: str) -> None:
    leaf = torch.arange(36.0).reshape(6, 6).requires_grad_()
    source = LAYOUTS[layout](leaf)
    assert source.requires_grad
    copy = decode(encode(source), torch.Tensor)
    assert not copy.requires_grad
    assert torch.equal(copy, source.detach())
    copy += 1
    assert torch.equal(leaf.detach(), torch.arange(36.0).reshape(6, 6))


def test_read_only_arrays_arrive_writable() -> None:
    source = np.frombuffer(bytes(range(8)), dtype=np.uint16)
    frames = encode(source)
    copy = decode(frames, np.ndarray)
    copy[0] = 0xFFFF
    assert source.tolist() == [0x0100, 0x0302, 0x0504, 0x0706]
    assert memoryview(frames[1]).nbytes == 8


def test_fields_may_be_annotated_with_the_dtype() -> None:
    class Typed(msgspec.Struct):
        array: NDArray[np.float32]

    assert decode(encode(Typed(array=np.ones(2, dtype=np.float32))), Typed).array.tolist() == [1.0, 1.0]


def test_big_endian_arrays_arrive_in_the_host_order() -> None:
    copy = decode(encode(np.array([1, 2], dtype=">i4")), np.ndarray)
    assert copy.dtype == np.dtype("int32")
    assert copy.tolist() == [1, 2]


def test_the_receiver_chooses_the_library() -> None:
    assert decode(encode(torch.arange(3)), np.ndarray).tolist() == [0, 1, 2]
    copy = decode(encode(np.array([[True, False]])), torch.Tensor)
    assert copy.dtype is torch.bool
    assert copy.tolist() == [[True, False]]
    with pytest.raises(FrameError, match=r"numpy has no dtype 'bfloat16'"):
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


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")  # torch's notes that nested, masked and quantized tensors are prototypes
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "only dense tensors"),
        (lambda: torch.empty(3, device="meta"), "on meta"),
        (lambda: np.array(["text"]), "numpy dtype <U4 cannot travel"),
        (lambda: np.array([object()]), "numpy dtype object cannot travel"),
        (lambda: np.array(["2020-01-01"], dtype="datetime64[D]"), "cannot travel"),
        (lambda: np.ones(2, dtype=np.longdouble), "numpy dtype float128 cannot travel"),
        (lambda: np.zeros(2, dtype="i4,f8"), "cannot travel"),
        (lambda: np.ma.masked_array([1, 2], [False, True]), "masked array of shape .* send its data and its mask"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "only dense tensors .* torch.qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "only dense tensors .* nested"),
        (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor .* wraps other tensors"),
        (fake_tensor, "FakeTensor .* wraps other tensors"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode(make())  # type: ignore[operator]


def test_a_tensor_over_the_limit_is_refused_before_it_is_copied() -> None:
    endless = torch.ones(1, dtype=torch.uint8).expand(1 << 50)
    with pytest.raises(ValueError, match=f"a list of more than {(1 << 50) + 3} bytes is over the limit of 4096"):
        encode([torch.zeros(3, dtype=torch.uint8), endless], max_bytes=4096)
    with pytest.raises(ValueError, match=r"a ndarray of more than 1125899906842624 bytes"):
        encode(np.broadcast_to(np.uint8(1), (1 << 50,)))


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
