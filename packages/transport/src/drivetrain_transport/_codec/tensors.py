"""Tensors as plain bytes: one table of dtypes, and the way in and out for torch and for numpy.

Neither library is imported here: a tensor can only reach `to_wire` when its library is loaded already, and a type
can only be asked of `from_wire` after it was imported. A tensor encoded from one library decodes into the other
where that one knows the dtype.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_origin

from drivetrain_transport._errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_DIMENSIONS = 64  # as many as torch and numpy allow
_MAX_ELEMENTS = 1 << 58  # beyond it, byte counts and strides overflow in torch and numpy
_BLOB = "bytes"  # no library has a dtype of this name
_NUMPY_DTYPES = {
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)),
}  # not longdouble: its bytes mean something else on another kind of processor


class WireTensor(NamedTuple):
    """A tensor's bytes in C order, beside what they mean."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    """Aliases the tensor's memory when the tensor was on the CPU and contiguous, and keeps that memory alive."""


class Blob:
    """Bytes that travel as a frame of their own, without a copy at either side."""

    __slots__ = ("data",)

    def __init__(self, data: Buffer) -> None:
        self.data = data


class TooLarge(ValueError):
    """A tensor has more bytes, `size`, than there is room for."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a tensor of {size} bytes is over the limit")
        self.size = size


def to_wire(obj: Any, room: int) -> WireTensor | None:
    """The wire form of a torch or numpy tensor, without a copy where there can be none; None for any other object.

    Raises:
        ValueError: The tensor is not dense (sparse, quantized, nested, meta, a wrapper such as DTensor, a masked
            array), or its numpy dtype means something else elsewhere (object, str, datetime64, structured, longdouble).
        TooLarge: It has more bytes than `room`; nothing was copied.
    """
    if isinstance(obj, Blob):
        size = memoryview(obj.data).nbytes
        if size > room:
            raise TooLarge(size)
        return WireTensor(_BLOB, (size,), obj.data)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        check_dense(obj, torch)
        return _from_torch(obj, torch, room)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return _from_numpy(obj, numpy, room)
    return None


def from_wire(kind: Any, tensor: WireTensor, *, copy: bool) -> Any:
    """The tensor as `kind`, which is `torch.Tensor` or `numpy.ndarray`; writable, and nobody else's memory.

    With copy=False it takes over `tensor.data` where that is writable and aligned.

    Raises:
        FrameError: `kind` is no tensor type, the dtype is unknown to its library, or the size is not the shape's.
    """
    check_shape(tensor.shape)
    if kind is Blob and tensor.dtype == _BLOB:
        return Blob(tensor.data)
    kind = get_origin(kind) or kind  # numpy.typing.NDArray[...] is a numpy.ndarray[...]
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _to_torch(tensor, torch, copy)
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _to_numpy(tensor, numpy, copy)
    raise FrameError(f"a tensor arrived where {kind.__name__} was expected")


