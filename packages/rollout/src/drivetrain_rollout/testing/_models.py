"""Tiny models, and what transformers computes with them. Imports torch and transformers where it is called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain_rollout.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


def sha256_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A slow digest that needs no other library: of names, dtypes, shapes and bytes, in the order of the names."""
    import torch

    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def write_tiny_model(folder: Path, *, seed: int = 0, vocab_size: int = 48, **config: Any) -> Path:
    """Save a Llama of 0.3M random fp32 parameters, without a tokenizer, that vLLM runs on a CPU too.

    Its weights are large enough that the distribution of the next token is far from uniform.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**shape | config)).to(torch.float32).save_pretrained(folder)
    return folder


def load_tensors(folder: Path) -> list[tuple[str, Tensor]]:
    """The parameters of a saved model, as its checkpoint names them, each tied one once."""
    from transformers import AutoModelForCausalLM

    from drivetrain_rollout._manifest import checkpoint_tensors, manifest_of

    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = checkpoint_tensors(model)
    return [(name, tensors[name]) for name in manifest_of(model).shapes]


def reference_logprobs(folder: Path, completions: Sequence[Completion], *, temperature: float) -> list[list[float]]:
    """log softmax(logits / temperature) of each response token, by one transformers forward pass a completion."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for completion in completions:
        prompt, response = completion.prompt_token_ids, completion.response_token_ids
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    return found
