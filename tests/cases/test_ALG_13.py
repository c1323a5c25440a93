"""Advantages were whitened over a rank, over parts of a sequence or a second time, so that ranks got different numbers
for the same reward: THUDM/slime#2235, verl-project/verl#6497, axon-rl/gem#113.

This file is also the program that each of two gloo ranks runs; it leaves what it found as JSON."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_algorithms import (
    Reduce,
    explained_variance,
    gpg_advantages,
    group_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    spread_over_tokens,
    whiten,
)
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor

WORLD = 2
LENGTHS = (5, 500)
GROUP_SIZE = 4
NAMES = [
    "whitened per token",
    "whitened per token, mean kept",
    "whitened per response",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gpg_advantages",
    "explained_variance",
]


class Batch:
    """What the given ranks hold: rank 0 short responses of high scores, rank 1 long ones of low scores; packed."""

    def __init__(self, ranks: list[int]) -> None:
        scores, noise, mask, lengths = [], [], [], []
        for rank in ranks:
            generator = torch.Generator().manual_seed(rank)
            scores.append((5.0, -5.0)[rank] + torch.rand(GROUP_SIZE, generator=generator))
            noise.append(torch.rand(GROUP_SIZE, LENGTHS[rank], generator=generator))
            mask.append(noise[-1] > 0.1)  # a tenth of the slots are a tool's
            mask[-1][0] &= rank == 0  # rank 1 has a response without a token to train on
            lengths += [LENGTHS[rank]] * GROUP_SIZE
        self.scores = torch.cat(scores)
        self.noise, self.mask = (torch.cat([x.flatten() for x in parts]) for parts in (noise, mask))
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        self.group_ids = torch.arange(len(ranks)).repeat_interleave(GROUP_SIZE)

    def trained(self) -> Tensor:
        """Which responses have a token that enters the loss."""
        return torch.stack([self.mask[start:end].any() for start, end in pairwise(self.cu_seqlens.tolist())])

    def results(self, reduce: Reduce | None) -> dict[str, Tensor]:
        cu_seqlens, mask = self.cu_seqlens, self.mask
        per_token = spread_over_tokens(self.scores, mask, cu_seqlens=cu_seqlens) + self.noise
        rewards = spread_over_tokens(self.scores, mask, cu_seqlens=cu_seqlens) / 100
        return {
            "whitened per token": whiten(per_token, mask, reduce=reduce),
            "whitened per token, mean kept": whiten(per_token, mask, shift_mean=False, reduce=reduce),
            "whitened per response": whiten(self.scores, self.trained(), reduce=reduce),
            "reinforce_plus_plus": reinforce_plus_plus(rewards, mask, gamma=0.99, reduce=reduce, cu_seqlens=cu_seqlens),
            "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline(
                self.scores, self.group_ids, mask, reduce=reduce, cu_seqlens=cu_seqlens
            ),
            "gpg_advantages": gpg_advantages(self.scores > 5.5, self.group_ids, reduce=reduce),
            "explained_variance": explained_variance(per_token, rewards, mask, reduce=reduce),
        }


def all_reduce(x: Tensor) -> Tensor:
    """The sum over all ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total


def look(rank: int) -> dict[str, Any]:
    return {name: x.tolist() for name, x in Batch([rank]).results(all_reduce).items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    files = run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)
    return [{name: torch.tensor(x) for name, x in file.items()} for file in files]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_numbers_of_one_process(found: list[dict[str, Tensor]], name: str) -> None:
    together = Batch([0, 1]).results(None)[name].float()
    if together.dim() == 0:
        assert [rank[name].item() for rank in found] == pytest.approx([together.item()] * WORLD, rel=1e-6)
    else:
        torch.testing.assert_close(torch.cat([rank[name] for rank in found]), together, rtol=1e-5, atol=1e-6)
        apart = torch.cat([Batch([rank]).results(None)[name] for rank in range(WORLD)])
        assert not torch.allclose(apart, together, rtol=1e-2), "what each rank would have got by itself is no test"


def test_all_ranks_share_one_affine_transform(found: list[dict[str, Tensor]]) -> None:
    whitened = [rank["whitened per response"] for rank in found]
    slopes: list[float] = []
    for rank in range(WORLD):
        batch = Batch([rank])
        kept = batch.trained()
        slopes += (whitened[rank][kept].diff() / batch.scores[kept].diff()).tolist()
    assert slopes == pytest.approx([slopes[0]] * 5, rel=1e-3)
    # High rewards stay above low ones: on its own, each rank would have brought its mean to 0.
    assert whitened[0].min() > 0.5
    assert whitened[1][Batch([1]).trained()].max() < -0.5


def test_the_unit_says_who_dominates_the_statistics(found: list[dict[str, Tensor]]) -> None:
    batches = [Batch([rank]) for rank in range(WORLD)]
    # Per token, a hundred times more tokens are on rank 1: the mean is there, and rank 0 lies ten σ away.
    tokens = [found[rank]["whitened per token"][batches[rank].mask] for rank in range(WORLD)]
    assert abs(tokens[1].mean().item()) < 0.2
    assert tokens[0].mean().item() > 5.0
    # Per response, each of the seven that are trained on weighs the same.
    responses = torch.cat([found[rank]["whitened per response"][batches[rank].trained()] for rank in range(WORLD)])
    assert len(responses) == 7
    assert responses.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert responses.std().item() == pytest.approx(1.0, abs=1e-6)


def test_what_groups_normalised_is_not_whitened_again_unless_asked_for() -> None:
    batch = Batch([0, 1])
    grpo = group_advantages(batch.scores, batch.group_ids, baseline="mean", scale="std")
    for rank in range(WORLD):  # the numbers of a group that knows of no other
        alone = Batch([rank])
        expected = (alone.scores - alone.scores.mean()) / (alone.scores.std() + 1e-6)
        torch.testing.assert_close(grpo[GROUP_SIZE * rank :][:GROUP_SIZE], expected, rtol=1e-5, atol=1e-5)
    tokens = spread_over_tokens(grpo, batch.mask, cu_seqlens=batch.cu_seqlens)
    assert set(tokens[batch.mask].tolist()) <= set(grpo.tolist())
    # Asked for, it is a further step that changes them.
    assert not torch.allclose(whiten(tokens, batch.mask), tokens, rtol=1e-2)


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], lambda: look(int(sys.argv[1])), world=WORLD)
