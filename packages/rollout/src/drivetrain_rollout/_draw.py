"""Drawing tokens: which one depends on the logits, a seed and the token's place in the sequence, and on nothing else.

There is no generator and no state. The same request draws the same tokens whatever is sampled beside it, on whichever
engine, and a response that broke off goes on with the tokens that would have followed.

Shapes: B rows, one token is drawn of each; V logits in a row, cut into N blocks of up to W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_rollout.types import SamplingParams

WIDTH = 1024
"""Logits in a block."""

BITS = 23
"""Of a uniform number: few enough that in float32 the number times a sum stays below the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How rows are drawn; tensors lie where the logits do."""

    temperature: Tensor
    """[B], float32; 1 where the likeliest token is taken."""
    seeds: Tensor
    """[B], int64."""
    greedy: Tensor | None = None
    """[B], bool; None: no row."""
    top_k: Tensor | None = None
    """[B], int64, V keeps all; None: all rows keep all."""
    top_p: Tensor | None = None
    """[B], float32, 1 keeps all; None: all rows keep all."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], *, vocab_size: int, device: torch.device) -> Settings:
        """Of requests; each has a seed, or takes the likeliest token."""

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            found = torch.tensor(values, dtype=dtype)
            return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)

        greedy = [row.temperature == 0 for row in rows]
        cut_k = [0 < row.top_k < vocab_size and not zero for row, zero in zip(rows, greedy, strict=True)]
        cut_p = [row.top_p < 1 and not zero for row, zero in zip(rows, greedy, strict=True)]
        top_k = [row.top_k if cut else vocab_size for row, cut in zip(rows, cut_k, strict=True)]
        top_p = [row.top_p if cut else 1.0 for row, cut in zip(rows, cut_p, strict=True)]
        return cls(
            temperature=column([row.temperature or 1.0 for row in rows], torch.float32),
            seeds=column([row.seed or 0 for row in rows], torch.int64),
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            top_k=column(top_k, torch.int64) if any(cut_k) else None,
            top_p=column(top_p, torch.float32) if any(cut_p) else None,
        )


def draw(
    logits: Tensor, settings: Settings, positions: Tensor, *, cut: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row.

    By the inverse of the cumulated probabilities, in two steps: first a block, then a token in it. So a row is read
    once, and each of the two sums is short enough for float32. A token without probability is never drawn.

    Args:
        logits: [B, V], of any floating dtype; sums are taken in float32.
        settings: how.
        positions: [B], int64: the drawn token's index in its sequence.
        cut: another ``cut_logits``, which may change what it is given in place.

    Returns:
        Token ids [B], int64, and [B], float32, the log-probability of each under the distribution it was drawn from:

            log softmax(logits / temperature), over the tokens that top_k and top_p leave

        Of a row with NaN among its logits it is NaN.
    """
    temperature = settings.temperature
    if settings.top_k is not None or settings.top_p is not None:
        logits = (cut or cut_logits)(logits.float() / temperature[:, None], settings.top_k, settings.top_p)
        temperature = torch.ones_like(temperature)
    if logits.is_cuda and (kernels := _kernels()) is not None:
        found: tuple[Tensor, Tensor] = kernels(logits, temperature, settings, positions, width=WIDTH, bits=BITS)
        return found
    return _draw_rows(logits, temperature, settings, positions)


def _draw_rows(logits: Tensor, temperature: Tensor, settings: Settings, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same as ``_draw_kernels.draw_rows``."""
    sums = _block_sums(logits, temperature)
    total = sums.logsumexp(dim=-1)
    first, second = uniforms(settings.seeds, positions)
    block = _fall((sums - total[:, None]).exp(), first)
    index = block[:, None] * WIDTH + torch.arange(WIDTH, device=logits.device)
    scaled = logits.gather(1, index.clamp(max=logits.shape[1] - 1)).float() / temperature[:, None]
    scaled = scaled.masked_fill(index >= logits.shape[1], float("-inf"))
    within = _fall((scaled - sums.gather(1, block[:, None])).exp(), second)
    tokens = block * WIDTH + within
    values = scaled.gather(1, within[:, None])[:, 0]
    if settings.greedy is not None:
        likeliest = logits.argmax(dim=-1)
        highest = logits.gather(1, likeliest[:, None])[:, 0].float() / temperature
        tokens = torch.where(settings.greedy, likeliest, tokens)
        values = torch.where(settings.greedy, highest, values)
    return tokens, values - total


def _fall(weights: Tensor, uniform: Tensor) -> Tensor:
    """Of each row, the index that a uniform number falls on when the row's weights [B, N] lie end to end. [B].

    A sum in parallel need not rise from one index to the next, by rounding: so what has no weight is passed over.
    """
    ends = weights.cumsum(dim=-1)
    some = weights > 0
    target = uniform * ends.masked_fill(~some, 0.0).amax(dim=-1)
    return (some & (ends > target[:, None])).int().argmax(dim=-1)


def _block_sums(logits: Tensor, temperature: Tensor) -> Tensor:
    """log sum exp(logits / temperature) of each block, [B, N], float32."""
    whole = logits.shape[1] // WIDTH * WIDTH
    parts = []
    if whole:
        blocks = logits[:, :whole].view(len(logits), -1, WIDTH).float() / temperature[:, None, None]
        parts.append(blocks.logsumexp(dim=-1))
    if whole < logits.shape[1]:
        rest = logits[:, whole:].float() / temperature[:, None]
        parts.append(rest.logsumexp(dim=-1, keepdim=True))
    return torch.cat(parts, dim=1)


def uniforms(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of [0, 1) for each seed and position, all [B]: float32, multiples of 2**-23.

    From splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195) of the seed, and again of that
    and the position: the same bits on every device.
    """
    mixed = _splitmix(_splitmix(seeds) ^ positions)
    scale = 2.0**-BITS
    bits = (1 << BITS) - 1
    return (mixed & bits).float() * scale, ((mixed >> 32) & bits).float() * scale


def _splitmix(x: Tensor) -> Tensor:
    x = x + -0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def cut_logits(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Leave the top_k likeliest tokens, and of those the smallest set whose probability reaches top_p.

    Args:
        logits: [B, V], float32, already over the temperature.
        top_k: [B], int64, V keeps all; None: as V. Tokens as likely as the last that is kept are kept too.
        top_p: [B], float32, 1 keeps all; None: as 1.

    Returns:
        [B, V], -inf for tokens that were cut away.
    """
    values, order = logits.sort(dim=-1, descending=True)
    if top_k is not None:
        values = values.masked_fill(values < values.gather(1, top_k[:, None] - 1), float("-inf"))
    if top_p is not None:
        probs = values.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        cut = (before >= top_p[:, None]) & (top_p[:, None] < 1)
        cut[:, 0] = False
        values = values.masked_fill(cut, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, values)


def _kernels() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernels for a GPU, where Triton is installed."""
    try:
        from drivetrain_rollout._draw_kernels import draw_rows
    except ImportError:
        return None
    return draw_rows
