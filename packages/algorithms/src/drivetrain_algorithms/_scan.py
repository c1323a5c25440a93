"""The linear recurrence behind discounted sums, solved in many short blocks of slots at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import channel_shuffle, pad


def discounted_sums(x: Tensor, skipped: Tensor | None, *, discount: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """`yₜ = xₜ + discount yₜ₊₁` within each sequence, and `yₜ = xₜ + yₜ₊₁` where slot t is skipped.

    Args:
        x: `[B, T]`, or packed `[N]`; it may be overwritten.
        skipped: bool, of the same shape; None if no slot is.
        discount: in [0, 1]. What is discounted by 0 does not count, also where it is inf or NaN.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        `y`, of the shape and dtype of `x`.
    """
    if x.numel() == 0:
        return x
    shape, size = x.shape, _block_size(x)
    skips = None if skipped is None else _to_blocks(skipped.view(torch.uint8), size)
    y = _to_blocks(x, size)
    del x  # its memory is free for the decay
    decay = y.new_full((), discount).expand_as(y) if skips is None else skips.to(y.dtype).clamp_min_(discount)
    if cu_seqlens is not None:
        decay = _without_decay_at_ends(decay, cu_seqlens)
    _solve(decay, y, shape[:-1], resets=discount == 0.0 or cu_seqlens is not None)
    del decay
    return _from_blocks(y, shape)


def _solve(decay: Tensor, y: Tensor, batch: torch.Size, *, resets: bool) -> None:
    """Solve `y_t = b_t + a_t * y_{t+1}` in place, with `y = 0` after the end.

    From what follows a block to the block's first slot, the block is one step of the same kind, since
    `(a, b) o (a', b') = (a a', b + a b')`. So all blocks are walked through twice, side by side: as if nothing followed
    them, which leaves a problem with one step per block, and again with the solution of that one. The work is linear in
    the length, the number of operations logarithmic, and no value is read back to the host.

    See Blelloch, "Prefix Sums and Their Applications" (1990), https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf

    Args:
        decay: `a`, in blocks; a constant, no gradient flows to it.
        y: `b`, in blocks; becomes the solution.
        batch: the shape of a batch of sequences, whose blocks follow one another.
        resets: `decay` has zeros; what lies after one never reaches what lies before it, not even as `0 * inf`.
    """

    def reaching(value: Tensor, t: int) -> Tensor:
        """`value`, but 0 where the decay of slot t is. `torch.where` does not use the CPU's vectors, this does."""
        return torch.ops.aten.threshold_backward(value, decay[:, t], 0.0) if resets else value

    size = y.shape[1]
    if y.numel() > batch.numel() * size:
        value = y[:, -1]
        for t in reversed(range(size - 1)):
            value = torch.addcmul(y[:, t], decay[:, t], reaching(value, t))
        product = decay.prod(1)
        if resets:  # a product that is too small for its dtype is no reset
            product = torch.where(decay.amin(1) == 0, 0.0, product.clamp_min_(torch.finfo(product.dtype).tiny))
        value, product = (x.reshape(*batch, -1) for x in (value, product))
        shape, next_size = value.shape, _block_size(value)
        blocks = _to_blocks(value, next_size)
        _solve(_to_blocks(product, next_size), blocks, batch, resets=resets)
        following = pad(_from_blocks(blocks, shape)[..., 1:], (0, 1)).view_as(y[:, -1])
        y[:, -1].addcmul_(decay[:, -1], reaching(following, -1))
    for t in reversed(range(size - 1)):
        y[:, t].addcmul_(decay[:, t], reaching(y[:, t + 1], t))


def _without_decay_at_ends(decay: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`decay`, 0 at the last slot of each sequence. For empty ones in front that is slot -1, where one ends anyway."""
    _, size, lanes = decay.shape
    slots = cu_seqlens[1:].to(decay.device, torch.int64) - 1
    blocks = slots.div(size, rounding_mode="floor")
    index = (blocks.div(lanes, rounding_mode="floor"), slots % size, blocks % lanes)
    return decay.contiguous().index_put_(index, decay.new_zeros(()))


def _block_size(x: Tensor) -> int:
    """On a CPU, vectors as long as pay; else few operations, as each costs the start of a kernel or its compilation."""
    length, long_vectors = x.shape[-1], x.device.type == "cpu" and not torch.compiler.is_compiling()
    return min(length, 64 if long_vectors and length >= 512 else 8)


def _to_blocks(x: Tensor, size: int) -> Tensor:
    """`[..., T]` cut into blocks of `size` slots, the last one filled up with zeros: `[tiles, size, lanes]`, a copy.

    Block `i` is lane `i % lanes` of tile `i // lanes`. So the slots at one position of all blocks lie side by side.
    """
    padding = -x.shape[-1] % size
    blocks = (pad(x, (0, padding)) if padding else x).reshape(-1, size)
    tiles = math.gcd(len(blocks), 8) if blocks.numel() >= 2**17 else 1  # what threads can share
    return _swapped(blocks.reshape(tiles, -1, size))


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """`[..., T]` again."""
    return _swapped(blocks).reshape(*shape[:-1], -1)[..., : shape[-1]]


def _swapped(x: Tensor) -> Tensor:
    """A copy of `x.transpose(1, 2)`. On a CPU, shuffling channels uses vectors and threads, `contiguous` neither."""
    n, rows, columns = x.shape
    channels = x.reshape(n, 1, 1, rows * columns).permute(0, 3, 1, 2)
    return channel_shuffle(channels, rows).permute(0, 2, 3, 1).reshape(n, columns, rows)
