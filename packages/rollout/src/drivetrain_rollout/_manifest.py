"""What a complete set of weights of a Hugging Face model is, read from its config without making the model.

transformers stacks the experts of a layer in two parameters, and the checkpoints of most families hold each by itself:

    experts.gate_up_proj  [experts, 2 intermediate, hidden]   experts.E.gate_proj.weight, experts.E.up_proj.weight
    experts.down_proj     [experts, hidden, intermediate]     experts.E.down_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from drivetrain_rollout._checks import Manifest

_STACK = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SAVED_APART = {f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down")}
"""How transformers says of a family that its checkpoints hold experts apart."""


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
    """Names and shapes of what the model's checkpoint holds, each tied parameter under its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(module).items() if name not in aliases}
    return Manifest(shapes=shapes, aliases=aliases)


def checkpoint_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and saved buffers as its checkpoint names them. They share the module's memory."""
    state: dict[str, torch.Tensor] = module.state_dict()
    if not _stacks_experts(module):
        return state
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim == 3 and (stack := _STACK.match(name)):
            found.update(_experts(stack[1], _PROJECTIONS[stack[2]], tensor))
        else:
            found[name] = tensor
    return found


def _stacks_experts(module: Any) -> bool:
    conversions = get_checkpoint_conversion_mapping(module.config.model_type) or ()
    return _SAVED_APART.issubset(pattern for conversion in conversions for pattern in conversion.source_patterns)


def _experts(at: str, projections: tuple[str, ...], stack: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for index, expert in enumerate(stack.unbind()):
        for name, part in zip(projections, expert.chunk(len(projections)), strict=True):
            yield f"{at}.{index}.{name}.weight", part


def read_manifest(config: Any) -> Manifest:
    """The manifest of the model that transformers makes of ``config``, in no memory to speak of."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return manifest_of(module)