def check_target(target: Any, path: str) -> None:
    """ValueError for something that cannot take in a tensor's bytes."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(target, torch.Tensor):
        check_dense(target, torch)
    elif numpy is None or not isinstance(target, numpy.ndarray):
        raise ValueError(f"into[{path!r}] is a {type(target).__name__}: give a torch tensor or a numpy array")
    elif not target.flags.writeable:
        raise ValueError(f"into[{path!r}] is read-only: give an array that can be written to")


def fill(target: Any, tensor: WireTensor) -> Callable[[], object]:
    """What copies the tensor's bytes into memory that is there already, when it is called.

    Nothing is allocated for a target on the CPU whose elements lie in a row.

    Raises:
        FrameError: The target has another dtype or shape, or the bytes do not fit it. Nothing was written.
    """
    check_shape(tensor.shape)
    dtype, shape = str(target.dtype).removeprefix("torch."), tuple(target.shape)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise FrameError(f"a {tensor.dtype} tensor of shape {tensor.shape} arrived for memory of {dtype}, {shape}")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is None or not isinstance(target, torch.Tensor):
        assert numpy is not None
        array = _to_numpy(tensor, numpy, copy=False)
        return lambda: numpy.copyto(target, array)
    target = target.detach()
    view = memoryview(tensor.data)
    in_a_row = target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if view.readonly and in_a_row and target.dtype is not torch.bool and _size(tensor, target.element_size()):
        memory = (ctypes.c_ubyte * view.nbytes).from_address(target.data_ptr())
        return lambda: memoryview(memory).cast("B").__setitem__(slice(None), view.cast("B"))
    source = _to_torch(tensor, torch, copy=False)
    if not target.is_conj() and not target.is_neg():
        target, source = _numbers(target, torch), _numbers(source, torch)
    return lambda: target.copy_(source)


def check_shape(shape: tuple[int, ...]) -> None:
    """FrameError for a shape that no tensor can have."""
    if len(shape) > MAX_DIMENSIONS:
        raise FrameError(f"no tensor has {len(shape)} dimensions")
    extent = math.prod(max(size, 1) for size in shape)  # strides of empty tensors skip the zeros as well
    if any(size < 0 for size in shape) or extent > _MAX_ELEMENTS:
        raise FrameError(f"no tensor has the shape {shape}")


def check_dense(tensor: Any, torch: Any) -> None:
    """ValueError for a torch tensor that is not simply a block of memory of its own."""
    kind = type(tensor)
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        form = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(
            f"only dense tensors with data travel, this one is {form}, {tensor.dtype}, on {tensor.device}: "
            "make it dense first"
        )
    # A class with a dispatch of its own (DTensor, FakeTensor, MaskedTensor, ...) may have no memory, or mean more.
    if hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        shape = tuple(tensor.shape)
        raise ValueError(
            f"{kind.__name__} of shape {shape} wraps other tensors: send what it holds, or gather it first"
        )


def _from_torch(tensor: Any, torch: Any, room: int) -> WireTensor:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    size = tensor.numel() * tensor.element_size()
    if size > room:
        raise TooLarge(size)
    if size == 0:
        return WireTensor(dtype, shape, b"")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = _numbers(tensor, torch).cpu().contiguous()
    data = (ctypes.c_char * size).from_address(tensor.data_ptr())
    data.owner = tensor  # the view keeps the memory that it points into
    return WireTensor(dtype, shape, data)


def _numbers(tensor: Any, torch: Any) -> Any:
    # A tensor of int4, complex32 and their like is moved by torch not at all, or with a warning; its bytes are.
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor if dtype is None else tensor.view(dtype)


def _from_numpy(array: Any, numpy: Any, room: int) -> WireTensor:
    if array.dtype.name not in _NUMPY_DTYPES:
        raise ValueError(
            f"numpy dtype {array.dtype} cannot travel: convert the array to numbers or bools of a fixed size first"
        )
    if "numpy.ma" in sys.modules and isinstance(array, numpy.ma.MaskedArray):
        raise ValueError(f"a masked array of shape {array.shape} cannot travel: send its data and its mask")
    if array.nbytes > room:
        raise TooLarge(array.nbytes)
    shape = tuple(array.shape)
    dtype = array.dtype.newbyteorder("=")
    flat = numpy.asarray(array, dtype=dtype, order="C").reshape(-1)
    return WireTensor(dtype.name, shape, memoryview(flat.view(numpy.uint8)) if flat.size else b"")


def _to_torch(tensor: WireTensor, torch: Any, copy: bool) -> Any:
    dtype = vars(torch).get(tensor.dtype)
    if not isinstance(dtype, torch.dtype):
        raise FrameError(f"torch {torch.__version__} has no dtype {tensor.dtype!r}")
    if tensor.dtype.startswith(("qint", "quint")):
        raise FrameError(f"torch dtype {tensor.dtype!r} has no dense tensors")
    data = _own(tensor, dtype.itemsize, copy)
    if data is None:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(tensor.shape)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype is torch.bool and int(raw.max()) > 1:
        raise FrameError(f"a bool tensor of shape {tensor.shape} holds bytes other than 0 and 1")
    return raw.view(dtype).reshape(tensor.shape)


def _to_numpy(tensor: WireTensor, numpy: Any, copy: bool) -> Any:
    if tensor.dtype not in _NUMPY_DTYPES:
        raise FrameError(f"numpy has no dtype {tensor.dtype!r} that can travel")
    dtype = numpy.dtype(tensor.dtype)
    data = _own(tensor, dtype.itemsize, copy)
    if data is None:
        return numpy.empty(tensor.shape, dtype=dtype)
    raw = numpy.frombuffer(data, dtype=numpy.uint8)
    if dtype.kind == "b" and int(raw.max()) > 1:
        raise FrameError(f"a bool tensor of shape {tensor.shape} holds bytes other than 0 and 1")
    return raw.view(dtype).reshape(tensor.shape)


def _size(tensor: WireTensor, item: int) -> int:
    """The tensor's bytes by its shape; FrameError when its frame has another number of them."""
    size, expected = memoryview(tensor.data).nbytes, math.prod(tensor.shape) * item
    if size != expected:
        raise FrameError(f"a {tensor.dtype} tensor of shape {tensor.shape} has {expected} bytes, its frame has {size}")
    return size


def _own(tensor: WireTensor, item: int, copy: bool) -> Buffer | None:
    """Writable memory that holds the tensor's bytes and belongs to it alone; None for a tensor without elements.

    The size is compared with the shape before anything is allocated.
    """
    view = memoryview(tensor.data)
    if _size(tensor, item) == 0:
        return None
    if copy or view.readonly or ctypes.addressof(ctypes.c_char.from_buffer(view)) % min(item, 8):
        return bytearray(view)
    return view
