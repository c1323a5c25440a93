"""Mixtures of experts, of which transformers stacks a layer's experts and checkpoints hold each by itself.

experts.gate_up_proj  [experts, 2 intermediate, hidden]   experts.E.gate_proj.weight, experts.E.up_proj.weight
experts.down_proj     [experts, hidden, intermediate]     experts.E.down_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drivetrain_sharding.layout import Box

MODEL_TYPES = frozenset({
    "afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "hunyuan_v1_moe", "longcat_flash", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open",
})  # fmt: skip
"""Those of transformers that do so under these names."""

_STACK = re.compile(r"^(?:.*\.)?experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class Member:
    """One projection of one expert in a stack."""

    tensor: str
    """Its name in a checkpoint."""
    expert: int
    box: Box
    """Where it lies in `stack[expert]`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    def of(self, stack: Tensor) -> Tensor:
        """A view of it."""
        return self.box.of(stack[self.expert])


def is_stack(name: str, tensor: Tensor) -> bool:
    """Whether a parameter of one of `MODEL_TYPES` is such a stack."""
    return tensor.ndim == 3 and _STACK.match(name) is not None


def projections(name: str) -> tuple[str, ...]:
    """Those of an expert that lie behind one another in a stack of this name, along its second dimension."""
    projection = name.rpartition(".")[2]
    return ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)


def members(name: str, shape: Sequence[int]) -> tuple[Member, ...]:
    """What a stack consists of, expert by expert."""
    at, held = name.rpartition(".")[0], projections(name)
    experts, outputs, inputs = shape
    rows = outputs // len(held)
    return tuple(
        Member(f"{at}.{expert}.{each}.weight", expert, Box((index * rows, 0), ((index + 1) * rows, inputs)))
        for expert in range(experts)
        for index, each in enumerate(held)
    )
