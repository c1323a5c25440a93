"""Delta sync for slow links: from one version of a model's weights to the next, only what changed, compressed.

A delta names the digest of the version that it starts from and of the one that it leads to. It is sent as bytes:

    header   magic, digest of the base, digest of the new version
    frames   each: which tensor, which of its rows, how many elements changed, and a payload
    end      how many frames there were

A frame covers at most 16 MiB of a tensor, in whole rows of its first dimension. Its payload, compressed by zlib, has
the differences of the bits of changed elements, read as integers: small numbers of both signs folded to small positive
ones, and all first bytes before all second ones. Then come the gaps between changed elements, a byte each (255: go on
by 255 elements, none of which changed). A training step in bfloat16 changes few elements, most of them by one unit in
the last place.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_sharding import _hash
from drivetrain_sharding.digest import Digest, VersionDigest, digest, shifted
from drivetrain_sharding.layout import Box

_MAGIC = b"DTDELTA1"
_HEADER = struct.Struct("<8s32s32s")
_FRAME = struct.Struct("<IQQQQQ")
_END = 2**32 - 1
_CHUNK_BYTES = 16 << 20
_GAP = 255
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaRefused(ValueError):
    """A delta that does not start from the weights that are here, or is damaged. Nothing was changed."""


def encode_delta(
    base: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    base_digest: str | None = None,
    new_digest: str | None = None,
    level: int = 1,
) -> Iterator[bytes]:
    """What leads from one version of named tensors to another, piece by piece: the delta is all of them joined.

    The tensors are compared bit by bit on the device they lie on. A piece is made when it is asked for, so that no more
    than 16 MiB of both versions (or one row of a tensor, where that is more) is looked at at once.

    Args:
        base: the version that the receiver holds.
        new: the version that it is to hold: the same names, dtypes and shapes.
        base_digest, new_digest: as `digest` gives them; None: they are computed here.
        level: of zlib, 1 (fast) to 9 (small).

    Raises:
        ValueError: the versions differ in names, dtypes, shapes or devices.
    """
    if problems := _differences(base, new):
        raise ValueError(f"no delta leads from one version to the other: {'; '.join(problems)}")
    hexes = base_digest or digest(dict(base)), new_digest or digest(dict(new))
    return _pieces(base, new, hexes, level)


def apply_delta(weights: Mapping[str, Tensor], delta: bytes | bytearray | memoryview) -> VersionDigest:
    """Bring named tensors from the delta's base to its new version, in place; all of them, or none.

    The delta is read twice. First the weights are hashed, and for each frame what it would put in place of what is
    there: hashes are sums, so that gives the digest of the new version before anything is changed. Only if it is the
    one that the delta names are the weights written. Neither takes more memory than a few times a frame's 16 MiB (or
    one row of a tensor, where that is more). What a delta says about sizes is checked before memory is taken for it.

    Returns:
        the digest of the new version, which the weights now are.

    Raises:
        DeltaRefused: the weights are not the delta's base (it came out of order), or it is damaged, or it leads to
            another version than it says. The weights are as they were.
        ValueError: two names are of the same memory.
    """
    names = sorted(weights)
    _check_apart(weights)
    base_hex, new_hex, frames = _parse(memoryview(delta).cast("B"), [weights[name] for name in names])
    whole = Digest()
    for name in names:
        whole.add(name, weights[name].detach())
    held = whole.version()
    if held.hex != base_hex:
        raise DeltaRefused(f"this delta leads from version {base_hex} to {new_hex}; the weights here are {held.hex}")
    changes: dict[str, int] = {}
    for frame in frames:
        name = names[frame.tensor]
        before, after = _hashes(frame, weights[name])
        changes[name] = changes.get(name, 0) + after - before
    found = shifted(held, changes)
    if found.hex != new_hex:
        raise DeltaRefused(f"this delta is to lead to version {new_hex}, but leads to {found.hex}")
    _write(frames, [weights[name].detach() for name in names])
    return found


def delta_digests(delta: bytes | bytearray | memoryview) -> tuple[str, str]:
    """Which version a delta starts from, and which one it leads to.

    Raises:
        DeltaRefused: these bytes are no delta.
    """
    view = memoryview(delta).cast("B")
    if len(view) < _HEADER.size or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise DeltaRefused("these bytes are no delta: they do not begin as one")
    _, base, new = _HEADER.unpack_from(view)
    return base.hex(), new.hex()


class DeltaChain:
    """The deltas since a full version: what a receiver that holds any of its versions still needs.

    When `nbytes` has grown beyond what a full version takes, send one and begin a new chain from it.
    """

    def __init__(self, full: str) -> None:
        """`full`: the digest of the version that receivers get whole."""
        self._versions = [full]
        self._deltas: list[bytes] = []

    @property
    def latest(self) -> str:
        """The digest of the version that the chain leads to."""
        return self._versions[-1]

    @property
    def nbytes(self) -> int:
        """The size of all deltas."""
        return sum(map(len, self._deltas))

    def add(self, delta: bytes) -> None:
        """Append the delta to the next version.

        Raises:
            DeltaRefused: it does not start from the latest version.
        """
        base, new = delta_digests(delta)
        if base != self.latest:
            raise DeltaRefused(f"this delta starts from version {base}, the chain ends with {self.latest}")
        self._versions.append(new)
        self._deltas.append(delta)

    def since(self, held: str) -> tuple[bytes, ...]:
        """The deltas that lead from a version to the latest, to be applied in this order.

        Raises:
            DeltaRefused: the chain does not have this version: the receiver needs a full one.
        """
        if held not in self._versions:
            raise DeltaRefused(f"version {held} is not one of this chain's {len(self._versions)}: send a full version")
        last = len(self._versions) - 1 - self._versions[::-1].index(held)
        return tuple(self._deltas[last:])


@dataclass(frozen=True, slots=True)
class _Frame:
    tensor: int
    """In the sorted order of names."""
    start: int
    stop: int
    """Rows of the first dimension; a tensor without dimensions has one."""
    changed: int
    gap_bytes: int
    payload: memoryview


def _differences(base: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[str]:
    problems = [f"only one has {name}" for name in sorted(base.keys() ^ new.keys())]
    for name in sorted(base.keys() & new.keys()):
        one, other = ((t.dtype, tuple(t.shape), t.device) for t in (base[name], new[name]))
        if one != other:
            problems.append(f"{name} is {one} in the base and {other} in the new version")
    return problems


def _pieces(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], hexes: tuple[str, str], level: int
) -> Iterator[bytes]:
    yield _HEADER.pack(_MAGIC, *map(bytes.fromhex, hexes))
    count = 0
    for number, name in enumerate(sorted(base)):
        for start, stop in _chunks(base[name]):
            before, after = (_bits(_rows(version[name], start, stop)) for version in (base, new))
            places = (before != after).nonzero().view(-1)
            if not places.numel():
                continue
            steps = after[places] - before[places]
            differences, gaps = _planes(_folded(steps)), _gaps(places)
            packer = zlib.compressobj(level)
            payload = packer.compress(_bytes(differences)) + packer.compress(_bytes(gaps)) + packer.flush()
            yield _FRAME.pack(number, start, stop, places.numel(), gaps.numel(), len(payload)) + payload
            count += 1
    yield _FRAME.pack(_END, count, 0, 0, 0, 0)


def _parse(delta: memoryview, tensors: Sequence[Tensor]) -> tuple[str, str, list[_Frame]]:
    """The digests and frames of a delta: each frame fits its tensor, and none overlap."""
    base, new = delta_digests(delta)
    frames: list[_Frame] = []
    place, last = _HEADER.size, (0, 0)
    while True:
        if len(delta) - place < _FRAME.size:
            raise DeltaRefused(f"this delta from version {base} to {new} is cut off after {len(frames)} frames")
        tensor, start, stop, changed, gap_bytes, size = _FRAME.unpack_from(delta, place)
        place += _FRAME.size
        if tensor == _END:
            if (start, stop, changed, gap_bytes, size) != (len(frames), 0, 0, 0, 0) or place != len(delta):
                raise DeltaRefused(f"this delta from version {base} to {new} is damaged, or has lost frames")
            return base, new, frames
        frame = _Frame(tensor, start, stop, changed, gap_bytes, delta[place : place + size])
        if tensor >= len(tensors) or (tensor, start) < last or not _fits(frame, size, tensors[tensor]):
            raise DeltaRefused(f"frame {len(frames)} of this delta does not fit the weights here, or is damaged")
        frames.append(frame)
        place, last = place + size, (tensor, stop)


def _fits(frame: _Frame, size: int, tensor: Tensor) -> bool:
    rows = tensor.shape[0] if tensor.ndim else 1
    nbytes = (frame.stop - frame.start) * tensor.nbytes // max(rows, 1)
    elements = nbytes // _integer(tensor).itemsize
    return (
        len(frame.payload) == size
        and frame.start < frame.stop <= rows
        and (nbytes <= _CHUNK_BYTES or frame.stop - frame.start == 1)
        and 0 < frame.changed <= elements
        and frame.changed <= frame.gap_bytes <= frame.changed + elements // _GAP
    )


def _changes(frame: _Frame, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which elements of a frame's rows (`like`, their bits) change, int64, and by how much."""
    broken = DeltaRefused(f"rows {frame.start} to {frame.stop} of tensor {frame.tensor} in this delta are damaged")
    size = frame.gap_bytes + frame.changed * like.element_size()
    unpacker = zlib.decompressobj()
    try:
        content = bytearray(unpacker.decompress(frame.payload, size))
        over = unpacker.decompress(unpacker.unconsumed_tail, 1)  # reads the end mark, and must find nothing before it
    except zlib.error as error:
        raise broken from error
    if len(content) != size or over or not unpacker.eof or unpacker.unused_data:
        raise broken
    octets = torch.frombuffer(content, dtype=torch.uint8).to(like.device)
    planes, gaps = octets[: -frame.gap_bytes].view(like.element_size(), -1), octets[-frame.gap_bytes :].long()
    places = (gaps + (gaps < _GAP)).cumsum(0) - 1
    places = places[gaps < _GAP]
    if places.numel() != frame.changed or int(places[-1]) >= like.numel():
        raise broken
    return places, _unfolded(planes.T.reshape(-1).view(like.dtype))


