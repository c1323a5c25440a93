"""Tensors as plain bytes: one table of dtypes, and the way in and out for torch and for numpy.

Neither library is imported here: a tensor can only reach `to_wire` when its library is loaded already, and a type
can only be asked of `from_wire` after it was imported. A tensor encoded from one library decodes into the other
where that one knows the dtype.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain_transport._errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAX_DIMENSIONS = 64  # as many as torch and numpy allow
_MAX_ELEMENTS = 1 << 58  # beyond it, byte counts and strides overflow in torch and numpy


class WireTensor(NamedTuple):
    """A tensor's bytes in C order, beside what they mean."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    """Aliases the tensor's memory when the tensor was on the CPU and contiguous, and keeps that memory alive."""


def to_wire(obj: Any) -> WireTensor | None:
    """The wire form of a torch or numpy tensor, without a copy where there can be none; None for any other object.

    Raises:
        ValueError: The tensor is not dense (sparse, quantized, meta, a wrapper such as DTensor), or its numpy dtype
            has no counterpart on the wire (object, str, datetime64, structured).
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(obj, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return _from_numpy(obj, numpy)
    return None


def from_wire(kind: type[Any], tensor: WireTensor, *, copy: bool) -> Any:
    """The tensor as `kind`, which is `torch.Tensor` or `numpy.ndarray`; writable, and nobody else's memory.

    With copy=False it takes over `tensor.data` where that is writable and aligned.

    Raises:
        FrameError: `kind` is no tensor type, the dtype is unknown to its library, or the size is not the shape's.
    """
    extent = math.prod(max(size, 1) for size in tensor.shape)  # strides of empty tensors skip the zeros as well
    if len(tensor.shape) > _MAX_DIMENSIONS or any(size < 0 for size in tensor.shape) or extent > _MAX_ELEMENTS:
        raise FrameError(f"no tensor has the shape {tensor.shape}")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _to_torch(tensor, torch, copy)
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _to_numpy(tensor, numpy, copy)
    raise FrameError(f"a tensor arrived where {kind.__name__} was expected")


def _from_torch(tensor: Any, torch: Any) -> WireTensor:
    shape = tuple(tensor.shape)
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise ValueError(
            f"{type(tensor).__name__} of shape {shape} wraps other tensors: send what it holds, or gather it first"
        )
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(
            f"only dense tensors with data travel, this one is {tensor.layout}, {tensor.dtype}, on {tensor.device}: "
            "make it dense first"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return WireTensor(dtype, shape, b"")
    data = (ctypes.c_char * size).from_address(tensor.data_ptr())
    data.owner = tensor  # the view keeps the memory that it points into
    return WireTensor(dtype, shape, data)


def _from_numpy(array: Any, numpy: Any) -> WireTensor:
    if array.dtype.kind not in "biufc":
        raise ValueError(f"numpy dtype {array.dtype} cannot travel: convert the array to numbers or bools first")
    shape = tuple(array.shape)
    dtype = array.dtype.newbyteorder("<")
    flat = numpy.asarray(array, dtype=dtype, order="C").reshape(-1)
    return WireTensor(dtype.name, shape, memoryview(flat.view(numpy.uint8)) if flat.size else b"")


def _to_torch(tensor: WireTensor, torch: Any, copy: bool) -> Any:
    dtype = vars(torch).get(tensor.dtype)
    if not isinstance(dtype, torch.dtype):
        raise FrameError(f"torch {torch.__version__} has no dtype {tensor.dtype!r}")
    try:
        item = torch.empty((), dtype=dtype).element_size()
    except (RuntimeError, NotImplementedError) as error:
        raise FrameError(f"torch dtype {tensor.dtype!r} has no dense tensors: {error}") from None
    data = _own(tensor, item, copy)
    if data is None:
        return torch.empty(tensor.shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype is torch.bool and int(raw.max()) > 1:
        raise FrameError(f"a bool tensor of shape {tensor.shape} holds bytes other than 0 and 1")
    return raw.view(dtype).reshape(tensor.shape)


def _to_numpy(tensor: WireTensor, numpy: Any, copy: bool) -> Any:
    try:
        dtype = numpy.dtype(tensor.dtype)
    except TypeError:
        raise FrameError(f"numpy {numpy.__version__} has no dtype {tensor.dtype!r}") from None
    if dtype.kind not in "biufc":
        raise FrameError(f"numpy dtype {tensor.dtype!r} does not travel")
    data = _own(tensor, dtype.itemsize, copy)
    if data is None:
        return numpy.empty(tensor.shape, dtype=dtype)
    raw = numpy.frombuffer(data, dtype=numpy.uint8)
    if dtype.kind == "b" and int(raw.max()) > 1:
        raise FrameError(f"a bool tensor of shape {tensor.shape} holds bytes other than 0 and 1")
    return raw.view(dtype).reshape(tensor.shape)


def _own(tensor: WireTensor, item: int, copy: bool) -> Buffer | None:
    """Writable memory that holds the tensor's bytes and belongs to it alone; None for a tensor without elements.

    The size is compared with the shape before anything is allocated.
    """
    view = memoryview(tensor.data)
    expected = math.prod(tensor.shape) * item
    if view.nbytes != expected:
        raise FrameError(
            f"a {tensor.dtype} tensor of shape {tensor.shape} has {expected} bytes, its frame has {view.nbytes}"
        )
    if expected == 0:
        return None
    if copy or view.readonly or ctypes.addressof(ctypes.c_char.from_buffer(view)) % min(item, 8):
        return bytearray(view)
    return view
