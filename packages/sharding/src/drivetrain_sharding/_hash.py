"""The hash that digests are made of, for boxes of tensors: in plain torch; `_hash_triton` is its twin on a GPU.

`digest` has the definition. What it rests on here: the words of a box times the keys of their rows, summed over the
rows, are one matrix product; the sums times the keys of their columns are what the box adds to its tensor's hash.
"""

from __future__ import annotations

import functools
import itertools
import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from drivetrain_sharding.layout import Box

# splitmix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195): its step and its two multipliers.
STEP = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
# Where the keys of rows, columns and lines begin: the first bits of the fractions of the square roots of 2, 3 and 5.
ROWS = 0x6A09E667F3BCC908
COLUMNS = 0xBB67AE8584CAA73B
LINES = 0x3C6EF372FE94F82B
LINE = 2**16
"""How many words of a row make a line."""

_TABLE = 2**16
"""How many keys of each kind are kept."""
_LIMB_BITS = 22
_LIMBS = 3
# So many products of a signed word of 16 bits and a limb have a sum below 2^53, which a float64 holds exactly.
_EXACT_ROWS = 2**16
# Words at a time. On a CPU their float64 copies then stay in the cache; elsewhere large steps cost less.
_CPU_WORDS, _CPU_COLUMNS = 2**16, 2**11
_DEVICE_WORDS, _DEVICE_COLUMNS = 2**24, 2**14

_log = logging.getLogger(__name__)

Launch = Callable[[Tensor], None]
"""Adds the hashes of some items to the sums of all: int64 `[items]`."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a whole tensor, to be hashed."""

    values: Tensor
    """Of the box's shape."""
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """The values are hashed as `values.to(dtype)`."""


class Hasher:
    """Hashes items as often as one likes, for as long as their values lie where they are."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._count = len(items)
        numbers: dict[torch.device, list[int]] = {}
        for number, item in enumerate(items):
            numbers.setdefault(item.values.device, []).append(number)
        self._parts = [(own, _OneDevice([items[number] for number in own])) for own in numbers.values()]

    @property
    def holds_values(self) -> bool:
        """Whether this keeps the memory of items alive; else it knows addresses only."""
        return any(part.left for _, part in self._parts)

    def hashes(self) -> list[int]:
        """What each item adds to the hash of its tensor, modulo 2^64; waits for each device once."""
        found = [0] * self._count
        started = [(numbers, part.start()) for numbers, part in self._parts]
        for numbers, sums in started:
            for number, value in zip(numbers, sums.tolist(), strict=True):
                found[number] = value % 2**64
        return found


def start(item: Item) -> Tensor:
    """The hash of an item, int64 `[1]` on its device, without waiting for it."""
    return _OneDevice([item]).start()


class _OneDevice:
    def __init__(self, items: Sequence[Item]) -> None:
        self._device = items[0].values.device
        self._count = len(items)
        self._launches: list[Launch] = []
        left: Sequence[int] = range(len(items))
        if self._device.type == "cuda" and (kernel := _kernel(self._device)):
            self._launches, left = kernel.prepare(items)
        self.left = [(number, items[number]) for number in left]

    def start(self) -> Tensor:
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        for launch in self._launches:
            launch(sums)
        for number, item in self.left:
            sums[number] = _sum(item)
        return sums


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what the bits of a dtype's elements are read."""
    return torch.int8 if dtype.itemsize == 1 else torch.int16


