"""The bytes of a transformer's forward and backward pass, part by part.

N: tokens of a micro-batch. L: layers, H: hidden size, Q and K: query heads and key-value heads times their size,
I: intermediate size, V: vocabulary; c: bytes of the compute type, s: bytes of the residual stream, which is fp32 under
autocast. Q, K and I are those of one tensor-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_sharding._models import Model
from drivetrain_sharding.families import train_layout
from drivetrain_sharding.layout import Mesh

LOGITS = 2**27
"""Logits that the learner's head makes at a time, over all tokens of a chunk."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths of a model, and counts of its parameters, on one tensor-parallel rank before FSDP2 shards them."""

    layers: int
    hidden: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norms: int
    """Of a block, over the residual stream."""
    qk_norm: bool
    wide_norm: bool
    """Norms multiply by their weight in fp32, whatever they are given."""
    tied: bool
    block: int
    """Parameters of one block."""
    matrices: int
    """Those of one block's linear layers: what autocast makes copies of."""
    root: int
    """Parameters outside the blocks."""
    table: int
    """Parameters of the head's weight, whole."""

    @classmethod
    def of(cls, config: Any, *, tp: int = 1) -> Sizes:
        """From a config.

        Raises:
            ValueError: an unknown family, a mixture of experts, or sizes that `tp` ranks cannot divide.
        """
        model = Model.of(config)
        if any(model.has_experts(layer) for layer in range(model.size("num_hidden_layers"))):
            raise ValueError(
                f"this {model.family} is a mixture of experts: which expert gets how many tokens decides what training "
                "it takes, which is not predicted. engine_fit and kv_bytes are"
            )
        shapes = parameter_shapes(config, tp=tp)
        block = [shape for name, shape in shapes.items() if ".layers.0." in name]
        layers = model.size("num_hidden_layers")
        parameters = sum(map(math.prod, block))
        return cls(
            layers=layers,
            hidden=model.hidden,
            queries=model.heads * model.head_dim // tp,
            keys=model.kv_heads * model.head_dim // tp,
            heads=model.heads // tp,
            head_dim=model.head_dim,
            intermediate=model.size("intermediate_size") // tp,
            vocabulary=model.size("vocab_size"),
            norms=4 if model.rules.feedforward_norms else 2,
            qk_norm=model.rules.qk_norm,
            wide_norm=model.rules.feedforward_norms,
            tied=model.tied,
            block=parameters,
            matrices=sum(math.prod(shape) for shape in block if len(shape) > 1),
            root=sum(map(math.prod, shapes.values())) - layers * parameters,
            table=model.size("vocab_size") * model.hidden,
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """Bytes of a forward and a backward pass over N tokens."""

    sizes: Sizes
    tokens: int
    compute: int
    """Bytes of the type of matrix products."""
    stream: int
    """Bytes of the type of the residual stream, which is that of the parameters as the blocks see them."""

    @property
    def copies(self) -> bool:
        """Whether linear layers copy their inputs and weights into the compute type: autocast."""
        return self.compute != self.stream

    @property
    def norm(self) -> int:
        """What RMSNorm keeps of each token: its input in fp32, the normalised values and a number."""
        return self.sizes.hidden * (4 + (4 if self.sizes.wide_norm else self.stream)) + 4

    @property
    def block(self) -> int:
        """What a block keeps for its backward pass.

        Linear layers keep their inputs: under autocast a copy for each of q, k, v, gate and up, otherwise one behind
        each norm that they share. Attention keeps queries, keys, values and its output, and a number for each head. The
        feed-forward block keeps the gate before and after its activation, the other projection, and their product.
        Norms of queries and keys keep both in fp32, and normalised.
        """
        z, c = self.sizes, self.compute
        inputs = (5 if self.copies else 2) * z.hidden * c
        attention = 2 * (z.queries + z.keys) * c + 4 * z.heads
        if z.qk_norm:
            attention += (z.queries + z.keys) * (4 + (4 if z.wide_norm else c))
        return self.tokens * (z.norms * self.norm + inputs + attention + 4 * z.intermediate * c)

    @property
    def forward(self) -> int:
        """What a block takes while it runs, beside what it keeps or where it keeps nothing: its feed-forward part, or
        its attention around the rotary embedding, which is in the stream's type."""
        z, c, s = self.sizes, self.compute, self.stream
        feed_forward = s * z.hidden + 3 * z.intermediate * c
        projected = (z.queries + z.keys) * (s if z.qk_norm else c) + z.keys * c
        attention = projected + s * max(3 * z.queries, z.queries + 3 * z.keys)
        return self.tokens * (3 * s * z.hidden + max(feed_forward, attention) + 2 * s * z.head_dim)

    @property
    def backward(self) -> int:
        """What a block's backward pass takes beside what is kept: gradients of the stream and of two projections."""
        z = self.sizes
        return self.tokens * (2 * z.intermediate * self.compute + (self.stream + self.compute) * z.hidden)

    @property
    def last(self) -> int:
        """What is kept and made around the head: the last norm's, the tokens that have a label, their gradient."""
        return self.tokens * (self.norm + 2 * self.stream * self.sizes.hidden)

    @property
    def input(self) -> int:
        """The residual stream: what a checkpointed block keeps."""
        return self.tokens * self.stream * self.sizes.hidden

    def head_forward(self, *, entropy: bool) -> int:
        """The head's log-probs: copies of a chunk of logits, one of them within logsumexp, and the weight's copy. From
        the second chunk on, those of the one before are still there."""
        chunk, several = self._chunk()
        again = 0 if self.compute == 4 else self.compute
        held = (16 if several else 12) if entropy else (8 + again if several else 8)
        return held * chunk + self._head_copy()

    def head_backward(self, *, entropy: bool) -> int:
        """The head's backward pass: a chunk's logits (twice, with entropy) and their gradient in the compute type; the
        next chunk's logits, or the chunk's part of the weight's gradient; the weight's copy, and its gradient."""
        chunk, several = self._chunk()
        again = 0 if self.compute == 4 else self.compute
        held = ((8 if entropy else 4) + again) * chunk
        following = (4 + again) * chunk if several else 0
        return held + max(following, self.compute * self.sizes.table) + 4 * self.sizes.table + self._head_copy()

    def _head_copy(self) -> int:
        return self.compute * self.sizes.table if self.copies else 0

    def _chunk(self) -> tuple[int, bool]:
        """Logits of a chunk, and whether there are several chunks."""
        rows = max(LOGITS // self.sizes.vocabulary, 1)
        return min(self.tokens, rows) * self.sizes.vocabulary, self.tokens > rows


def parameter_shapes(config: Any, *, shards: int = 1, tp: int = 1) -> dict[str, tuple[int, ...]]:
    """What the first rank holds, which no rank holds more than."""
    mesh = Mesh((("shard", shards), ("tp", tp)))
    layout = train_layout(
        config, mesh, dtype=torch.float32, fsdp="shard" if shards > 1 else None, tp="tp" if tp > 1 else None
    )
    return layout.parameter_shapes(0)
