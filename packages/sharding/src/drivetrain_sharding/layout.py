"""How every tensor of a model lies over ranks: data that can be planned with, compared, printed and kept as JSON.

Two kinds of tensors are told apart. A *whole tensor* has the name, shape and meaning that the model's Hugging Face
checkpoint gives it; both sides of a weight sync know it. A *parameter* is what a rank holds in memory, under the name
that the rank's own module gives it. A parameter is one box of a whole tensor (FSDP2, tensor parallel), or boxes of
several behind one another (vLLM's fused `qkv_proj`, `gate_up_proj` and experts), perhaps with padding that belongs to
no tensor (vocabularies). A `Layout` says which, for every rank at once; `Layout.pieces` spells it out for one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a named whole tensor looks like."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Box:
    """Those elements of a tensor whose index is, in each dimension d, from `start[d]` up to `stop[d]`, exclusive."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The elements in both; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def moved(self, by: Sequence[int]) -> Box:
        """The box of the same shape, `by[d]` further along each dimension d."""
        return Box(
            tuple(a + b for a, b in zip(self.start, by, strict=True)),
            tuple(a + b for a, b in zip(self.stop, by, strict=True)),
        )

    def of(self, tensor: Tensor) -> Tensor:
        """A view of these elements of the tensor."""
        return tensor[tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0, 1, ... in rows and columns: names and sizes of the dimensions, the last one with neighbouring ranks.

    Example:
        >>> Mesh((("dp", 2), ("tp", 4))).coordinates(6)
        {'dp': 1, 'tp': 2}
    """

    dims: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        if len(set(names)) < len(names):
            raise ValueError(f"mesh dimensions {names}: each needs a name of its own")
        for name, size in self.dims:
            if size < 1:
                raise ValueError(f"mesh dimension {name} has size {size}: use 1 or more")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.dims)

    def extent(self, name: str) -> int:
        """The size of one dimension."""
        return dict(self.dims)[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands in each dimension."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank}: this mesh has ranks 0 to {self.size - 1}")
        found: dict[str, int] = {}
        for name, size in reversed(self.dims):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.dims}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dimension of a tensor cut over one dimension of the mesh, as `torch.chunk` cuts: parts of equal size, of
    which the last ones may be shorter or empty."""

    over: str
    """The mesh dimension."""
    dim: int
    """The tensor's dimension."""
    parts: int | None = None
    """How many parts. None: one for each rank along `over`. Fewer (a divisor of it): neighbouring ranks hold the same
    part, as they do with key-value heads when there are fewer heads than ranks."""
    padded: int | None = None
    """What the dimension is padded to before it is cut: vocabularies. The padding belongs to no whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a parameter holds of one whole tensor."""

    tensor: str
    splits: tuple[Split, ...] = ()
    """In the order in which they are applied, each to what the last one left. A mesh dimension in none of them holds
    copies."""
    expert: int | None = None
    """Of a parameter that stacks experts along an extra first dimension: which one this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A tensor that ranks hold in memory: its parts behind one another along dimension `dim`."""

    name: str
    parts: tuple[Part, ...]
    dim: int = 0
    """Of the whole tensors, not counting the dimension that experts are stacked along."""
    experts: Split | None = None
    """How stacked experts are spread over ranks (`dim` 0 of the stack); None, with stacked experts: each rank has all
    of them."""

    @property
    def stacked(self) -> int:
        """How many experts are stacked; 0: there is no such dimension."""
        return len({part.expert for part in self.parts if part.expert is not None})


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor, and where a rank holds it."""

    tensor: str
    box: Box
    """Of the whole tensor."""
    parameter: str
    at: Box
    """Of the parameter as it lies on the rank. `at.of(parameter)`, reshaped to `box.shape`, are the box's elements: it
    has a first dimension of size 1 more where the parameter stacks experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How all tensors of a model lie over the ranks of a mesh.

    Raises:
        ValueError: names given twice, parts of tensors that are not there, splits over mesh dimensions or tensor
            dimensions that do not exist. All problems are in one error.
    """

    mesh: Mesh
    tensors: tuple[TensorSpec, ...]
    """The whole tensors, each once, with the dtype they have in this layout."""
    parameters: tuple[Parameter, ...]
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further names of whole tensors (`lm_head.weight` of a model whose head is its embedding): other name to name."""

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise ValueError(f"this is no layout: {'; '.join(problems)}")

    def spec(self, name: str) -> TensorSpec:
        """A whole tensor by one of its names.

        Raises:
            KeyError: there is none.
        """
        name = self.ties.get(name, name)
        for spec in self.tensors:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What a rank holds, in the order of `parameters`; empty boxes are left out."""
        specs = {spec.name: spec for spec in self.tensors}
        where = self.mesh.coordinates(rank)
        found: list[Piece] = []
        for parameter in self.parameters:
            held = _range(parameter.stacked, parameter.experts, where, self.mesh)
            ends: dict[int | None, int] = {}  # by expert: where its next part begins along `dim`
            for part in parameter.parts:
                if part.expert is not None and part.expert not in held:
                    continue
                shape = specs[part.tensor].shape
                room = part_room(shape, part.splits, where, self.mesh)
                box = room.meet(Box.whole(shape)) if shape else Box((), ())
                first = ends.get(part.expert, 0)
                ends[part.expert] = first + (room.shape[parameter.dim] if shape else 0)
                if box is None:
                    continue
                origin = [first * (dim == parameter.dim) - start for dim, start in enumerate(room.start)]
                at = box.moved(origin)
                if part.expert is not None:
                    slot = part.expert - held.start
                    at = Box((slot, *at.start), (slot + 1, *at.stop))
                found.append(Piece(part.tensor, box, parameter.name, at))
        return tuple(found)

    def parameter_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter on a rank, padding included."""
        specs = {spec.name: spec for spec in self.tensors}
        where = self.mesh.coordinates(rank)
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters:
            expert = parameter.parts[0].expert
            rooms = [
                part_room(specs[part.tensor].shape, part.splits, where, self.mesh).shape
                for part in parameter.parts
                if part.expert == expert
            ]
            shape = list(rooms[0])
            if shape:
                shape[parameter.dim] = sum(room[parameter.dim] for room in rooms)
            if expert is not None:
                shape = [len(_range(parameter.stacked, parameter.experts, where, self.mesh)), *shape]
            shapes[parameter.name] = tuple(shape)
        return shapes

    def misfits(self, rank: int, parameters: Mapping[str, Tensor], *, strict: bool = False) -> list[str]:
        """How the parameters that a rank holds differ from this layout; nothing if they do not.

        Args:
            rank: of the mesh.
            parameters: by name, as they lie on the rank.
            strict: whether parameters that the layout does not know are a difference.
        """
        dtypes = {spec.name: spec.dtype for spec in self.tensors}
        wanted = {parameter.name: dtypes[parameter.parts[0].tensor] for parameter in self.parameters}
        found: list[str] = []
        for name, shape in self.parameter_shapes(rank).items():
            tensor = parameters.get(name)
            if tensor is None:
                found.append(f"{name} is missing")
            elif (tuple(tensor.shape), tensor.dtype) != (shape, wanted[name]):
                found.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, in the layout {wanted[name]} {shape}")
        return found + [f"{name} is unknown to the layout" for name in parameters if strict and name not in wanted]

    def to_json(self) -> str:
        """This layout as JSON; `from_json` reads it."""
        return json.dumps({"format": _FORMAT, **_plain(self)})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote.

        Raises:
            ValueError: it is not JSON, or not a layout.
        """
        return _read(text)


def part_room(shape: Sequence[int], splits: Sequence[Split], where: Mapping[str, int], mesh: Mesh) -> Box:
    """The box of a tensor of this shape that the rank at `where` has room for; padding reaches beyond the shape."""
    start, stop = [0] * len(shape), list(shape)
    for split in splits:
        held = _range(split.padded or stop[split.dim] - start[split.dim], split, where, mesh)
        start[split.dim], stop[split.dim] = start[split.dim] + held.start, start[split.dim] + held.stop
    return Box(tuple(start), tuple(stop))


def _range(size: int, split: Split | None, where: Mapping[str, int], mesh: Mesh) -> range:
    """Which of `size` indices the rank at `where` holds."""
    if split is None:
        return range(size)
    ranks = mesh.extent(split.over)
    parts = split.parts or ranks
    index = where[split.over] * parts // ranks
    each = -(-size // parts)
    return range(min(index * each, size), min((index + 1) * each, size))


def _problems(layout: Layout) -> list[str]:
    found: list[str] = []
    specs = {spec.name: spec for spec in layout.tensors}
    if len(specs) < len(layout.tensors):
        found.append("a tensor is given twice")
    if len({parameter.name for parameter in layout.parameters}) < len(layout.parameters):
        found.append("a parameter is given twice")
    for other, name in layout.ties.items():
        if name not in specs or other in specs:
            found.append(f"{other} is tied to {name}: the one must not be among the tensors, the other must be")
    extents = dict(layout.mesh.dims)
    for parameter in layout.parameters:
        if not parameter.parts:
            found.append(f"{parameter.name} has no parts")
        dtypes = {str(specs[part.tensor].dtype) for part in parameter.parts if part.tensor in specs}
        if len(dtypes) > 1:
            found.append(f"{parameter.name} holds tensors of several dtypes: {', '.join(sorted(dtypes))}")
        for part in parameter.parts:
            if part.tensor not in specs:
                found.append(f"{parameter.name} holds {part.tensor}, which is not among the tensors")
                continue
            for split in (*part.splits, *([parameter.experts] if parameter.experts else [])):
                if split.over not in extents:
                    found.append(f"{parameter.name} is split over {split.over!r}; the mesh has {list(extents)}")
                elif extents[split.over] % (split.parts or 1):
                    found.append(f"{parameter.name}: {split.parts} parts over {extents[split.over]} ranks")
            shape, cut = specs[part.tensor].shape, set[int]()
            for split in part.splits:
                if not 0 <= split.dim < len(shape):
                    found.append(f"{parameter.name} is split along dimension {split.dim} of {part.tensor}: {shape}")
                elif split.padded and (split.padded < shape[split.dim] or split.dim in cut):
                    found.append(f"{parameter.name}: dimension {split.dim} of {shape} padded to {split.padded}")
                cut.add(split.dim)
    return found


def _plain(layout: Layout) -> dict[str, Any]:
    return {
        "mesh": layout.mesh.dims,
        "tensors": [[s.name, str(s.dtype).removeprefix("torch."), s.shape] for s in layout.tensors],
        "parameters": [_without_defaults(dataclasses.asdict(parameter)) for parameter in layout.parameters],
        "ties": dict(layout.ties),
    }


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_defaults(v) for k, v in value.items() if v is not None and v != ()}
    return [_without_defaults(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(text: str) -> Layout:
    try:
        data = json.loads(text)
        if data.pop("format") != _FORMAT:
            raise ValueError(f"it has not format {_FORMAT}")
        return Layout(
            mesh=Mesh(tuple((str(name), int(size)) for name, size in data["mesh"])),
            tensors=tuple(
                TensorSpec(name=name, dtype=getattr(torch, dtype), shape=tuple(shape))
                for name, dtype, shape in data["tensors"]
            ),
            parameters=tuple(_read_parameter(item) for item in data["parameters"]),
            ties=data["ties"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"this text holds no layout: {error}") from error


def _read_parameter(item: dict[str, Any]) -> Parameter:
    parts = tuple(
        Part(**{**part, "splits": tuple(Split(**split) for split in part.get("splits", ()))}) for part in item["parts"]
    )
    experts = Split(**item["experts"]) if "experts" in item else None
    return Parameter(**{**item, "parts": parts, "experts": experts})
