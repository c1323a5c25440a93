# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""``_draw`` on a GPU: two Triton kernels, so that a step costs two launches and reads its logits once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_rollout._draw import Settings


@triton.jit
def _sum_blocks(
    logits, row_stride, temperature, sums, highest, likeliest, length, blocks, WIDTH: tl.constexpr, GREEDY: tl.constexpr
):
    """Of each row and block: log sum exp; if GREEDY, the highest value and its column too."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(logits + row * row_stride + column, mask=column < length, other=float("-inf")).to(tl.float32)
    value = value / tl.load(temperature + row)
    top, at = tl.max(value, axis=0, return_indices=True)
    # A block in which nothing has probability must give -inf, not NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sums + row * blocks + block, base + tl.log(tl.sum(tl.exp(value - base), axis=0)))
    if GREEDY:
        tl.store(highest + row * blocks + block, top)
        tl.store(likeliest + row * blocks + block, block * WIDTH + at)


@triton.jit
def _splitmix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fall(weights, uniform, index):
    """See ``_draw._fall``."""
    ends = tl.cumsum(weights, axis=0)
    some = weights > 0
    target = uniform * tl.max(tl.where(some, ends, 0.0), axis=0)
    found = tl.min(tl.where(some & (ends > target), index, 2147483647), axis=0)
    return tl.where(found == 2147483647, 0, found)


@triton.jit
def _draw_rows(
    logits, row_stride, temperature, seeds, positions, greedy, sums, highest, likeliest, tokens, logprobs,
    length, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    block_sums = tl.load(sums + row * blocks + index, mask=index < blocks, other=float("-inf"))
    top = tl.max(block_sums, axis=0)
    total = top + tl.log(tl.sum(tl.exp(block_sums - top), axis=0))

    mixed = _splitmix(tl.load(seeds + row).to(tl.uint64, bitcast=True))
    mixed = _splitmix(mixed ^ tl.load(positions + row).to(tl.uint64, bitcast=True))
    mask: tl.constexpr = (1 << BITS) - 1
    scale: tl.constexpr = 2.0**-BITS
    first = (mixed & mask).to(tl.float32) * scale
    second = ((mixed >> 32) & mask).to(tl.float32) * scale

    block = _fall(tl.exp(block_sums - total), first, index)
    inside = tl.arange(0, WIDTH)
    column = block * WIDTH + inside
    value = tl.load(logits + row * row_stride + column, mask=column < length, other=float("-inf")).to(tl.float32)
    value = value / tl.load(temperature + row)
    within = _fall(tl.exp(value - tl.load(sums + row * blocks + block)), second, inside)
    token = (block * WIDTH + within).to(tl.int64)
    chosen = tl.sum(tl.where(inside == within, value, 0.0), axis=0)
    if GREEDY:
        tops = tl.load(highest + row * blocks + index, mask=index < blocks, other=float("-inf"))
        best, at = tl.max(tops, axis=0, return_indices=True)
        take = tl.load(greedy + row)
        token = tl.where(take, tl.load(likeliest + row * blocks + at).to(tl.int64), token)
        chosen = tl.where(take, best, chosen)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, chosen - total)


def draw_rows(
    logits: Tensor, temperature: Tensor, settings: Settings, positions: Tensor, *, width: int, bits: int
) -> tuple[Tensor, Tensor]:
    """``_draw.draw`` of logits [B, V] that nothing is cut from any more; neighbours in a row lie side by side."""
    rows, length = logits.shape
    blocks = -(-length // width)
    empty = torch.empty
    sums = empty(rows, blocks, dtype=torch.float32, device=logits.device)
    greedy = settings.greedy is not None
    highest = torch.empty_like(sums) if greedy else sums
    likeliest = torch.empty_like(sums, dtype=torch.int32) if greedy else sums
    _sum_blocks[(rows, blocks)](
        logits, logits.stride(0), temperature, sums, highest, likeliest, length, blocks, WIDTH=width, GREEDY=greedy
    )
    tokens = empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = empty(rows, dtype=torch.float32, device=logits.device)
    _draw_rows[(rows,)](
        logits, logits.stride(0), temperature, settings.seeds, positions, settings.greedy if greedy else sums, sums,
        highest, likeliest, tokens, logprobs, length, blocks, BLOCKS=triton.next_power_of_2(blocks), WIDTH=width,
        BITS=bits, GREEDY=greedy,
    )  # fmt: skip
    return tokens, logprobs
