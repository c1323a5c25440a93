"""Settings of a learner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """AdamW, its learning-rate schedule, and the size of a micro-batch.

    Example:
        >>> config = LearnerConfig(lr=1e-3, warmup_steps=10, schedule="cosine", total_steps=110)
        >>> config.lr_at(4), config.lr_at(60)
        (0.0005, 0.0005)
    """

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on parameters with two or more dimensions (not on norms and biases)."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled so that their global norm is at most this. None: they are left alone."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to zero along half a cosine at `total_steps`."""
    total_steps: int | None = None
    """Optimizer steps of the whole run, warm-up included. The cosine schedule needs it."""
    max_tokens_per_microbatch: int = 16_384
    """Slots in a forward and backward pass at most; a longer sequence makes a micro-batch of its own."""

    def __post_init__(self) -> None:
        _at_least("lr", self.lr, 0.0)
        _at_least("weight_decay", self.weight_decay, 0.0)
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps is {self.eps}; AdamW needs a positive one")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; both must be in [0, 1)")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm}; give a positive norm, or None to leave gradients alone"
            )
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; choose 'constant' or 'cosine'")
        if self.schedule == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"total_steps is {self.total_steps}; a cosine schedule needs more than warmup_steps={self.warmup_steps}"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of the update that follows `step` earlier ones."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        progress = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def _at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value}; it must be a finite number of at least {least}")
