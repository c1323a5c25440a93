"""What a complete set of weights of a Hugging Face model is, read from its config without making the model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain_rollout._checks import Manifest


def read_config(model: str) -> Any:
    """The model's config. ValueError names the folder or hub id when there is none."""
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"model {model!r} is no folder with a config.json, and no hub id that can be read") from error


def resolve_dtype(dtype: str, config: Any, device: str) -> torch.dtype:
    """The torch dtype that ``EngineConfig.dtype`` asks for; ``auto`` is the one the model was saved in."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    saved = config.dtype
    if saved is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, saved) if isinstance(saved, str) else saved  # type: ignore[no-any-return]


def manifest_of(module: torch.nn.Module) -> Manifest:
    """Names and shapes of the module's parameters and saved buffers, each tied parameter under its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name not in aliases}
    return Manifest(shapes=shapes, aliases=aliases)


def read_manifest(config: Any) -> Manifest:
    """The manifest of the model that transformers makes of ``config``, in no memory to speak of."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return manifest_of(module)
