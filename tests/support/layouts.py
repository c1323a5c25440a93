"""What a rank holds according to a layout: made, and compared."""

from collections.abc import Collection, Mapping, Sequence

import torch
from drivetrain_sharding import Layout, Mesh, Parameter, Part, Split, TensorSpec
from torch import Tensor


def wrong_pieces(
    layout: Layout, rank: int, held: Mapping[str, Tensor], whole: Mapping[str, Tensor], *, padded: Collection[str] = ()
) -> list[str]:
    """Pieces that are not what the whole tensors have there; parameters, unless `padded`, with elements in no piece."""
    pieces = layout.pieces(rank)
    wrong = []
    for piece in pieces:
        here = piece.at.of(held[piece.parameter]).reshape(piece.box.shape)
        if not torch.equal(here, piece.box.of(whole[piece.tensor])):
            wrong.append(f"{piece.tensor} {piece.box}")
    for name, tensor in held.items():
        covered = sum(piece.box.numel for piece in pieces if piece.parameter == name)
        if covered != tensor.numel() and name not in padded:
            wrong.append(f"{name}: {covered} of {tensor.numel()} elements are in pieces")
    return wrong


def held_by(
    layout: Layout, rank: int, whole: Mapping[str, Tensor], *, rest: float = 0, filled: bool = True
) -> dict[str, Tensor]:
    """A rank's parameters: the elements of whole tensors, cast, and `rest` where none belong; there alone if not
    `filled`."""
    dtypes = {spec.name: spec.dtype for spec in layout.tensors}
    of = {parameter.name: dtypes[parameter.parts[0].tensor] for parameter in layout.parameters}
    held = {name: torch.full(shape, rest, dtype=of[name]) for name, shape in layout.parameter_shapes(rank).items()}
    for piece in layout.pieces(rank) if filled else ():
        here = piece.at.of(held[piece.parameter])
        here.copy_(piece.box.of(whole[piece.tensor]).reshape(here.shape))
    return held


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two ranks hold parameters of the same names, shapes, dtypes and bits."""
    return one.keys() == other.keys() and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in ((one[name], other[name]) for name in one)
    )


def random_whole(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Values for the whole tensors of a layout, in their dtypes; both zeros and infinities are among them."""
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    for spec in layout.tensors:
        value = torch.randn(spec.shape, generator=generator)
        value[torch.rand(spec.shape, generator=generator) < 0.05] = -0.0
        value[torch.rand(spec.shape, generator=generator) < 0.05] = -torch.inf
        whole[spec.name] = value.to(spec.dtype)
    return whole


def simple_layout(
    mesh: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    splits: Sequence[Split] = (),
    ties: Mapping[str, str] | None = None,
) -> Layout:
    """Every tensor is a parameter of its own, all split in one way."""
    return Layout(
        mesh=Mesh(tuple(mesh.items())),
        tensors=tuple(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, shape in shapes.items()),
        parameters=tuple(Parameter(name=name, parts=(Part(tensor=name, splits=tuple(splits)),)) for name in shapes),
        ties=ties or {},
    )