def _hashes(frame: _Frame, tensor: Tensor) -> tuple[int, int]:
    """What a frame's rows add to the hash of their tensor, as they are and as they would be."""
    rows = _rows(tensor, frame.start, frame.stop)
    bits = _bits(rows)
    places, steps = _changes(frame, bits)
    after = bits.clone().index_add_(0, places, steps).view(tensor.dtype).view(rows.shape)
    shape = tuple(tensor.shape)
    box = Box((frame.start, *(0 for _ in shape[1:])), (frame.stop, *shape[1:])) if shape else Box((), ())
    before, then = _hash.Hasher([_hash.Item(values, box, shape, tensor.dtype) for values in (rows, after)]).hashes()
    return before, then


def _write(frames: Sequence[_Frame], tensors: Sequence[Tensor]) -> None:
    """Add what frames change; if that breaks off (out of memory), take it back."""
    done: list[_Frame] = []
    try:
        for frame in frames:
            _add(frame, tensors[frame.tensor], 1)
            done.append(frame)
    except BaseException:
        for frame in done:
            _add(frame, tensors[frame.tensor], -1)
        raise


def _add(frame: _Frame, tensor: Tensor, sign: int) -> None:
    rows = _rows(tensor, frame.start, frame.stop)
    bits = _bits(rows)
    places, steps = _changes(frame, bits)
    bits.index_add_(0, places, steps, alpha=sign)
    if bits.data_ptr() != rows.data_ptr():  # the rows do not lie behind one another, and these are a copy
        rows.copy_(bits.view(rows.dtype).view(rows.shape))


