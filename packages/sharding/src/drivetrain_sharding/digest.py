"""A digest of a model's weights that is the same wherever and however they lie: whole or in pieces, on any device.

A tensor is a matrix of elements: a row for each index into all dimensions but the last one (tensors of less than two
dimensions have one row), numbered in order. An element of 16 bits or more is one or more words of 16 bits, the lower
ones first, an element of 8 bits is one of 8, and a word is read as a signed integer w. With the words of row r numbered
by c,

    H = sum over r and c of  a(r) b(c) w(r, c)   modulo 2^64

where a(r) and b(c) are odd numbers out of the splitmix64 generator; b(c) is p(c mod 2^16) q(c div 2^16), of which q(0)
is 1. The digest of a set of tensors is the SHA-256 of their names, dtypes, shapes and H, sorted by name.

**Pieces.** H is a sum over elements, and a term depends on the element and its place in the whole tensor only. So the
hashes of any boxes that tile a tensor add up to its H, and nothing has to be gathered but 8 bytes for each box. It is
integer arithmetic: it comes out the same on every device and in any order of summation.

**Strength.** Let two tensors differ in words by d(r, c), |d| < 2^16. If one word differs, H always does: a b is odd,
and d is no multiple of 2^64. That is every change of one element of 16 or 8 bits. For the rest take the keys as drawn
at random; let 2^v be the largest power of two in all d, so that v < 16, and m = 64 - v. Words of one row or one column,
or any two words, cancel with a probability of at most 2^-(m - 1) <= 2^-48: the key of one with an odd d / 2^v must hit
one number. Anything else cancels with at most m 2^-(m - 1) < 2^-42: the words of a row with such a d, times their
b(c), add up to 2^t times an odd number with a probability of 2^-t at most, and then a(r) must hit one number modulo
2^(m - t); the sum over t is that bound. For rows of more than 2^16 words a third factor makes it m^2 2^-(m - 1) <
2^-36. It is multilinear hashing (Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961) with keys that are products.

**What it does not guard against:** someone who wants to forge a digest. The keys are known, and H is linear.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_sharding import _hash
from drivetrain_sharding.layout import Box, Layout, Piece


class DigestMismatch(ValueError):
    """Ranks hold different values of the same elements."""


@dataclass(frozen=True, slots=True)
class VersionDigest:
    """What a version of a model's weights is known by."""

    hex: str
    """64 hexadecimal digits: equal if and only if `tensors` is."""
    tensors: Mapping[str, str]
    """By name: a text with dtype, shape and hash."""


class Digest:
    """Builds the digest of named tensors, in whatever order they come.

    Example:
        >>> whole = Digest()
        >>> whole.add("b", torch.ones(2))
        >>> whole.add("a", torch.zeros(3))
        >>> whole.hexdigest() == digest({"a": torch.zeros(3), "b": torch.ones(2)})
        True
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a whole tensor in. On a GPU this does not wait for the device; the tensor's memory may be used anew on
        the current stream.

        Raises:
            ValueError: the name was added before, or the tensor is a shard.
        """
        if name in self._tensors:
            raise ValueError(f"tensor {name} was added before; names are digested once")
        item = _whole(name, tensor)
        self._tensors[name] = item.dtype, item.shape
        self._sums[name] = _hash.start(item)

    def version(self) -> VersionDigest:
        """The digest, and what it is made of."""
        hashes: dict[str, int] = {}
        for device in {sums.device for sums in self._sums.values()}:
            names = [name for name, sums in self._sums.items() if sums.device == device]
            # One transfer for all tensors of a device.
            values = torch.cat([self._sums[name] for name in names]).tolist()
            hashes |= {name: value % 2**64 for name, value in zip(names, values, strict=True)}
        return _version({name: (*known, hashes[name]) for name, known in self._tensors.items()})

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self.version().hex


