"""`_hash` on a GPU: all items in at most a few launches of one Triton kernel, and each value is read once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain_sharding import _hash

_STEP, _MIX_1, _MIX_2 = tl.constexpr(_hash.STEP), tl.constexpr(_hash.MIX_1), tl.constexpr(_hash.MIX_2)
_ROWS, _COLUMNS = tl.constexpr(_hash.ROWS), tl.constexpr(_hash.COLUMNS)
_LINES, _LINE = tl.constexpr(_hash.LINES), tl.constexpr(_hash.LINE)

_FIELDS = 8
_TILE_COLUMNS = 1024
_TILE_ROWS = 128
_UNROLL = 4
_WARPS = 4
_VECTOR_BYTES = 16

_TYPES = {
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_CASTS = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
"""Those the kernel makes itself; the others are left to torch."""


def prepare(items: Sequence[_hash.Item]) -> tuple[list[_hash.Launch], list[int]]:
    """What hashes items on one GPU, for as long as they lie where they are.

    Returns:
        the launches, and the numbers of the items that are in none of them, since the kernel does not know them.
    """
    jobs: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    left: list[int] = []
    for number, item in enumerate(items):
        values, target = item.values, item.dtype
        source = values.dtype
        if source == target:
            source = target = _hash.word_dtype(target)
            each = _hash.words_each(item.dtype)
        elif (source, target) in _CASTS:
            each = 1
        else:
            left.append(number)
            continue
        if (values.ndim and values.stride(-1) != 1) or values.is_neg() or values.is_conj():
            left.append(number)
            continue
        width, column = (values.shape[-1] * each, item.box.start[-1] * each) if values.ndim else (each, 0)
        address = values.data_ptr()
        vector = _VECTOR_BYTES // source.itemsize
        for offset, rows, stride, row in _hash.runs(values, item.box, item.shape):
            place, apart = address + offset * each * source.itemsize, stride * each
            aligned = not (place % _VECTOR_BYTES or width % vector or apart % vector)
            jobs.setdefault((source, target, aligned), []).append((place, apart, row, rows, column, width, number))
    device = items[0].values.device
    return [_launch(some, device, *kind) for kind, some in jobs.items()], left


def _launch(
    jobs: list[tuple[int, ...]], device: torch.device, source: torch.dtype, target: torch.dtype, aligned: bool
) -> _hash.Launch:
    counts = [-(-job[3] // _TILE_ROWS) * -(-job[5] // _TILE_COLUMNS) for job in jobs]
    firsts = itertools.accumulate(counts, initial=0)
    table = torch.tensor([(*job, first) for job, first in zip(jobs, firsts, strict=False)])
    owners = torch.repeat_interleave(torch.arange(len(jobs)), torch.tensor(counts))
    packed = torch.cat([table.view(-1), owners]).to(device, non_blocking=True)
    table, owners = packed[: table.numel()], packed[table.numel() :]

    def launch(sums: Tensor) -> None:
        with torch.accelerator.device_index(device.index):
            _tile[(len(owners),)](
                owners, table, sums, SOURCE=_TYPES[source], TARGET=_TYPES[target],
                WORD=_TYPES[_hash.word_dtype(target)], ALIGNED=aligned, VECTOR=_VECTOR_BYTES // source.itemsize,
                FIELDS=_FIELDS, TILE_ROWS=_TILE_ROWS, TILE_COLUMNS=_TILE_COLUMNS, UNROLL=_UNROLL, num_warps=_WARPS,
            )  # fmt: skip

    return launch


@triton.jit  # type: ignore[untyped-decorator]
def _key(number, ORIGIN: tl.constexpr):  # type: ignore[no-untyped-def]
    x = (number + 1).to(tl.uint64) * tl.full((), _STEP, tl.uint64) + tl.full((), ORIGIN, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return ((x ^ (x >> 31)) | 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    owners, table, sums, SOURCE: tl.constexpr, TARGET: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr, FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """One tile of a block: its words times the keys of their rows, summed, times the keys of their columns, summed."""
    job = table + tl.load(owners + tl.program_id(0)) * FIELDS
    values = tl.load(job).to(tl.pointer_type(SOURCE))
    stride = tl.load(job + 1)
    first_row, rows = tl.load(job + 2), tl.load(job + 3)
    first_column, width = tl.load(job + 4), tl.load(job + 5)
    number, tile = tl.load(job + 6), tl.program_id(0) - tl.load(job + 7)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        stride = tl.multiple_of(stride, VECTOR)
        width = tl.multiple_of(width, VECTOR)
    across = tl.cdiv(width, TILE_COLUMNS)
    begin = tile // across * TILE_ROWS
    columns = tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    end = tl.minimum(begin + TILE_ROWS, rows)
    total = tl.zeros([TILE_COLUMNS], tl.int64)
    for row in range(begin, end, UNROLL):
        for ahead in tl.static_range(UNROLL):
            there = (columns < width) & (row + ahead < end)
            found = tl.load(values + (row + ahead) * stride + columns, mask=there, other=0)
            words = found.to(TARGET).to(WORD, bitcast=True).to(tl.int64)
            total += words * _key(first_row + row + ahead, ORIGIN=_ROWS)
    column = first_column + columns
    line = column // _LINE
    total *= _key(column % _LINE, ORIGIN=_COLUMNS) * tl.where(line > 0, _key(line, ORIGIN=_LINES), 1)
    tl.atomic_add(sums + number, tl.sum(total, 0))