def _check_apart(weights: Mapping[str, Tensor]) -> None:
    """What is tied would be changed twice."""
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in weights.items():
        other = first.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        if other != name:
            raise ValueError(f"{name} lies where {other} lies: give tied tensors once, as named_tensors does")


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    rows = tensor.shape[0] if tensor.ndim else 1
    if tensor.numel():
        step = max(_CHUNK_BYTES // (tensor.nbytes // rows), 1)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor.detach()[start:stop] if tensor.ndim else tensor.detach()


def _bits(values: Tensor) -> Tensor:
    """The bits of values as integers, one behind the other; a view of them where they lie so."""
    flat = values.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_integer(values))


def _integer(values: Tensor) -> torch.dtype:
    return _INTEGERS[min(values.element_size(), 8)]


def _gaps(places: Tensor) -> Tensor:
    """uint8: how many elements lie between each changed one and the one before."""
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    ends = (gaps // _GAP + 1).cumsum(0) - 1
    found = torch.full((int(ends[-1]) + 1,), _GAP, dtype=torch.uint8, device=places.device)
    found[ends] = (gaps % _GAP).to(torch.uint8)
    return found


def _folded(steps: Tensor) -> Tensor:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (steps << 1) ^ (steps >> (steps.element_size() * 8 - 1))


def _unfolded(folded: Tensor) -> Tensor:
    lower = 2 ** (folded.element_size() * 8 - 1) - 1
    halved: Tensor = (folded >> 1) & lower
    return halved ^ -(folded & 1)


def _planes(values: Tensor) -> Tensor:
    """The bytes of integers: all first ones, all second ones, ..."""
    return values.view(torch.uint8).view(-1, values.element_size()).T.contiguous().view(-1)


def _bytes(octets: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the host; it is copied there from elsewhere."""
    octets = octets.cpu()
    block = (ctypes.c_ubyte * octets.numel()).from_address(octets.data_ptr())
    block._keep = octets  # type: ignore[attr-defined]  # its memory, for as long as the view is in use
    return memoryview(block).cast("B")
