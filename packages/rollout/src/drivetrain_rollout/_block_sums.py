"""A Triton kernel for ``_draw``: log sum exp of each block of a row's logits, in one pass and in the logits' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]
    logits, row_stride, temperature, sums, length, blocks, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(logits + row * row_stride + column, mask=column < length, other=float("-inf")).to(tl.float32)
    value = value / tl.load(temperature + row)
    highest = tl.max(value, axis=0)
    # A block in which nothing has probability must give -inf, not NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(value - base), axis=0)
    tl.store(sums + row * blocks + block, base + tl.log(total))


def block_sums(logits: Tensor, temperature: Tensor, width: int) -> Tensor:
    """log sum exp(logits / temperature) of each block.

    Args:
        logits: [B, V] on a GPU; neighbours in a row lie side by side.
        temperature: [B], float32.
        width: of a block, a power of 2.

    Returns:
        [B, ceil(V / width)], float32.
    """
    rows, length = logits.shape
    blocks = -(-length // width)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _sum_block[(rows, blocks)](logits, logits.stride(0), temperature, sums, length, blocks, WIDTH=width)
    return sums
