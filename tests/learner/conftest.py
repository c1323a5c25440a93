"""A tiny Llama and sequences for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCABULARY = 23


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_llama() -> Callable[..., Any]:
    """Two layers, grouped-query attention, fp32, always the same weights for a seed."""

    def make(*, seed: int = 0, **changes: Any) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.3,
        }
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**settings | changes))

    return make


@pytest.fixture
def make_sequences() -> Callable[..., list[list[int]]]:
    """Random token ids of the lengths asked for."""

    def make(*lengths: int, seed: int = 1) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    return make
