"""From rollouts to tensors. Tokens are shifted against labels once, in `PackedBatch.pack`; the rest is aligned."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from drivetrain_learner import PackedBatch
from drivetrain_rollout import Rollout

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's share of a step: S sequences, N tokens laid end to end, no padding.

    Example: a prompt `[1, 7, 3]` answered by `[4, 2]` gives the labels `[7, 3, 4, 2]` with `loss_mask` `[0, 0, 1, 1]`.
    """

    packed: PackedBatch
    scores: Tensor
    """[S] float32, from the reward function."""
    rollout_logprobs: Tensor
    """[N] float32, as the engine reported them; 0 where `loss_mask` is 0."""
    sample_index: Tensor
    """[S] int64 on the CPU: the place of each sequence in the step's rollouts, over all ranks."""
    num_samples: int
    """Rollouts of the step over all ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Per-token numbers of a batch before the first update on it. All `[N]`, float32, 0 where nothing is trained."""

    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor


def make_batch(rollouts: Sequence[Rollout], *, rank: int, size: int, device: str) -> Batch:
    """Pack every `size`-th rollout, beginning with this rank's."""
    mine = rollouts[rank::size]
    packed = PackedBatch.pack([rollout.token_ids for rollout in mine], [rollout.response_mask for rollout in mine])
    return Batch(
        packed=packed.to(device),
        scores=torch.tensor([rollout.score for rollout in mine], dtype=torch.float32, device=device),
        rollout_logprobs=packed.align([rollout.rollout_logprobs for rollout in mine], device=device),
        sample_index=torch.arange(rank, len(rollouts), size),
        num_samples=len(rollouts),
    )


def minibatches(batch: Batch, count: int, *, seed: int) -> Iterator[PackedBatch]:
    """Split the step's samples at random into `count` parts, the same ones whatever the number of ranks.

    The permutation is over the samples of all ranks, and each rank takes its own of each part.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch.num_samples, generator=generator)
    place = torch.empty_like(order)
    place[order] = torch.arange(batch.num_samples)
    part = place * count // max(batch.num_samples, 1)
    for index in range(count):
        yield batch.packed.select(torch.nonzero(part[batch.sample_index] == index).flatten())
