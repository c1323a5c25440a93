"""What a model takes of a device's memory, by role and by part: pure arithmetic, before anything is started.

The parts are those of a trainer with fp32 masters that computes under autocast (`drivetrain-learner`) and of an engine
with a paged KV cache. Bytes are what torch's allocator hands out; a process takes a CUDA context, and what the
allocator holds in reserve, on top (`OVERHEAD`).

N: tokens of a micro-batch. L: layers, H: hidden size, Q and K: query heads and key-value heads times their size,
I: intermediate size, V: vocabulary, P: parameters.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_sharding._models import Model
from drivetrain_sharding.families import vllm_layout

OVERHEAD = 1 << 30
"""Bytes that a process takes beside what is predicted here: context, libraries, kernels."""

_LOGITS = 2**27
"""Logits that the learner's head makes at a time, over all tokens of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes on one device, by part."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """States: AdamW's two moments."""
    gathered: int = 0
    """Copies of parameters that computing needs: casts to the compute type, what FSDP2 has gathered."""
    activations: int = 0
    """What the forward pass keeps for the backward pass, and what the block that is being computed takes."""
    logits: int = 0
    """What the head takes while it is being computed: logits of a chunk, its weight's cast and gradient."""
    kv_cache: int = 0
    buckets: int = 0
    """Of weight sync."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Fit) -> Fit:
        """Two roles on one device at the same time."""
        return Fit(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def describe(self) -> str:
        """A line for each part that takes anything, and the total, in GiB."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lines = [f"{name:12} {size / 2**30:8.2f} GiB" for name, size in parts.items() if size]
        return "\n".join([*lines, f"{'total':12} {self.total / 2**30:8.2f} GiB"])


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Counts of parameters, and widths, of a model on one of `tp` tensor-parallel ranks."""

    layers: int
    hidden: int
    queries: int
    keys: int
    heads: int
    intermediate: int
    vocabulary: int
    total: int
    block: int
    """Parameters of one block."""
    matrices: int
    """Parameters of all blocks that are matrices of linear layers: those that autocast makes copies of."""
    head: int
    qk_norm: bool

    @classmethod
    def of(cls, config: Any, tp: int) -> _Sizes:
        model = Model.of(config)
        if model.size("num_experts"):
            raise ValueError("the memory of a mixture of experts is not predicted: which expert gets how many tokens "
                             "decides it")  # fmt: skip
        layers = model.size("num_hidden_layers")
        specs = model.tensors(torch.float32)
        blocks = [spec for spec in specs if ".layers." in spec.name]
        cut = sum(math.prod(spec.shape) for spec in blocks if len(spec.shape) > 1)
        whole = sum(math.prod(spec.shape) for spec in blocks if len(spec.shape) == 1)
        table = model.size("vocab_size") * model.hidden
        others = sum(math.prod(spec.shape) for spec in specs) - cut - whole
        return cls(
            layers=layers,
            hidden=model.hidden,
            queries=model.heads * model.head_dim // tp,
            keys=model.kv_heads * model.head_dim // min(tp, model.kv_heads),
            heads=model.heads // tp,
            intermediate=model.size("intermediate_size") // tp,
            vocabulary=model.size("vocab_size"),
            total=cut // tp + whole + others,
            block=(cut // tp + whole) // layers,
            matrices=cut // tp,
            head=table,
            qk_norm=model.rules.qk_norm,
        )

    def kept(self, compute: int, stream: int) -> int:
        """Bytes that one block keeps for its backward pass, for each token.

        The residual stream is fp32 under autocast. Kept of it are, twice: the sum that goes into a norm and the
        normalised values, and a cast for each linear layer that reads them (three and two). Attention keeps queries,
        keys, values and its output; the feed-forward block the gate before and after its activation, the other
        projection and their product.
        """
        norms = 2 * (2 * stream * self.hidden + 4)
        casts = 5 * self.hidden * compute if compute != stream else 2 * self.hidden * compute
        attention = 2 * (self.queries + self.keys) * compute + 4 * self.heads
        if self.qk_norm:
            attention += (self.queries + self.keys) * (compute + 4)
        return norms + casts + attention + 4 * self.intermediate * compute


def training_fit(
    config: Any,
    *,
    tokens: int,
    microbatches: int = 1,
    compute: torch.dtype = torch.bfloat16,
    checkpoint_every: int | None = None,
    entropy: bool = True,
    value_head: bool = False,
    shards: int = 1,
    tp: int = 1,
    offload_parameters: bool = False,
    offload_optimizer: bool = False,
) -> Fit:
    """Peak memory of a role that is trained, on one device.

    The peak is the largest of four moments, and the parts returned are that moment's:

    * the head's backward pass: everything that the forward pass kept, and the logits of a chunk;
    * the backward pass of the last block, where activations are recomputed: the inputs of all blocks, one block whole;
    * the backward pass of the first block: one block whole, and nearly all gradients;
    * the optimizer's step: parameters, gradients and states.

    Args:
        config: a transformers config, or the mapping that its `config.json` holds. No mixture of experts.
        tokens: N, of the largest micro-batch.
        microbatches: of an optimizer step; with more than one, gradients are there while activations are.
        compute: the autocast dtype; masters, gradients and AdamW's moments are fp32.
        checkpoint_every: recompute the activations of blocks, of which every n-th keeps its input. None: keep all.
        entropy: whether the loss has an entropy term, whose gradient needs a second tensor of logits.
        value_head: a critic, whose head has one output.
        shards: ranks of FSDP2 that share parameters, gradients and states.
        tp: tensor-parallel ranks.
        offload_parameters: parameters, gradients and states on the CPU between uses (FSDP2's offload).
        offload_optimizer: the states on the CPU but during the optimizer's step.

    Raises:
        ValueError: an unknown family, or a number out of range.
    """
    if tokens < 1 or microbatches < 1 or shards < 1 or tp < 1 or (checkpoint_every or 1) < 1:
        raise ValueError(f"tokens={tokens}, microbatches={microbatches}, shards={shards}, tp={tp}: use 1 or more")
    sizes = _Sizes.of(config, tp)
    width, autocast = compute.itemsize, compute != torch.float32
    total = sizes.total - (sizes.head if value_head and not _tied(config) else 0)
    own = -(-total // shards)
    static = Fit(
        parameters=0 if offload_parameters else 4 * own,
        gradients=0 if offload_parameters else 4 * own,
        optimizer=0 if offload_parameters or offload_optimizer else 8 * own,
    )
    gathered = _gathered(sizes, width, sharded=shards > 1 or offload_parameters)
    block = tokens * sizes.kept(width, 4)
    # Gradients of the widest tensors of a block, two at a time, beside what it keeps.
    working = tokens * 2 * max(2 * sizes.intermediate * width, 4 * sizes.hidden)
    if checkpoint_every is None:
        kept, casts = sizes.layers * block, 2 * sizes.matrices if autocast else 0
        inner = kept
    else:
        kept = -(-sizes.layers // checkpoint_every) * tokens * 4 * sizes.hidden
        casts = 0
        inner = kept + checkpoint_every * block + working
    kept += tokens * 3 * 4 * sizes.hidden  # around the last norm
    logits = 0 if value_head else head_bytes(config, tokens=tokens, compute=compute, entropy=entropy, tp=tp)
    made = static.gradients if microbatches > 1 else 0
    table = 0 if value_head else 4 * sizes.head // shards
    moments = [
        dataclasses.replace(static, gradients=made, gathered=gathered + casts, activations=kept, logits=logits),
        dataclasses.replace(
            static, gradients=max(made, table), gathered=gathered + (casts or 2 * sizes.block), activations=inner
        ),
        dataclasses.replace(
            static, gathered=gathered + 2 * sizes.block, activations=(checkpoint_every or 1) * block + working
        ),
        dataclasses.replace(static, optimizer=0 if offload_parameters else 8 * own),
    ]
    return max(moments, key=lambda fit: fit.total)


def frozen_fit(
    config: Any,
    *,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype = torch.bfloat16,
    entropy: bool = False,
    shards: int = 1,
    tp: int = 1,
) -> Fit:
    """Peak memory of a role that only computes log-probs: a reference.

    Args:
        tokens: N, of the largest micro-batch.
        dtype: of the parameters. The others are as for `training_fit`.
    """
    sizes = _Sizes.of(config, tp)
    width = compute.itemsize
    stream = 4 if dtype == torch.float32 else width
    working = tokens * max(
        2 * stream * sizes.hidden + 3 * sizes.intermediate * width,
        4 * stream * sizes.hidden + 2 * (sizes.queries + sizes.keys) * 4,
    )
    logits = head_bytes(config, tokens=tokens, compute=compute, entropy=entropy, backward=False, tp=tp)
    static = Fit(
        parameters=-(-sizes.total // shards) * dtype.itemsize,
        gathered=_gathered(sizes, width, sharded=shards > 1),
    )
    moments = [
        dataclasses.replace(static, activations=tokens * stream * sizes.hidden, logits=logits),
        dataclasses.replace(static, activations=working + tokens * stream * sizes.hidden),
    ]
    return max(moments, key=lambda fit: fit.total)


def engine_fit(
    config: Any, *, kv_tokens: int, dtype: torch.dtype = torch.bfloat16, tp: int = 1, buckets: int = 0
) -> Fit:
    """Memory of a vLLM engine on one device: weights, and a KV cache of `kv_tokens` tokens, 2 K L elements each.

    Args:
        buckets: bytes of weight sync: `Plan.peak_bytes`, or 0 where the engine reads the learner's memory.
    """
    held = vllm_layout(config, tp=tp, dtype=dtype).parameter_shapes(0)
    return Fit(
        parameters=sum(math.prod(shape) for shape in held.values()) * dtype.itemsize,
        kv_cache=kv_tokens * kv_bytes(config, dtype=dtype, tp=tp),
        buckets=buckets,
    )


def kv_bytes(config: Any, *, dtype: torch.dtype = torch.bfloat16, tp: int = 1) -> int:
    """Bytes that a token takes of the KV cache: 2 K L elements."""
    model = Model.of(config)
    heads = max(model.kv_heads // tp, 1)
    return 2 * heads * model.head_dim * model.size("num_hidden_layers") * dtype.itemsize


def head_bytes(
    config: Any, *, tokens: int, compute: torch.dtype, entropy: bool, backward: bool = True, tp: int = 1
) -> int:
    """What the head takes at its peak: logits of a chunk in fp32 (twice, with entropy) and in the compute type, those
    of the next chunk, which are made before the former are let go, its weight in the compute type and, going backward,
    that weight's gradient in fp32 and one chunk's summand of it."""
    sizes = _Sizes.of(config, tp)
    chunk = min(tokens * sizes.vocabulary, _LOGITS // sizes.vocabulary * sizes.vocabulary)
    weight = sizes.head * compute.itemsize if compute != torch.float32 else 0
    following = chunk * (4 + compute.itemsize) if tokens * sizes.vocabulary > chunk else 0
    if not backward:
        return chunk * (8 if entropy else 4 + compute.itemsize) + weight
    made = chunk * ((8 if entropy else 4) + compute.itemsize)
    return made + following + weight + sizes.head * (4 + compute.itemsize)


def _gathered(sizes: _Sizes, width: int, *, sharded: bool) -> int:
    """What FSDP2 has whole at a time: everything outside the blocks, and two blocks."""
    if not sharded:
        return 0
    return (sizes.total - sizes.layers * sizes.block + 2 * sizes.block) * width


def _tied(config: Any) -> bool:
    return Model.of(config).tied
