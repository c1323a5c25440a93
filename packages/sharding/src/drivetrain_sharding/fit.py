"""What a model takes of a device's memory, by role and by part: pure arithmetic, before anything is started.

The parts are those of a trainer with fp32 masters that computes in another type (`drivetrain-learner`: packed
sequences, log-probs in chunks of logits) and of an engine with a paged KV cache. Parameters, gradients and optimizer
states are counted from `train_layout` and `vllm_layout`; of activations, whatever grows with tokens times a width.
Bytes are what torch's allocator hands out; what a process takes besides is `PROCESS`.

N: tokens of a micro-batch. L: layers, H: hidden size, Q and K: query heads and key-value heads times their size,
I: intermediate size, V: vocabulary.

A Llama, under autocast to bf16, keeps for each block and token

    16 H    inputs of two norms and what they make of them, in fp32 like the residual stream
    10 H    of those, a bf16 copy for each of q, k, v, gate and up
    4 (Q + K)   queries, keys, values and what attention makes of them
    8 I     the gate before and after its activation, the other projection, their product

bytes, and once the bf16 copies of all matrices. A block that is checkpointed keeps 4 H for each token, and its copies
no longer than the forward pass. The head takes 16 bytes for each of 2^27 logits (12 without entropy), and 6 V H for its
weight's copy and gradient. FSDP2 has everything outside the blocks, and two blocks, gathered at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_sharding._memory import Passes, Sizes, parameter_shapes
from drivetrain_sharding._models import Model
from drivetrain_sharding.families import vllm_layout


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
    """What the head takes while it is being computed: logits of a chunk, its weight's copy and gradient."""
    kv_cache: int = 0
    buckets: int = 0
    """Of weight sync."""
    overhead: int = 0
    """What a process takes beside all this."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Fit) -> Fit:
        """Two roles on one device at the same time. Of roles that take turns, one is `at_rest`."""
        return Fit(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def at_rest(self, *, optimizer: bool = True) -> Fit:
        """What stays of this role while another one computes; `optimizer`: its states too."""
        states = self.optimizer if optimizer else 0
        return dataclasses.replace(self, gradients=0, optimizer=states, gathered=0, activations=0, logits=0)

    def describe(self) -> str:
        """A line for each part that takes anything, and the total, in GiB."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lines = [f"{name:12} {size / 2**30:8.2f} GiB" for name, size in parts.items() if size]
        return "\n".join([*lines, f"{'total':12} {self.total / 2**30:8.2f} GiB"])


PROCESS = Fit(overhead=1 << 30)
"""What to reckon with for each process on a device: CUDA's context, libraries' workspaces, kernels, and what the
allocator has reserved and not handed out."""