def digest(tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> str:
    """The digest of named whole tensors: 64 hexadecimal digits.

    It depends on the names, dtypes, shapes and every bit of the values; not on the device, the memory layout or the
    order of the tensors. NaNs and zeros with other bits are other values. Of a dict, all tensors of a GPU are hashed
    at once; of an iterator, each before the next one is asked for.

    Raises:
        ValueError: a name comes twice, or a tensor is a shard.
    """
    if isinstance(tensors, dict):
        items = [_whole(name, tensor) for name, tensor in tensors.items()]
        hashes = _hash.Hasher(items).hashes()
        found = zip(tensors, items, hashes, strict=True)
        return _version({name: (item.dtype, item.shape, value) for name, item, value in found}).hex
    result = Digest()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        result.add(name, tensor)
    return result.hexdigest()


class ShardedDigest:
    """The digest of a model whose weights lie over ranks: each rank hashes what it holds, and one combines the hashes.

    It comes out as `Digest` gives it for the whole tensors. What depends on the layout alone is computed once, so keep
    this for as long as the layout is in use. It holds no weights.

    Args:
        layout: how the weights lie.
        dtype: what values are hashed as, without a copy of them in it: one dtype for all that are floating-point
            numbers, as `named_tensors` casts; or another layout, whose tensors' dtypes are taken; None: their own. A
            NaN gets the bits that the device's cast gives it.

    Raises:
        ValueError: the other layout lacks a tensor.
    """

    def __init__(self, layout: Layout, *, dtype: torch.dtype | Layout | None = None) -> None:
        self._layout = layout
        self._dtypes = _dtypes(layout, dtype)
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._hashers: dict[int, tuple[list[object], _hash.Hasher]] = {}
        self._boxes: _Boxes | None = None

    def hashes(self, rank: int, parameters: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The hashes of what a rank holds: one number below 2^64 for each of `layout.pieces(rank)`, in that order.

        A GPU reads each value once, in a few launches for all of them, and is waited for once. A second call with
        parameters at the same addresses only launches. (The kernel is compiled by Triton when it is first used, which
        takes seconds; where Triton is not at hand, torch computes the same, more slowly.)

        Args:
            rank: of the layout's mesh.
            parameters: by the names of the layout's parameters, as they lie on the rank; of DTensors, the local part
                is taken. Others are left alone.

        Raises:
            ValueError: parameters are missing, or of another shape or dtype than in the layout; all in one error.
        """
        held = {p.name: _local(parameters[p.name]) for p in self._layout.parameters if p.name in parameters}
        lie: list[object] = [
            (name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg())
            for name, t in held.items()
        ]
        known = self._hashers.get(rank)
        if known is not None and known[0] == lie:
            return tuple(known[1].hashes())
        hasher = _hash.Hasher(self._items(rank, held))
        self._hashers.pop(rank, None)
        if not hasher.holds_values:
            self._hashers[rank] = lie, hasher
        return tuple(hasher.hashes())

    def combine(self, hashes: Mapping[int, Sequence[int]]) -> VersionDigest:
        """The digest of the version that all ranks hold together.

        Args:
            hashes: of every rank of the layout, what `hashes` returned there.

        Raises:
            ValueError: ranks are missing, or have another number of hashes than pieces.
            DigestMismatch: ranks hold different values of the same elements; names tensors, elements and ranks.
        """
        ranks = range(self._layout.mesh.size)
        if strangers := set(hashes) ^ set(ranks):
            raise ValueError(
                f"hashes of ranks {_few(sorted(strangers))}: give those of each of {len(ranks)} ranks once"
            )
        if self._boxes is None:
            self._boxes = _Boxes(self._layout, [self._of(rank) for rank in ranks])
        totals = self._boxes.totals([hashes[rank] for rank in ranks])
        return _version({s.name: (self._dtypes[s.name], s.shape, totals[s.name]) for s in self._layout.tensors})

    def _of(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self._pieces:
            self._pieces[rank] = self._layout.pieces(rank)
        return self._pieces[rank]

    def _items(self, rank: int, held: Mapping[str, Tensor]) -> list[_hash.Item]:
        specs = {spec.name: spec for spec in self._layout.tensors}
        pieces = self._of(rank)
        problems = self._layout.misfits(rank, held)
        if problems:
            raise ValueError(f"rank {rank} does not hold what the layout says: {'; '.join(problems)}")
        return [
            _hash.Item(
                piece.at.of(held[piece.parameter]).view(piece.box.shape),
                piece.box,
                specs[piece.tensor].shape,
                self._dtypes[piece.tensor],
            )
            for piece in pieces
        ]


def piece_hashes(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], *, dtype: torch.dtype | Layout | None = None
) -> tuple[int, ...]:
    """`ShardedDigest.hashes`, once."""
    return ShardedDigest(layout, dtype=dtype).hashes(rank, parameters)


def combine(
    layout: Layout, hashes: Mapping[int, Sequence[int]], *, dtype: torch.dtype | Layout | None = None
) -> VersionDigest:
    """`ShardedDigest.combine`, once."""
    return ShardedDigest(layout, dtype=dtype).combine(hashes)


def differing(one: VersionDigest, other: VersionDigest) -> tuple[str, ...]:
    """The names of the tensors in which two versions differ, or which one of them lacks, sorted."""
    names = one.tensors.keys() | other.tensors.keys()
    return tuple(sorted(name for name in names if one.tensors.get(name) != other.tensors.get(name)))


class _Boxes:
    """Which boxes the ranks of a layout hold, copies counted once."""

    def __init__(self, layout: Layout, pieces: Sequence[Sequence[Piece]]) -> None:
        numbers: dict[tuple[str, str, Box], int] = {}
        self._of_rank = [
            [numbers.setdefault((piece.tensor, piece.parameter, piece.box), len(numbers)) for piece in held]
            for held in pieces
        ]
        self._boxes = list(numbers)
        elements = {(part.tensor, parameter.name): 0 for parameter in layout.parameters for part in parameter.parts}
        for tensor, parameter, box in self._boxes:
            elements[tensor, parameter] += box.numel
        self._covers = list(elements)
        sizes = {spec.name: math.prod(spec.shape) for spec in layout.tensors}
        nowhere = sizes.keys() - {tensor for tensor, _ in elements}
        torn = {tensor for (tensor, _), count in elements.items() if count != sizes[tensor]}
        if missing := sorted(nowhere | torn):
            raise ValueError(f"ranks of this layout do not hold all elements, each once, of {_few(missing)}")

    def totals(self, hashes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The hash of each tensor, from those of the pieces of rank 0, 1, ..."""
        first: dict[int, tuple[int, int]] = {}  # by box: hash, and who sent it
        problems: list[str] = []
        for rank, (numbers, sent) in enumerate(zip(self._of_rank, hashes, strict=True)):
            if len(numbers) != len(sent):
                raise ValueError(f"rank {rank} holds {len(numbers)} pieces in this layout and sent {len(sent)} hashes")
            for number, value in zip(numbers, sent, strict=True):
                known, whose = first.setdefault(number, (value, rank))
                if known != value:
                    tensor, _, box = self._boxes[number]
                    where = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
                    problems.append(f"{tensor}[{where}] on ranks {whose} and {rank}")
        sums = dict.fromkeys(self._covers, 0)
        for number, (value, _) in first.items():
            tensor, parameter, _ = self._boxes[number]
            sums[tensor, parameter] = (sums[tensor, parameter] + value) % 2**64
        totals: dict[str, int] = {}
        for (tensor, parameter), value in sums.items():
            if totals.setdefault(tensor, value) != value:
                problems.append(f"{tensor} in {parameter} and in another parameter")
        if problems:
            raise DigestMismatch(f"copies differ: {_few(problems)}")
        return totals


def shifted(version: VersionDigest, changes: Mapping[str, int]) -> VersionDigest:
    """The digest after the hashes of some tensors have changed by as much."""
    texts = dict(version.tensors)
    for name, change in changes.items():
        known, value = texts[name].rsplit(" ", 1)
        texts[name] = f"{known} {(int(value, 16) + change) % 2**64:016x}"
    return _combined(texts)


def _version(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]) -> VersionDigest:
    return _combined({
        name: f"{str(dtype).removeprefix('torch.')} [{','.join(map(str, shape))}] {value:016x}"
        for name, (dtype, shape, value) in tensors.items()
    })  # fmt: skip


def _combined(texts: Mapping[str, str]) -> VersionDigest:
    total = hashlib.sha256()
    for name in sorted(texts):
        content = f"{name}\0{texts[name]}\n".encode()
        total.update(len(content).to_bytes(8, "little") + content)
    return VersionDigest(total.hexdigest(), texts)


def _whole(name: str, tensor: Tensor) -> _hash.Item:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"tensor {name} is a {type(tensor).__name__}; give whole tensors, as named_tensors does")
    shape = tuple(tensor.shape)
    return _hash.Item(tensor, Box.whole(shape), shape, tensor.dtype)


def _local(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
    return tensor.detach()


def _dtypes(layout: Layout, dtype: torch.dtype | Layout | None) -> dict[str, torch.dtype]:
    """By name of a tensor: the dtype it is hashed as."""
    own = {spec.name: spec.dtype for spec in layout.tensors}
    if isinstance(dtype, torch.dtype):
        return {name: dtype if mine.is_floating_point else mine for name, mine in own.items()}
    if dtype is None:
        return own
    theirs = {spec.name: spec.dtype for spec in dtype.tensors}
    theirs |= {name: theirs[tied] for name, tied in dtype.ties.items()}
    if missing := sorted(own.keys() - theirs.keys()):
        raise ValueError(f"the layout whose dtypes are to be taken lacks {_few(missing)}")
    return {name: theirs[name] for name in own}


def _few(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
