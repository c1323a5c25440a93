"""Equal rewards or a group of one gave NaN or nothing, and groups taken by position mixed prompts once a batch had been
reordered: aiming-lab/MetaClaw#47, verl-project/verl#1129, verl-project/verl#1718, XU-YIJIE/grpo-flat#2."""

import math
from typing import Any

import pytest
import torch
from drivetrain_algorithms import (
    decoupled_group_advantages,
    gpg_advantages,
    group_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_baseline,
)
from torch import Tensor

LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
NAMED: dict[str, dict[str, Any]] = {
    "GRPO": {"baseline": "mean", "scale": "std"},
    "Dr. GRPO": {"baseline": "mean", "scale": "none"},
    "RLOO": {"baseline": "leave_one_out", "scale": "none"},
    "OPO": {"baseline": "optimal", "scale": "none"},
    "MaxRL": {"baseline": "mean", "scale": "mean"},
}
METHODS = [*NAMED, "pass@k", "GDPO", "REINFORCE++ baseline", "GPG"]


def advantages(method: str, scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    match method:
        case "pass@k":
            return pass_at_k_advantages(scores, group_ids, k=2)
        case "GDPO":
            return decoupled_group_advantages(torch.stack((scores, scores.square()), 1), group_ids, weights=[1.0, 0.5])
        case "REINFORCE++ baseline":
            mask = torch.ones(len(scores), 1, dtype=torch.bool)
            return reinforce_plus_plus_baseline(scores, group_ids, mask).squeeze(1)
        case "GPG":
            return gpg_advantages(scores, group_ids)
    return group_advantages(scores, group_ids, **NAMED[method], lengths=lengths if method == "OPO" else None)


@pytest.mark.parametrize("method", METHODS)
def test_a_equal_rewards_give_exactly_zero(method: str) -> None:
    for score in (1.0, 0.1, 0.0):
        result = advantages(method, torch.full((4,), score), torch.zeros(4, dtype=torch.int64), LENGTHS[:4])
        assert result.tolist() == [0.0] * 4


@pytest.mark.parametrize("method", METHODS)
def test_b_a_group_of_one_gives_zero(method: str) -> None:
    alone = advantages(method, torch.tensor([0.7]), torch.tensor([0]), LENGTHS[:1])
    assert alone.tolist() == [0.0]
    # beside a group of two, which keeps its own numbers
    beside = advantages(method, torch.tensor([0.7, 0.0, 1.0]), torch.tensor([2, 0, 0]), LENGTHS[:3])
    assert beside[0].item() == pytest.approx(0.0, abs=1e-6)
    assert beside.isfinite().all()
    assert beside[2] > beside[1]


@pytest.mark.parametrize("method", METHODS)
def test_c_a_shuffled_batch_gives_the_shuffled_result(method: str) -> None:
    scores = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.25, 1.0, 0.0])
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    plain = advantages(method, scores, group_ids, LENGTHS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(8, generator=generator)
        shuffled = advantages(method, scores[order], group_ids[order], LENGTHS[order])
        torch.testing.assert_close(shuffled, plain[order])
    # By position, the two groups of 0, 1, 0, 1, ... would have been mixed.
    grpo = group_advantages(scores[[0, 4, 1, 5]], group_ids[[0, 4, 1, 5]], baseline="mean", scale="none")
    assert grpo.tolist() == [-0.5, 0.125, 0.5, -0.125]


@pytest.mark.parametrize("method", METHODS)
def test_d_one_prompt_twice_with_two_ids_is_two_groups(method: str) -> None:
    scores, lengths = torch.tensor([0.0, 1.0, 0.75, 1.0]), LENGTHS[:4]
    two = advantages(method, scores, torch.tensor([0, 0, 3, 3]), lengths)
    assert not torch.allclose(two, advantages(method, scores, torch.tensor([3, 3, 3, 3]), lengths), rtol=1e-2)
    if method not in ("REINFORCE++ baseline", "GPG"):  # those two have one scale for the whole batch
        for part in (slice(0, 2), slice(2, 4)):
            alone = advantages(method, scores[part], torch.tensor([0, 0]), lengths[part])
            assert torch.equal(two[part], alone)


def test_e_groups_of_unequal_size() -> None:
    # {0, 1}: μ 1/2, σ √½.  {0, 0, 3}: μ 1, σ √3.  {4}: alone.
    scores, group_ids = torch.tensor([0.0, 4.0, 0.0, 3.0, 1.0, 0.0]), torch.tensor([1, 5, 0, 0, 1, 0])
    half, third = 0.5 / math.sqrt(0.5), 1 / math.sqrt(3.0)
    grpo = group_advantages(scores, group_ids, baseline="mean", scale="std")
    assert grpo.tolist() == pytest.approx([-half, 0.0, -third, 2 * third, half, -third], rel=1e-5)
    rloo = group_advantages(scores, group_ids, baseline="leave_one_out", scale="none")
    assert rloo.tolist() == [-1.0, 0.0, -1.5, 3.0, 1.0, -1.5]
    best = pass_at_k_advantages(scores, group_ids, k=2)
    assert best.tolist() == [0.0, 0.0, 0.0, 3.0, 1.0, 0.0]