def training_fit(
    config: Any,
    *,
    tokens: int,
    microbatches: int = 1,
    compute: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = None,
    checkpoint_every: int | None = None,
    entropy: bool = True,
    value_head: bool = False,
    states: int = 2,
    shards: int = 1,
    tp: int = 1,
    offload_parameters: bool = False,
    offload_optimizer: bool = False,
) -> Fit:
    """Peak memory of a role that is trained, on the device that takes most.

    The peak is the largest of these moments, and the parts returned are that moment's:

    * the forward pass is through the last block, with every copy that autocast has made of a matrix;
    * the head's forward and backward pass: everything that the forward pass kept, and the logits of a chunk;
    * the backward pass of the last block, where activations are recomputed: the inputs of all blocks, one block whole;
    * the backward pass of the first block: one block whole, and nearly all gradients;
    * the embedding's: all gradients, and a second one of the embedding where the head has one too;
    * the optimizer's step: parameters, gradients and states.

    Args:
        config: a transformers config, or the mapping that its `config.json` holds. No mixture of experts.
        tokens: N, of the largest micro-batch.
        microbatches: of an optimizer step; with more than one, gradients are there while activations are.
        compute: the autocast dtype; masters, gradients and the optimizer's states are fp32.
        param_dtype: what FSDP2 gathers parameters in, as for `shard_model`; autocast then has nothing to copy.
        checkpoint_every: of `checkpoint_activations`. None: every block keeps its activations.
        entropy: whether the loss has an entropy term, whose gradient needs a second tensor of logits.
        value_head: a critic, whose head has one output.
        states: tensors of the optimizer for each parameter: AdamW 2, SGD with momentum 1.
        shards: ranks of FSDP2 that share parameters, gradients and states. Ranks with copies do not count.
        tp: tensor-parallel ranks.
        offload_parameters: parameters, gradients and states are on the CPU between uses (FSDP2's offload).
        offload_optimizer: the states are on the CPU but during the optimizer's step (`OptimizerOffload`).

    Raises:
        ValueError: an unknown family, a mixture of experts, or a number out of range.
    """
    _at_least_one(tokens=tokens, microbatches=microbatches, shards=shards, tp=tp, checkpoint_every=checkpoint_every)
    sizes = Sizes.of(config, tp=tp)
    if checkpoint_every is not None and checkpoint_every > sizes.layers:
        raise ValueError(f"checkpoint_every={checkpoint_every}, and there are {sizes.layers} blocks: use that or less")
    own = 0 if offload_parameters else _parameters(config, shards=shards, tp=tp, value_head=value_head)
    training = _Training(
        passes=Passes(sizes, tokens, (param_dtype or compute).itemsize, (param_dtype or torch.float32).itemsize),
        step=Fit(parameters=4 * own, gradients=4 * own, optimizer=4 * states * own),
        accumulating=microbatches > 1,
        every=checkpoint_every,
        entropy=entropy,
        head=not value_head,
        shards=shards if shards > 1 or offload_parameters else 0,
        tp=tp,
        offload_optimizer=offload_optimizer,
    )
    return max(training.moments(), key=lambda fit: fit.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """An optimizer step, moment by moment."""

    passes: Passes
    step: Fit
    """While the optimizer steps."""
    accumulating: bool
    every: int | None
    entropy: bool
    head: bool
    """Over the vocabulary."""
    shards: int
    """0: without FSDP2."""
    tp: int
    offload_optimizer: bool

    def moments(self) -> Iterator[Fit]:
        passes, sizes = self.passes, self.passes.sizes
        recomputed = sizes.layers // self.every if self.every else 0
        kept = (sizes.layers - recomputed) * passes.block + recomputed * passes.input
        matrices = sizes.matrices * passes.compute if passes.copies else 0
        copies = (sizes.layers - recomputed) * matrices
        table = 4 * sizes.table
        made = self.step.gradients if self.accumulating else 0
        every, pending, second = self._gradients()
        # FSDP2 reduces gradients in fp32, one block's while the next one's are made.
        reducing, making = (4 * sizes.block, passes.stream * sizes.block) if self.shards else (0, 0)

        # The forward pass is through the blocks.
        yield self._moment(made, 2, sizes.layers * matrices, kept + (passes.forward if recomputed else 0))
        if self.head:
            whole = table if self.tp > 1 else 0
            for logits in (passes.head_forward(entropy=self.entropy), passes.head_backward(entropy=self.entropy)):
                yield self._moment(made, 1, copies, kept + passes.last, whole + logits)
        # The backward pass is at the last blocks: where they are recomputed, one is there besides.
        again, behind = (passes.block, reducing) if recomputed else (0, 0)
        gradients = max(made + pending, table if self.head else 0)
        yield self._moment(gradients, 2, copies + matrices + behind, kept + again + passes.backward)
        # At the first block that is recomputed, with those before it.
        run = self.every or 1
        yield self._moment(every + pending + making, 1, run * matrices + reducing, run * passes.block + passes.backward)
        # At the embedding.
        yield self._moment(self.step.gradients + pending + second, 0, reducing, 2 * passes.input)
        yield self.step

    def _gradients(self) -> tuple[int, int, int]:
        """Of all blocks, up to those that FSDP2 has not reduced; of the head's weight, beside its parameter's; what the
        embedding's takes when it is made.

        Where head and embedding are one parameter, autograd keeps the head's until the embedding's is there. FSDP2
        keeps it whole until it has all gradients outside the blocks, which it then reduces in fp32.
        """
        sizes, table = self.passes.sizes, 4 * self.passes.sizes.table
        one = self.head and sizes.tied
        if not self.shards:
            pending = table if one and self.accumulating else 0
            return self.step.gradients, pending, table if one or self.accumulating else 0
        block = 0 if self.accumulating else 4 * sizes.block // self.shards
        pending = self.passes.stream * sizes.table if self.head else 0
        return max(self.step.gradients - block, 0), pending, table

    def _moment(self, gradients: int, blocks: int, copies: int, activations: int, logits: int = 0) -> Fit:
        """With so many blocks gathered by FSDP2, and everything outside the blocks."""
        sizes = self.passes.sizes
        gathered = (sizes.root + blocks * sizes.block) * self.passes.stream if self.shards else 0
        return Fit(
            parameters=self.step.parameters,
            gradients=gradients,
            optimizer=0 if self.offload_optimizer else self.step.optimizer,
            gathered=gathered + copies,
            activations=activations,
            logits=logits,
        )


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
    _at_least_one(tokens=tokens, shards=shards, tp=tp)
    sizes = Sizes.of(config, tp=tp)
    passes = Passes(sizes, tokens, compute.itemsize, dtype.itemsize)
    held = Fit(
        parameters=_parameters(config, shards=shards, tp=tp, value_head=False) * dtype.itemsize,
        gathered=(sizes.root + 2 * sizes.block) * dtype.itemsize if shards > 1 else 0,
    )
    whole = dtype.itemsize * sizes.table if tp > 1 else 0
    return max(
        dataclasses.replace(held, activations=passes.forward),
        dataclasses.replace(held, activations=2 * passes.input, logits=whole + passes.head_forward(entropy=entropy)),
        key=lambda fit: fit.total,
    )


def engine_fit(
    config: Any, *, kv_tokens: int, dtype: torch.dtype = torch.bfloat16, tp: int = 1, buckets: int = 0
) -> Fit:
    """Memory of a vLLM engine on one of its devices: weights, and a KV cache.

    Args:
        config: a transformers config, or the mapping that its `config.json` holds.
        kv_tokens: tokens that the cache has room for.
        dtype: of weights and cache.
        tp: tensor-parallel ranks of the engine.
        buckets: bytes of weight sync: `Plan.peak_bytes`, or 0 where the engine reads the learner's memory.

    Raises:
        ValueError: an unknown family, or sizes that vLLM cannot divide.
    """
    _at_least_one(tp=tp)
    shapes = vllm_layout(config, tp=tp, dtype=dtype).parameter_shapes(0)
    return Fit(
        parameters=sum(map(math.prod, shapes.values())) * dtype.itemsize,
        kv_cache=kv_tokens * kv_bytes(config, dtype=dtype, tp=tp),
        buckets=buckets,
    )


def kv_bytes(config: Any, *, dtype: torch.dtype = torch.bfloat16, tp: int = 1) -> int:
    """Bytes that a token takes of the KV cache on a device: keys and values of all layers, 2 K L elements. With more
    ranks than key-value heads, each holds one head."""
    model = Model.of(config)
    heads = max(model.kv_heads // tp, 1)
    return 2 * heads * model.head_dim * model.size("num_hidden_layers") * dtype.itemsize


def _parameters(config: Any, *, shards: int, tp: int, value_head: bool) -> int:
    """How many parameters the first rank holds, which no rank holds more than."""
    shapes = parameter_shapes(config, shards=shards, tp=tp)
    return sum(math.prod(shape) for name, shape in shapes.items() if not (value_head and name == "lm_head.weight"))


def _at_least_one(**numbers: int | None) -> None:
    if wrong := {name: number for name, number in numbers.items() if number is not None and number < 1}:
        raise ValueError(f"{', '.join(f'{name}={number}' for name, number in wrong.items())}: use 1 or more")
