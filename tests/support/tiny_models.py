"""Tiny transformers models of every family that layouts are known for, with sizes that divide badly."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 130,
    "hidden_size": 36,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
# By name: the model type, and what its config has besides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {}),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 3, "moe_intermediate_size": 26, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
}


def tiny_config(name: str, **settings: Any) -> Any:
    """The config of one of `MODELS`."""
    model_type, more = MODELS[name]
    return AutoConfig.for_model(model_type, **(SIZES | more | settings))


def tiny_model(config: Any) -> Any:
    """A model with random weights: biases and norms too, which transformers starts at 0 and 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def save(config: Any, folder: Path) -> None:
    """A checkpoint as Hugging Face's are."""
    tiny_model(config).save_pretrained(folder)
