import math
from collections.abc import Callable

import pytest
import torch
from drivetrain_algorithms import (
    Reduce,
    gpg_advantages,
    group_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns_to_go,
    spread_over_tokens,
    token_rewards,
    value_checks,
    whiten,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan


class Waiting(Exception):
    """A rank stands in `reduce`; its contribution is the argument."""


class Replayed:
    """A `reduce` that knows the sums of its first calls, and stops the rank at the next one."""

    def __init__(self, sums: list[Tensor]) -> None:
        self.sums = iter(sums)

    def __call__(self, x: Tensor) -> Tensor:
        for total in self.sums:
            return total.clone()
        raise Waiting(x)


def on_ranks(ranks: list[Callable[[Reduce], Tensor]]) -> list[Tensor]:
    """What each rank returns when all of them take part in every call of `reduce`."""
    sums: list[Tensor] = []
    while True:
        results, contributions = [], []
        for rank in ranks:
            try:
                results.append(rank(Replayed(sums)))
            except Waiting as waiting:
                contributions.append(waiting.args[0])
        if not contributions:
            return results
        assert not results, "the ranks do not call reduce equally often"
        sums.append(torch.stack(contributions).sum(0))


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def a_batch(*, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, mask, scores and group ids of seven responses in three groups."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(7, 9, dtype=torch.float64, generator=generator)
    inside = torch.arange(9) < torch.tensor([9, 4, 0, 7, 1, 9, 5]).unsqueeze(-1)
    mask = (torch.rand(7, 9, generator=generator) > 0.25) & inside
    scores = torch.randn(7, dtype=torch.float64, generator=generator)
    return rewards, mask, scores, ids(0, 0, 0, 3, 3, 5, 5)


def everything(
    rewards: Tensor, mask: Tensor, scores: Tensor, group_ids: Tensor, cu_seqlens: Tensor | None = None
) -> list[Tensor]:
    return [
        reinforce_plus_plus(rewards, mask, gamma=0.9, cu_seqlens=cu_seqlens),
        reinforce_plus_plus_baseline(scores, group_ids, mask, cu_seqlens=cu_seqlens),
        remax(rewards, scores, mask, cu_seqlens=cu_seqlens),
    ]


def test_reinforce_plus_plus_by_hand() -> None:
    # G = (1 + .5 * 2, 2) and (4): 2, 2, 4 with mean 8/3 and variance (4/9 + 4/9 + 16/9) / 2 = 4/3
    rewards = torch.tensor([[1.0, NAN, 2.0], [4.0, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    result = reinforce_plus_plus(rewards, mask, gamma=0.5)
    low, high = (2 - 8 / 3) / math.sqrt(4 / 3), (4 - 8 / 3) / math.sqrt(4 / 3)
    assert result.flatten().tolist() == pytest.approx([low, 0.0, low, high, 0.0, 0.0])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # d = -1, 1 and 0 (a group of one) at 1, 2 and 1 tokens: mean 1/4, variance (25 + 9 + 9 + 1) / 16 / 3 = 11/12
    scores, mask = torch.tensor([0.0, 2.0, 7.0]), torch.tensor([[1, 0], [1, 1], [0, 1]]).bool()
    result = reinforce_plus_plus_baseline(scores, ids(1, 1, 0), mask)
    root = math.sqrt(11 / 12)
    expected = [-1.25 / root, 0.0, 0.75 / root, 0.75 / root, 0.0, -0.25 / root]
    assert result.flatten().tolist() == pytest.approx(expected)


def test_remax_by_hand() -> None:
    rewards = torch.tensor([[-0.5, NAN, 2.0], [1.0, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    result = remax(rewards, torch.tensor([1.0, NAN]), mask)
    assert result.tolist() == [[0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_gpg_by_hand() -> None:
    # Two groups of two say something, one of two and one of one do not: α = 7 / 4.
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 3.0, 1.0, 9.0])
    result = gpg_advantages(scores, ids(4, 4, 0, 0, 2, 2, 5))
    assert result.tolist() == [-0.875, 0.875, 0.0, 0.0, 1.75, -1.75, 0.0]


def test_with_groups_of_one_size_alpha_is_groups_over_groups_that_say_something() -> None:
    scores, group_ids = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]), ids(0, 0, 1, 1, 2, 2)
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    assert torch.equal(gpg_advantages(scores, group_ids), 3 * centred)
    # The mean over the batch is then the mean over the responses that have a gradient.
    assert gpg_advantages(scores, group_ids).abs().mean() == centred[:2].abs().mean()


def test_reinforce_plus_plus_is_its_parts() -> None:
    rewards, mask, scores, group_ids = a_batch()
    whitened = whiten(returns_to_go(rewards, mask, gamma=0.9), mask)
    assert torch.equal(reinforce_plus_plus(rewards, mask, gamma=0.9), whitened)
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    expected = whiten(spread_over_tokens(centred, mask), mask)
    assert torch.equal(reinforce_plus_plus_baseline(scores, group_ids, mask), expected)


def test_a_score_paid_at_the_end_without_discount_makes_remax_the_difference_of_scores() -> None:
    _, mask, scores, _ = a_batch()
    logprobs = torch.zeros_like(mask, dtype=torch.float64)
    rewards = token_rewards(scores, logprobs, logprobs, mask, kl_coef=0.1)
    greedy = scores.flip(0)
    expected = spread_over_tokens(scores - greedy, mask)
    torch.testing.assert_close(remax(rewards, greedy, mask), expected, rtol=1e-12, atol=1e-12)
    assert remax(rewards, scores, mask).abs().max() < 1e-12


def test_packed_equals_padded() -> None:
    rewards, mask, scores, group_ids = a_batch()
    lengths = torch.tensor([9, 4, 0, 7, 1, 9, 5])
    inside = torch.arange(9) < lengths.unsqueeze(-1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    padded = everything(rewards, mask, scores, group_ids)
    packed = everything(rewards[inside], mask[inside], scores, group_ids, cu_seqlens)
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other[inside], rtol=1e-12, atol=1e-12)
        assert other[~mask].eq(0).all()


def test_the_order_of_responses_does_not_matter() -> None:
    rewards, mask, scores, group_ids = a_batch()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    plain = everything(rewards, mask, scores, group_ids)
    permuted = everything(rewards[order], mask[order], scores[order], group_ids[order])
    for one, other in zip(permuted, plain, strict=True):
        torch.testing.assert_close(one, other[order], rtol=1e-12, atol=1e-12)
    assert torch.equal(gpg_advantages(scores[order], group_ids[order]), gpg_advantages(scores, group_ids)[order])


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(garbage: float) -> None:
    rewards, mask, scores, group_ids = a_batch()
    plain = everything(rewards, mask, scores, group_ids)
    filled = everything(torch.where(mask, rewards, garbage), mask, scores, group_ids)
    for one, other in zip(filled, plain, strict=True):
        assert torch.equal(one, other)


def test_all_masked_equal_and_empty_batches_give_zeros() -> None:
    rewards, mask, scores, group_ids = a_batch()
    for result in everything(torch.full_like(rewards, NAN), torch.zeros_like(mask), scores, group_ids):
        assert result.eq(0).all()
    ones = torch.ones(7)
    assert reinforce_plus_plus_baseline(ones, group_ids, mask).eq(0).all()
    assert gpg_advantages(ones, group_ids).eq(0).all()
    assert gpg_advantages(torch.tensor([3.0, 4.0]), ids(0, 1)).eq(0).all()
    assert gpg_advantages(torch.zeros(0), ids()).shape == (0,)


def test_an_unmasked_nan_shows() -> None:
    rewards, mask, scores, group_ids = a_batch()
    rewards[0, 0], mask[0, 0] = NAN, True
    assert reinforce_plus_plus(rewards, mask, gamma=1.0)[mask].isnan().all()
    assert remax(rewards, scores, mask).isnan().sum() == 1
    scores[3] = NAN
    assert gpg_advantages(scores, group_ids).isnan().tolist() == [False] * 3 + [True] * 2 + [False] * 2


def test_results_carry_no_gradient() -> None:
    rewards, mask, scores, group_ids = a_batch()
    results = everything(rewards.requires_grad_(), mask, scores.requires_grad_(), group_ids)
    assert not any(result.requires_grad for result in [*results, gpg_advantages(scores, group_ids)])


def test_ranks_give_the_numbers_of_one() -> None:
    rewards, mask, scores, group_ids = a_batch()
    parts = [slice(0, 3), slice(3, 5), slice(5, 7)]
    local_ids = [torch.unique(group_ids[part], return_inverse=True)[1] for part in parts]
    scores[5:] = 1.0  # the last rank has nothing to say
    split: dict[str, list[Callable[[Reduce], Tensor]]] = {
        "plus plus": [lambda r, p=p: reinforce_plus_plus(rewards[p], mask[p], gamma=0.9, reduce=r) for p in parts],
        "baseline": [
            lambda r, p=p, g=g: reinforce_plus_plus_baseline(scores[p], g, mask[p], reduce=r)
            for p, g in zip(parts, local_ids, strict=True)
        ],
        "gpg": [
            lambda r, p=p, g=g: gpg_advantages(scores[p], g, reduce=r) for p, g in zip(parts, local_ids, strict=True)
        ],
    }
    whole = {
        "plus plus": reinforce_plus_plus(rewards, mask, gamma=0.9),
        "baseline": reinforce_plus_plus_baseline(scores, group_ids, mask),
        "gpg": gpg_advantages(scores, group_ids),
    }
    for name, ranks in split.items():
        result = torch.cat(on_ranks(ranks))
        torch.testing.assert_close(result, whole[name], rtol=1e-12, atol=1e-12)
        alone = torch.cat([rank(lambda x: x) for rank in ranks])
        assert not torch.allclose(alone, whole[name], rtol=1e-3), name


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), min_size=4, max_size=20))
def test_properties_of_gpg(batch: list[tuple[float, int]]) -> None:
    scores = torch.tensor([score for score, _ in batch], dtype=torch.float64)
    group_ids = ids(*(group for _, group in batch))
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    speaking = sum(int((group_ids == g).sum()) for g in group_ids.unique() if len(scores[group_ids == g].unique()) > 1)
    expected = centred * (len(scores) / max(speaking, 1))
    torch.testing.assert_close(gpg_advantages(scores, group_ids), expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0), st.floats(0.5, 20.0))
def test_reinforce_plus_plus_does_not_see_the_scale_of_rewards(seed: int, gamma: float, scale: float) -> None:
    rewards, mask, scores, group_ids = a_batch(seed=seed)
    result = reinforce_plus_plus(rewards, mask, gamma=gamma)
    assert result[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert result[mask].std().item() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(reinforce_plus_plus(scale * rewards, mask, gamma=gamma), result, rtol=1e-6, atol=1e-6)
    base = reinforce_plus_plus_baseline(scores, group_ids, mask)
    shifted = reinforce_plus_plus_baseline(scores + group_ids, group_ids, mask)  # each group by another number
    torch.testing.assert_close(shifted, base, rtol=1e-9, atol=1e-9)


def test_misfits_are_named() -> None:
    rewards, mask, scores, group_ids = a_batch()
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        reinforce_plus_plus(rewards, mask, gamma=1.5)
    with pytest.raises(ValueError, match=r"rewards has shape \(7, 4\)"):
        reinforce_plus_plus(rewards[:, :4], mask, gamma=1.0)
    with pytest.raises(ValueError, match="together with cu_seqlens"):
        reinforce_plus_plus(rewards[0], mask[0], gamma=1.0)
    with pytest.raises(ValueError, match=r"scores has shape \(6,\)"):
        reinforce_plus_plus_baseline(scores[:6], group_ids, mask)
    with pytest.raises(ValueError, match=r"scores has shape \(7,\); pass one per sequence, \[5\]"):
        reinforce_plus_plus_baseline(scores, group_ids, mask[:5])
    with pytest.raises(ValueError, match="group_ids runs from 10 to 15"):
        reinforce_plus_plus_baseline(scores, group_ids + 10, mask)
    with pytest.raises(ValueError, match=r"greedy_scores has shape \(6,\)"):
        remax(rewards, scores[:6], mask)
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        remax(rewards, scores, mask.float())
    with pytest.raises(ValueError, match="group_ids runs from 10 to 15"):
        gpg_advantages(scores, group_ids + 10)
    with pytest.raises(ValueError, match=r"scores has shape \(6,\)"):
        gpg_advantages(scores[:6], group_ids)
    rewards[mask] = NAN
    with value_checks(), pytest.raises(ValueError, match="rewards is nan at token"):
        reinforce_plus_plus(rewards, mask, gamma=1.0)
    with value_checks(), pytest.raises(ValueError, match="greedy_scores is nan at index 0"):
        remax(torch.zeros_like(rewards), torch.full((7,), NAN), mask)


@pytest.mark.parametrize("name", ["plus plus", "baseline", "remax", "gpg"])
def test_one_graph(name: str) -> None:
    rewards, mask, scores, group_ids = a_batch()

    def f(rewards: Tensor, mask: Tensor, scores: Tensor, group_ids: Tensor) -> Tensor:
        match name:
            case "plus plus":
                return reinforce_plus_plus(rewards, mask, gamma=0.9)
            case "baseline":
                return reinforce_plus_plus_baseline(scores, group_ids, mask)
            case "remax":
                return remax(rewards, scores, mask)
        return gpg_advantages(scores, group_ids)

    arguments = (rewards, mask, scores, group_ids)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), f(*arguments), rtol=1e-12, atol=1e-12)
