"""Sequences laid end to end.

N: slots in the batch (a slot is one input token and the label it predicts). S: sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """S sequences laid end to end in N slots, without padding.

    The shift between input and label happens once, in `pack`: a sequence of L
    tokens becomes L - 1 slots, and slot `t` reads token `t` and predicts token `t + 1`. Every per-token tensor of a
    training step has N entries and is aligned with `labels`.

    Example:
        >>> batch = PackedBatch.pack([[5, 6, 7], [8, 9]], [[False, True, True], [False, True]])
        >>> batch.labels.tolist(), batch.cu_seqlens.tolist()
        ([6, 7, 9], [0, 2, 3])
    """

    input_ids: Tensor
    """int64 `[N]`: the tokens the model reads."""
    labels: Tensor
    """int64 `[N]`: the tokens it predicts."""
    positions: Tensor
    """int64 `[N]`: 0, 1, 2, ... within each sequence."""
    cu_seqlens: Tensor
    """int32 `[S + 1]`: sequence `s` holds the slots `cu_seqlens[s]` to `cu_seqlens[s + 1] - 1`."""
    loss_mask: Tensor
    """bool `[N]`: the slots whose label enters losses and denominators."""
    tokens: Tensor
    """int64 `[N]`: where each slot lay in the batch it was first packed in. Per-token tensors made for that batch are
    read as `advantages[batch.tokens]` in any part of it."""
    sequences: Tensor
    """int64 `[S]`: the same for sequences."""
    max_seqlen: int
    """Slots in the longest sequence."""

    @classmethod
    def pack(cls, token_ids: Sequence[Sequence[int]], response_mask: Sequence[Sequence[bool]]) -> PackedBatch:
        """Packs whole sequences (prompt and response together).

        Args:
            token_ids: S sequences of token ids. One with fewer than two tokens predicts nothing and gets no slots.
            response_mask: the same shape; true on the tokens that the policy sampled. It becomes `loss_mask`: a slot
                is masked by its label's entry.

        Raises:
            ValueError: the two arguments differ in shape.
        """
        _check_same_lengths(token_ids, response_mask, name="response_mask")
        sizes = torch.tensor([max(len(ids) - 1, 0) for ids in token_ids], dtype=torch.int64)
        flat = torch.tensor(list(itertools.chain.from_iterable(token_ids)), dtype=torch.int64)
        mask = torch.tensor(list(itertools.chain.from_iterable(response_mask)), dtype=torch.bool)
        first, last = _ends(token_ids, flat.numel())
        starts = sizes.cumsum(0) - sizes
        slots = int(sizes.sum())
        return cls(
            input_ids=flat[~last],
            labels=flat[~first],
            positions=torch.arange(slots) - starts.repeat_interleave(sizes),
            cu_seqlens=_cumulative(sizes),
            loss_mask=mask[~first],
            tokens=torch.arange(slots),
            sequences=torch.arange(len(sizes)),
            max_seqlen=int(sizes.max()) if len(sizes) else 0,
        )

    def align(
        self, values: Sequence[Sequence[float]], *, dtype: torch.dtype = torch.float32, device: str | None = None
    ) -> Tensor:
        """Per-token numbers of whole sequences, aligned with `labels`.

        Args:
            values: as many numbers for each of the S sequences as it has tokens, the first token's included (nothing
                predicts it, so that its number is left out).
            dtype: of the result.
            device: of the result; the batch's own by default.

        Returns:
            `[N]`.

        Raises:
            ValueError: a sequence has another number of values than tokens.
        """
        sizes = self.lengths.tolist()
        if len(values) != len(sizes):
            raise ValueError(f"values has {len(values)} sequences, the batch has {len(sizes)}")
        for index, (row, size) in enumerate(zip(values, sizes, strict=True)):
            if max(len(row) - 1, 0) != size:
                raise ValueError(f"values[{index}] has {len(row)} entries for a sequence of {size + 1} tokens")
        flat = itertools.chain.from_iterable(row[1:] for row in values)
        return torch.tensor(list(flat), dtype=dtype, device=device or self.input_ids.device)

    @property
    def num_tokens(self) -> int:
        """N, the number of slots."""
        return self.input_ids.numel()

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences, those without slots included."""
        return self.sequences.numel()

    @property
    def lengths(self) -> Tensor:
        """int64 `[S]`: slots in each sequence."""
        return self.cu_seqlens.diff().long()

    def select(self, indices: Sequence[int] | Tensor) -> PackedBatch:
        """The sequences at `indices` (places in this batch, in the order given), packed anew."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.input_ids.device)
        sizes = self.lengths[chosen]
        starts = self.cu_seqlens[chosen].long()
        offsets = starts - (sizes.cumsum(0) - sizes)
        index = torch.arange(int(sizes.sum()), device=chosen.device) + offsets.repeat_interleave(sizes)
        return PackedBatch(
            input_ids=self.input_ids[index],
            labels=self.labels[index],
            positions=self.positions[index],
            cu_seqlens=_cumulative(sizes),
            loss_mask=self.loss_mask[index],
            tokens=self.tokens[index],
            sequences=self.sequences[chosen],
            max_seqlen=int(sizes.max()) if sizes.numel() else 0,
        )

    def split(self, max_tokens: int) -> list[PackedBatch]:
        """Consecutive parts of at most `max_tokens` slots each, in order; a longer sequence is a part of its own.

        The parts are as even as the order of the sequences allows without needing more of them.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; a micro-batch needs room for at least one slot")
        bounds = self.cu_seqlens.tolist()
        cuts = _fill(bounds, max_tokens)
        parts = len(cuts) - 1
        low, high = -(-bounds[-1] // max(parts, 1)), max_tokens
        while parts > 1 and low < high:
            middle = (low + high) // 2
            candidate = _fill(bounds, middle)
            if len(candidate) - 1 <= parts:
                cuts, high = candidate, middle
            else:
                low = middle + 1
        return [self._part(start, stop, bounds) for start, stop in itertools.pairwise(cuts)]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device."""
        return PackedBatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
            sequences=self.sequences.to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
        )

    def _part(self, start: int, stop: int, bounds: list[int]) -> PackedBatch:
        slots = slice(bounds[start], bounds[stop])
        return PackedBatch(
            input_ids=self.input_ids[slots],
            labels=self.labels[slots],
            positions=self.positions[slots],
            cu_seqlens=self.cu_seqlens[start : stop + 1] - bounds[start],
            loss_mask=self.loss_mask[slots],
            tokens=self.tokens[slots],
            sequences=self.sequences[start:stop],
            max_seqlen=max((bounds[i + 1] - bounds[i] for i in range(start, stop)), default=0),
        )


def _fill(bounds: list[int], limit: int) -> list[int]:
    """Places to cut so that no part holds more than `limit` slots, as long as no sequence does."""
    cuts = [0]
    for sequence in range(1, len(bounds)):
        too_long = bounds[sequence] - bounds[cuts[-1]] > limit
        if too_long and sequence - 1 > cuts[-1] and bounds[sequence - 1] > bounds[cuts[-1]]:
            cuts.append(sequence - 1)
    if len(bounds) > 1:
        cuts.append(len(bounds) - 1)
    return cuts


def _cumulative(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)


def _ends(token_ids: Sequence[Sequence[int]], total: int) -> tuple[Tensor, Tensor]:
    """Two masks over all tokens: the first, and the last, of each sequence."""
    sizes = [len(ids) for ids in token_ids if len(ids)]
    stops = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    first = torch.zeros(total, dtype=torch.bool)
    last = torch.zeros(total, dtype=torch.bool)
    first[stops - torch.tensor(sizes, dtype=torch.int64)] = True
    last[stops - 1] = True
    return first, last


def _check_same_lengths(left: Sequence[Sequence[int]], right: Sequence[Sequence[bool]], *, name: str) -> None:
    if len(left) != len(right):
        raise ValueError(f"{name} has {len(right)} sequences for {len(left)} in token_ids")
    differing: Iterable[int] = (i for i, (a, b) in enumerate(zip(left, right, strict=True)) if len(a) != len(b))
    if (index := next(iter(differing), None)) is not None:
        raise ValueError(f"{name}[{index}] has {len(right[index])} entries for {len(left[index])} tokens")
