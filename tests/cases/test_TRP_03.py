"""TRP-03: tensors that an encoding cannot carry: bfloat16 without a numpy type, empty ones, scrambled views, read-only.

vllm-project/vllm PR 16860, PR 17203; vllm-project/vllm-omni PR 6627; verl-project/verl#4228; zeromq/pyzmq#1566. There
tensors took a way through numpy, strides were left out, and what arrived was a view of an immutable or reused buffer.

Here dtype, shape and every bit arrive, on the wire in no more bytes than the elements have, and the result may be
written to without anyone else's noticing. The whole table of dtypes is in `tests/transport/test_tensors.py`.
"""

from collections.abc import Callable

import pytest
import torch
from drivetrain_transport import decode, encode

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
]
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "()": (lambda t: t[1, 2], ()),
    "(0,)": (lambda t: t[0, :0], (0,)),
    "(0, 5)": (lambda t: t[:0, :5], (0, 5)),
    "(3, 4)": (lambda t: t[:3, :4].contiguous(), (3, 4)),
    "transposed": (lambda t: t[:3, :4].T, (4, 3)),
    "every second row": (lambda t: t[::2], (3, 6)),
    "expanded": (lambda t: t[:1].expand(4, 6), (4, 6)),
}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])] if torch.cuda.is_available() else ["cpu"]


def source(dtype: torch.dtype, device: str) -> torch.Tensor:
    """36 elements of any bits; the floats have NaNs with a payload, of either sign."""
    if dtype is torch.bool:
        return (torch.arange(36) % 3 == 0).reshape(6, 6).to(device)
    raw = torch.randint(0, 256, (36 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    numbers = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    nan = {torch.float32: [0x7FC12345, -0x3EDCBB], torch.float16: [0x7E55, -0x1AB], torch.bfloat16: [0x7FC1, -0x3F]}
    for at, bits in enumerate(nan.get(dtype, [])):
        numbers[at * 8] = bits
    tensor = numbers.view(dtype).reshape(6, 6)
    assert not nan.get(dtype) or int(tensor.isnan().sum()) >= 2
    return tensor.to(device)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "requires_grad"),
    [(dtype, requires_grad) for dtype in DTYPES for requires_grad in sorted({False, dtype.is_floating_point})],
)
def test_every_dtype_in_every_layout(dtype: torch.dtype, layout: str, requires_grad: bool, device: str) -> None:
    view, shape = LAYOUTS[layout]
    sent = view(source(dtype, device).requires_grad_(requires_grad))
    expected = bits(sent)

    frames = encode({"tensor": sent})
    assert memoryview(frames[1]).nbytes == sent.numel() * dtype.itemsize
    received = decode([bytes(frame) for frame in frames], dict[str, torch.Tensor])["tensor"]

    assert (received.dtype, received.shape, received.requires_grad) == (dtype, shape, False)
    assert bits(received) == expected
    received.reshape(-1).view(torch.uint8).bitwise_xor_(1)
    assert bits(sent) == expected
    assert bits(received) == [value ^ 1 for value in expected]


def test_a_bfloat16_matrix_of_3_by_4_is_24_bytes_on_the_wire() -> None:
    head, body = encode(torch.full((3, 4), 1.5, dtype=torch.bfloat16))
    assert bytes(body) == b"\xc0\x3f" * 12
    assert memoryview(head).nbytes < 32


def test_what_is_read_only_arrives_writable() -> None:
    received = decode([bytes(frame) for frame in encode(torch.zeros(3))], torch.Tensor, copy=False)
    received += 1
    assert received.tolist() == [1.0, 1.0, 1.0]