def words_each(dtype: torch.dtype) -> int:
    """How many words an element has."""
    return max(dtype.itemsize // 2, 1)


def runs(values: Tensor, box: Box, shape: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The rows of a box as matrices in which both their numbers and their places in memory follow one another.

    Returns:
        of each: where its first element lies, how many rows it has, how far apart they lie, the number of the first.
    """
    if values.numel() == 0:
        return []
    if values.ndim < 2:
        return [(0, 1, 0, 0)]
    outer = list(zip(box.start, values.shape, shape, values.stride(), strict=True))[:-1]
    rows, stride, first, weight = 1, 0, 0, 1
    while outer and rows == weight and (rows == 1 or outer[-1][3] == stride * rows):
        begin, count, size, step = outer.pop()
        stride = step if rows == 1 else stride
        first, rows, weight = first + begin * weight, rows * count, weight * size
    found = []
    for index in itertools.product(*(range(count) for _, count, _, _ in outer)):
        number, offset, each = first, 0, weight
        for place, (begin, _, size, step) in zip(reversed(index), reversed(outer), strict=True):
            number, offset, each = number + (begin + place) * each, offset + place * step, each * size
        found.append((offset, rows, stride, number))
    return found


def keys(first: int, count: int, origin: int, device: torch.device) -> Tensor:
    """Odd numbers, those of rows, columns or lines `first`, `first + 1`, ...: int64 `[count]`. That of line 0 is 1."""
    if first + count <= _TABLE:
        return _table(origin, device)[first : first + count]
    return _computed_keys(first, count, origin, device)


@functools.cache
def _table(origin: int, device: torch.device) -> Tensor:
    return _computed_keys(0, _TABLE, origin, device)


def _computed_keys(first: int, count: int, origin: int, device: torch.device) -> Tensor:
    x = torch.arange(first + 1, first + 1 + count, device=device) * signed(STEP) + signed(origin)
    x ^= (x >> 30) & (2**34 - 1)
    x *= signed(MIX_1)
    x ^= (x >> 27) & (2**37 - 1)
    x *= signed(MIX_2)
    x ^= (x >> 31) & (2**33 - 1)
    x |= 1
    if origin == LINES:
        x[: first == 0] = 1
    return x


def signed(value: int) -> int:
    """The int64 with the bits of this number below 2^64."""
    return value - 2**64 if value >= 2**63 else value


def _sum(item: Item) -> Tensor:
    """The hash of an item: int64, without dimensions."""
    values = item.values.detach().resolve_conj().resolve_neg()
    if values.ndim and values.stride(-1) != 1:
        values = values.contiguous()
    width = values.shape[-1] if values.ndim else 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    column = item.box.start[-1] * words_each(item.dtype) if item.box.start else 0
    for offset, rows, stride, number in runs(values, item.box, item.shape):
        matrix = values.as_strided((rows, width), (stride, 1), values.storage_offset() + offset)
        if rows == 1:
            total += _row_sum(matrix[0], column, item.dtype) * keys(number, 1, ROWS, values.device)[0]
            continue
        for top in range(0, rows, _EXACT_ROWS):
            some = matrix[top : top + _EXACT_ROWS]
            total += _matrix_sum(some, keys(number + top, some.shape[0], ROWS, values.device), column, item.dtype)
    return total


def _row_sum(values: Tensor, column: int, dtype: torch.dtype) -> Tensor:
    """Sum of words times the keys of their columns: that of whole lines as of the rows of a matrix."""
    each, count = words_each(dtype), values.numel()
    head = min(-column % LINE // each, count)
    lines = (count - head) * each // LINE
    tail = head + lines * LINE // each
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin, end in (0, head), (tail, count):
        if begin < end:
            words = values[begin:end].to(dtype).view(word_dtype(dtype))
            total += (_column_keys(column + begin * each, words.numel(), words.device) * words).sum()
    matrix = values[head:tail].view(-1, LINE // each)
    for top in range(0, lines, _EXACT_ROWS):
        some = matrix[top : top + _EXACT_ROWS]
        line_keys = keys((column + head * each) // LINE + top, some.shape[0], LINES, values.device)
        total += _matrix_sum(some, line_keys, 0, dtype)
    return total


def _matrix_sum(values: Tensor, row_keys: Tensor, column: int, dtype: torch.dtype) -> Tensor:
    """Sum of words times the keys of their rows and of their columns: a row's key is cut into limbs, and the products
    of words and limbs are summed over the rows as float64, which is exact."""
    device, word, each = values.device, word_dtype(dtype), words_each(dtype)
    if values.dtype == dtype:
        values, each = values.view(word), 1
    most, most_columns = (_CPU_WORDS, _CPU_COLUMNS) if device.type == "cpu" else (_DEVICE_WORDS, _DEVICE_COLUMNS)
    bits = torch.arange(_LIMBS, device=device)[:, None] * _LIMB_BITS
    limbs = ((row_keys >> bits) & (2**_LIMB_BITS - 1)).double()
    total = torch.zeros((), dtype=torch.int64, device=device)
    rows, width = values.shape
    for left in range(0, width, most_columns // each):
        right = min(left + most_columns // each, width)
        columns = (right - left) * each
        step = max(most // columns, 1)
        sums = torch.zeros(_LIMBS, columns, dtype=torch.float64, device=device)
        room = torch.empty(min(step, rows), columns, dtype=torch.float64, device=device)
        strip = values.narrow(1, left, right - left)
        for top in range(0, rows, step):
            count = min(step, rows - top)
            some = strip.narrow(0, top, count)
            words = some if some.dtype == word else some.to(dtype).view(word)
            sums.addmm_(limbs.narrow(1, top, count), room.narrow(0, 0, count).copy_(words))
        total += ((sums.long() << bits).sum(0) * _column_keys(column + left * each, columns, device)).sum()
    return total


def _column_keys(first: int, count: int, device: torch.device) -> Tensor:
    line, start = divmod(first, LINE)
    if start + count <= LINE:
        found = keys(start, count, COLUMNS, device)
        return found * keys(line, 1, LINES, device) if line else found
    numbers = torch.arange(first, first + count, device=device)
    lines = keys(line, (first + count - 1) // LINE - line + 1, LINES, device)
    return keys(0, LINE, COLUMNS, device)[numbers % LINE] * lines[numbers // LINE - line]


@functools.cache
def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel, if it can be compiled here."""
    try:
        from drivetrain_sharding import _hash_triton

        item = Item(torch.zeros(8, dtype=torch.int16, device=device), Box.whole([8]), (8,), torch.int16)
        launches, _ = _hash_triton.prepare([item])
        launches[0](torch.zeros(1, dtype=torch.int64, device=device))
    except ImportError:
        _log.info("without Triton, digests on %s are computed by plain torch, which is slower", device)
        return None
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        _log.warning("Triton compiles nothing here, so digests on %s are slower: %s", device, error)
        return None
    return _hash_triton
