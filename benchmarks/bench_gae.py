"""`gae` at [512, 4096] against the loop over time steps that other trainers run: 10 times faster is owed."""

import pytest
import torch
from drivetrain_algorithms import gae
from torch import Tensor

GAMMA, LAM = 0.99, 0.95
SHAPE = (512, 4096)
"""Sequences and tokens."""


def plain_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """One step at a time, for batches in which every slot is a step."""
    advantage = torch.zeros(len(values))
    advantages = []
    for t in reversed(range(values.shape[1])):
        next_values = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        advantage = delta + GAMMA * LAM * advantage
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1], dim=1)
    return stacked, stacked + values


def masked_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same for batches with slots that are no steps: these are passed over."""
    mask = mask.to(values.dtype)
    next_values = advantage = torch.zeros(len(values))
    advantages = []
    for t in reversed(range(values.shape[1])):
        step = mask[:, t]
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        next_values = values[:, t] * step + (1 - step) * next_values
        advantage = (delta + GAMMA * LAM * advantage) * step + (1 - step) * advantage
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1], dim=1) * mask
    return stacked, (stacked + values) * mask


@pytest.mark.parametrize("loop", [plain_loop, masked_loop])
def test_gae(against, benchmark, loop):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, *SHAPE, generator=generator)
    mask = torch.ones(SHAPE, dtype=torch.bool)
    if loop is masked_loop:
        lengths = torch.randint(SHAPE[1] // 8, SHAPE[1] + 1, (SHAPE[0], 1), generator=generator)
        mask = (torch.arange(SHAPE[1]) < lengths) & (torch.rand(SHAPE, generator=generator) > 0.1)

    def ours() -> tuple[Tensor, Tensor]:
        return gae(rewards, values, mask, gamma=GAMMA, lam=LAM)

    for mine, theirs in zip(ours(), loop(rewards, values, mask), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    against(ours, lambda: loop(rewards, values, mask), owed=10, rounds=11)
    benchmark.extra_info["threads"] = torch.get_num_threads()
