"""Comparing what a rank holds with what a layout says of it."""

from collections.abc import Collection, Mapping

import torch
from drivetrain_sharding import Layout
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
