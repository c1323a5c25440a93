"""The whole tensors of the model families that are known: names and shapes from a config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain_sharding.layout import TensorSpec

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the transformers models of one `model_type` differ from Llama's."""

    head_dim: int | None = None
    """What a config without one means; None: hidden size over heads."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have a bias whatever the config says, the output's has none."""
    bias_settings: tuple[str, ...] = ("attention_bias",)
    """Which settings of the config give biases."""
    qk_norm: bool = False
    """Queries and keys are normalised by head."""
    feedforward_norms: bool = False
    """The feed-forward block has norms of its own before and behind it."""
    tied: bool = False
    """Whether the head is the embedding where the config does not say."""
    experts: bool = False
    """Layers may be mixtures of experts."""
    splits_embedding: bool = False
    """Whether the family's tensor-parallel plan cuts an embedding that is not tied, too."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(bias_settings=("attention_bias", "mlp_bias")),
    "mistral": Family(bias_settings=()),
    "qwen2": Family(qkv_bias=True, bias_settings=()),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "gemma3_text": Family(head_dim=256, qk_norm=True, feedforward_norms=True, tied=True, splits_embedding=True),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What a config says about a model's tensors."""

    family: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, config: Any) -> Model:
        """From a transformers config, or what `config.json` holds.

        Raises:
            ValueError: the family is not known here, or a size is missing.
        """
        settings = dict(config if isinstance(config, Mapping) else config.to_dict())
        # One setting, two names: transformers' config classes use the latter, published files the former.
        settings.setdefault("num_experts", settings.get("num_local_experts"))
        family = settings.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ValueError(
                f"model type {family!r}: layouts are known for {', '.join(FAMILIES)}. For another model, read its "
                "layout from the module with read_layout, or send its whole tensors with named_tensors"
            )
        needed = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        if FAMILIES[family].experts:
            needed += ["num_experts", "moe_intermediate_size"]
        for name in needed:
            if not isinstance(settings.get(name), int):
                raise ValueError(f"{name} of this {family} config is {settings.get(name)!r}; it must be given")
        return cls(family, settings)

    @property
    def rules(self) -> Family:
        return FAMILIES[self.family]

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads") or self.heads

    @property
    def head_dim(self) -> int:
        return self.size("head_dim") or self.rules.head_dim or self.hidden // self.heads

    @property
    def tied(self) -> bool:
        said = self.settings.get("tie_word_embeddings")
        return self.rules.tied if said is None else bool(said)

    @property
    def ties(self) -> dict[str, str]:
        return {_HEAD: _EMBEDDING} if self.tied else {}

    def size(self, name: str) -> int:
        """A number of the config; 0 where it has none."""
        return int(self.settings.get(name) or 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is a mixture of experts."""
        return (
            self.rules.experts
            and self.size("num_experts") > 0
            and layer not in (self.settings.get("mlp_only_layers") or ())
            and (layer + 1) % (self.size("decoder_sparse_step") or 1) == 0
        )

    def tensors(self, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """All whole tensors, in the order of the transformers module."""
        return tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in self._shapes())

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        table = (self.size("vocab_size"), self.hidden)
        yield _EMBEDDING, table
        for layer in range(self.size("num_hidden_layers")):
            at = f"model.layers.{layer}"
            yield from self._attention(f"{at}.self_attn")
            if self.has_experts(layer):
                yield from self._experts(f"{at}.mlp")
            else:
                yield from self._feed_forward(f"{at}.mlp")
            norms = ["input", "post_attention"]
            if self.rules.feedforward_norms:
                norms += ["pre_feedforward", "post_feedforward"]
            yield from ((f"{at}.{norm}_layernorm.weight", (self.hidden,)) for norm in norms)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield _HEAD, table

    def _attention(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        bias = self._bias("attention_bias")
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"{at}.{name}", self.hidden, size, bias=bias or self.rules.qkv_bias)
        yield from _linear(f"{at}.o_proj", queries, self.hidden, bias=bias)
        if self.rules.qk_norm:
            yield from ((f"{at}.{name}.weight", (self.head_dim,)) for name in ("q_norm", "k_norm"))

    def _feed_forward(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        size, bias = self.size("intermediate_size"), self._bias("mlp_bias")
        yield from _linear(f"{at}.gate_proj", self.hidden, size, bias=bias)
        yield from _linear(f"{at}.up_proj", self.hidden, size, bias=bias)
        yield from _linear(f"{at}.down_proj", size, self.hidden, bias=bias)

    def _experts(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        size = self.size("moe_intermediate_size")
        experts = [f"{at}.experts.{expert}" for expert in range(self.size("num_experts"))]
        for expert in experts:
            yield f"{expert}.gate_proj.weight", (size, self.hidden)
            yield f"{expert}.up_proj.weight", (size, self.hidden)
        yield from ((f"{expert}.down_proj.weight", (self.hidden, size)) for expert in experts)
        yield f"{at}.gate.weight", (self.size("num_experts"), self.hidden)

    def _bias(self, setting: str) -> bool:
        return setting in self.rules.bias_settings and bool(self.settings.get(setting))


def _linear(at: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.weight", (outputs, inputs)
    if bias:
        yield f"{at}.bias", (outputs,)
