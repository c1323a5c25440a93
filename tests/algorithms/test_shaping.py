import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drivetrain_algorithms import (
    RewardNormalizer,
    aggregate,
    filter_groups,
    group_advantages,
    loss_denominator,
    overlong_penalty,
    value_checks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

# overlong_penalty


def test_the_penalty_by_hand() -> None:
    # L = 20, b = 5: free up to 15, then a fifth of p = 2 for each token, and all of it from 20 on
    lengths = torch.tensor([0, 14, 15, 16, 18, 20, 21, 1000])
    penalty = overlong_penalty(lengths, max_length=20, buffer=5, penalty_factor=2.0)
    assert penalty.dtype is torch.float32
    assert penalty.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.4, -1.2, -2.0, -2.0, -2.0])


def test_the_penalty_of_the_paper() -> None:
    lengths = torch.tensor([16_384, 18_432, 20_480])
    penalty = overlong_penalty(lengths, max_length=20_480, buffer=4_096, penalty_factor=1.0)
    assert penalty.tolist() == [0.0, -0.5, -1.0]


def test_a_buffer_of_nothing_of_everything_and_a_factor_of_nothing() -> None:
    lengths = torch.tensor([0, 5, 10, 11], dtype=torch.int32)
    assert overlong_penalty(lengths, max_length=10, buffer=0, penalty_factor=1.5).tolist() == [0.0, 0.0, 0.0, -1.5]
    assert overlong_penalty(lengths, max_length=10, buffer=10, penalty_factor=1.0).tolist() == [0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_length=10, buffer=5, penalty_factor=0.0).eq(0).all()
    assert overlong_penalty(lengths[:0], max_length=10, buffer=5, penalty_factor=1.0).shape == (0,)


@given(st.integers(1, 60), st.data())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_longer_response_never_pays_less_and_each_token_costs_the_same(limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    penalty = overlong_penalty(torch.arange(limit + 3), max_length=limit, buffer=buffer, penalty_factor=3.0)
    steps = penalty.diff()
    inside = torch.arange(1, limit + 3)
    costly = (inside > limit - buffer) & (inside <= limit)
    torch.testing.assert_close(steps, torch.where(costly, -3.0 / buffer, 0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer": 11}, "buffer=11 must lie between 0 and max_length=10"),
        ({"buffer": -1}, "buffer=-1"),
        ({"max_length": 0}, "max_length=0 must be at least 1 token"),
        ({"penalty_factor": -1.0}, r"penalty_factor=-1\.0"),
        ({"lengths": torch.tensor([3, -2])}, "lengths is -2 at index 1"),
        ({"lengths": torch.tensor([1.0])}, "lengths has shape .* and dtype torch.float32"),
        ({"lengths": torch.tensor([[1]])}, r"lengths has shape \(1, 1\)"),
    ],
)
def test_penalties_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlong_penalty(
            **{"lengths": torch.tensor([1]), "max_length": 10, "buffer": 5, "penalty_factor": 1.0} | arguments
        )


# filter_groups


def test_groups_whose_scores_differ_are_kept() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 0.1, 0.0, 0.1, 1.0, 5.0])
    group_ids = torch.tensor([0, 3, 0, 7, 3, 7, 3, 5])  # all right; 0, 0, 1; equal; one alone
    kept = filter_groups(scores, group_ids)
    assert kept.tolist() == [False, True, False, False, True, False, True, False]
    assert filter_groups(scores, group_ids, keep_single=True).tolist() == [*kept.tolist()[:-1], True]


def test_what_is_left_out_is_what_has_no_advantage() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(2, (64,), generator=generator).float()
    group_ids = torch.randint(20, (64,), generator=generator)
    advantages = group_advantages(scores, group_ids, baseline="mean", scale="std")
    assert torch.equal(filter_groups(scores, group_ids), advantages != 0)
    assert 0 < filter_groups(scores, group_ids).sum() < 64


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [True, True, True, False]),
        ({"tolerance": 0.25}, [True, True, False, False]),
        ({"tolerance": 0.2}, [True, True, True, False]),
        ({"low": 0.25}, [False, True, True, False]),  # strictly above
        ({"high": 0.75}, [True, False, True, False]),  # strictly below
        ({"low": 0.25, "high": 0.75}, [False, False, True, False]),
        ({"low": 0.25, "high": 0.75, "tolerance": -1.0}, [False, False, True, True]),
    ],
)
def test_bounds_of_the_spread_and_of_the_mean(settings: dict[str, float], expected: list[bool]) -> None:
    # spreads 1, 1, 0.25, 0 and means 0.25, 0.75, 0.5, 0.5
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.375, 0.625, 0.5, 0.5], [0.5] * 4])
    group_ids = torch.arange(4).repeat_interleave(4)
    assert filter_groups(scores.flatten(), group_ids, **settings).view(4, 4).all(1).tolist() == expected
    assert filter_groups(scores.flatten(), group_ids, **settings).view(4, 4).any(1).tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_not_filtered_away(bad: float) -> None:
    group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    scores = torch.tensor([1.0, 1.0, bad, 1.0, bad, bad, bad])
    assert filter_groups(scores, group_ids, low=0.0, high=1.0).tolist() == [False, False, True, True, True, True, True]


@given(st.integers(1, 24), st.integers(0, 2**16), st.floats(0.0, 0.6), st.booleans())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_groups_by_their_definition_in_any_order(size: int, seed: int, tolerance: float, keep_single: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(4, (size,), generator=generator) / 4
    group_ids = torch.randint(size, (size,), generator=generator)

    def kept(scores: Tensor, group_ids: Tensor) -> Tensor:
        return filter_groups(scores, group_ids, tolerance=tolerance, low=0.2, high=0.8, keep_single=keep_single)

    result = kept(scores, group_ids)
    for index in range(size):
        group = scores[group_ids == group_ids[index]]
        differing = (group.max() - group.min()).item() > tolerance or (keep_single and len(group) == 1)
        assert result[index].item() == (differing and 0.2 < group.double().mean().item() < 0.8)
    order = torch.randperm(size, generator=generator)
    renamed = torch.randperm(size, generator=generator)[group_ids]
    assert torch.equal(kept(scores[order], renamed[order]), result[order])


def test_what_is_left_out_is_in_no_denominator() -> None:
    scores, group_ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 3, dtype=torch.bool) & filter_groups(scores, group_ids).unsqueeze(-1)
    denominator = loss_denominator(mask, mode="token_mean")
    assert denominator.item() == 6.0
    assert aggregate(torch.full((4, 3), 0.5), mask, mode="token_mean", denominator=denominator).item() == 0.5


def test_no_responses() -> None:
    kept = filter_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert kept.shape == (0,)
    assert kept.dtype is torch.bool


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_ids": torch.tensor([0, 2])}, r"group_ids runs from 0 to 2 with 2 responses"),
        ({"group_ids": torch.tensor([-1, 0])}, "group_ids runs from -1"),
        ({"group_ids": torch.tensor([0, 0], dtype=torch.int32)}, "group_ids has shape .* and dtype torch.int32"),
        ({"scores": torch.zeros(3)}, r"scores has shape \(3,\); .* \[2\]"),
        ({"tolerance": math.nan}, "tolerance=nan"),
        ({"low": 1.0, "high": 1.0}, r"low=1\.0 must be below high=1\.0"),
        ({"high": math.nan}, "high=nan"),
    ],
)
def test_groups_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filter_groups(**{"scores": torch.zeros(2), "group_ids": torch.tensor([0, 0])} | arguments)


# RewardNormalizer


class Ranks:
    """`reduce` for ranks that run one after the other: each call adds what the other ranks bring to the same call."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = [part.double() for part in parts]
        self.mean = torch.cat(self.parts).mean() if sum(map(len, parts)) else torch.zeros(())

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        others = [part for index, part in enumerate(self.parts) if index != rank]
        contributions = iter(
            (
                sum(torch.tensor([part.sum(), len(part)], dtype=torch.float64) for part in others),
                sum((part - self.mean).square().sum() for part in others),
            )
        )
        return lambda x: x + next(contributions)


def seen(scores: list[float], **settings: Any) -> RewardNormalizer:
    return RewardNormalizer(**settings).update(torch.tensor(scores))


def test_normalising_by_hand() -> None:
    # mean 2 and sample variance 2 / 2 = 1; then, with 6 more, mean 3 and (4 + 1 + 0 + 9) / 3
    normalizer = seen([1.0, 2.0, 3.0])
    assert normalizer.normalize(torch.tensor([2.0, 4.5])).tolist() == [0.0, 2.5]
    normalizer = normalizer.update(torch.tensor([6.0]))
    assert normalizer.state_dict() == {"count": 4.0, "mean": 3.0, "sum_squares": 14.0}
    assert normalizer.normalize(torch.tensor([5.0])).item() == pytest.approx(2.0 / math.sqrt(14 / 3))


def test_the_mean_may_stay_and_large_scores_are_clipped() -> None:
    assert seen([1.0, 2.0, 3.0], shift_mean=False).normalize(torch.tensor([-1.0, 2.0])).tolist() == [-1.0, 2.0]
    clipped = seen([1.0, 2.0, 3.0], clip=1.5).normalize(torch.tensor([-9.0, 1.0, 9.0]))
    assert clipped.tolist() == [-1.5, -1.0, 1.5]


def test_it_is_a_value_and_updating_makes_another() -> None:
    before = seen([1.0, 2.0, 3.0], clip=2.0)
    state = before.state_dict()
    after = before.update(torch.tensor([50.0]))
    assert before.state_dict() == state
    assert after.clip == 2.0
    assert after.state_dict() != state
    with pytest.raises(AttributeError):
        before.clip = 3.0  # type: ignore[misc]


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=24),
    st.lists(st.integers(0, 24), max_size=4),
    st.sampled_from([0.0, 1e6]),
)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_the_state_does_not_depend_on_how_scores_came(scores: list[float], cuts: list[int], offset: float) -> None:
    everything = torch.tensor(scores, dtype=torch.float64) + offset
    normalizer = RewardNormalizer()
    bounds = sorted({0, len(scores), *(min(cut, len(scores)) for cut in cuts)})
    for start, stop in itertools.pairwise(bounds):
        normalizer = normalizer.update(everything[start:stop])
    assert normalizer.count.item() == len(scores)
    torch.testing.assert_close(normalizer.mean, everything.mean(), rtol=1e-12, atol=1e-12)
    exact = (everything - everything.mean()).square().sum()
    torch.testing.assert_close(normalizer.sum_squares, exact, rtol=1e-9, atol=1e-6)


@given(st.lists(st.lists(st.floats(-10.0, 10.0, width=32), max_size=5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_ranks_together_are_one_rank_with_all_scores(shares: list[list[float]]) -> None:
    parts = [torch.tensor(share, dtype=torch.float32) for share in shares]
    start = seen([0.5, -2.0, 7.0])
    alone = start.update(torch.cat(parts))
    for rank, part in enumerate(parts):
        state = start.update(part, reduce=Ranks(parts).of(rank)).state_dict()
        assert state == pytest.approx(alone.state_dict(), rel=1e-12, abs=1e-12)


def test_normalised_scores_have_mean_0_and_variance_1() -> None:
    scores = 100.0 + 3.0 * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normalised = RewardNormalizer().update(scores).normalize(scores)
    assert normalised.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert normalised.std().item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_without_a_variance_are_only_shifted(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.5, 3.0], dtype=dtype)
    assert RewardNormalizer().normalize(scores).tolist() == [0.5, 3.0]
    one = RewardNormalizer().update(torch.tensor([0.1], dtype=dtype))
    torch.testing.assert_close(one.normalize(scores), scores - 0.1)
    equal = RewardNormalizer()
    for size in (7, 3, 1):
        equal = equal.update(torch.full((size,), 0.1, dtype=dtype))
    torch.testing.assert_close(equal.normalize(scores), scores - 0.1)


def test_no_scores_change_nothing() -> None:
    normalizer = seen([1.0, 2.0, 3.0])
    assert normalizer.update(torch.zeros(0)).state_dict() == normalizer.state_dict()
    assert RewardNormalizer().update(torch.zeros(0)).state_dict() == {"count": 0.0, "mean": 0.0, "sum_squares": 0.0}
    assert normalizer.normalize(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_shows(bad: float) -> None:
    normalizer = seen([1.0, 2.0, 3.0])
    assert normalizer.normalize(torch.tensor([2.0, bad]))[0].item() == 0.0
    assert not normalizer.normalize(torch.tensor([2.0, bad]))[1].isfinite()
    assert normalizer.update(torch.tensor([bad, 1.0])).normalize(torch.tensor([2.0])).isnan().all()


def test_the_state_survives_json_to_the_last_bit() -> None:
    normalizer = seen([0.1, 1 / 3, 1e-7, 12345.678])
    state = json.loads(json.dumps(normalizer.state_dict()))
    restored = RewardNormalizer.from_state_dict(state, shift_mean=False, clip=3.0)
    assert restored.state_dict() == normalizer.state_dict()
    assert (restored.shift_mean, restored.clip) == (False, 3.0)
    more = torch.tensor([0.7, -0.2])
    assert restored.update(more).state_dict() == normalizer.update(more).state_dict()


def test_normalizers_that_do_not_fit_are_named() -> None:
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip="):
            RewardNormalizer(clip=clip)
    with pytest.raises(ValueError, match=r"scores has shape \(2, 1\)"):
        RewardNormalizer().update(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"scores has shape \(\)"):
        RewardNormalizer().normalize(torch.zeros(()))
    with pytest.raises(ValueError, match=r"keys \['count', 'mean'\]"):
        RewardNormalizer.from_state_dict({"count": 1.0, "mean": 0.0})
    with pytest.raises(ValueError, match=r"sum_squares=-1\.0"):
        RewardNormalizer.from_state_dict({"count": 1.0, "mean": 0.0, "sum_squares": -1.0})
    with value_checks(), pytest.raises(ValueError, match="scores is nan at index 1"):
        RewardNormalizer().update(torch.tensor([0.0, math.nan]))


# all of them


def penalty(scores: Tensor) -> Tensor:
    return overlong_penalty(scores.long().abs() * 10, max_length=20, buffer=5, penalty_factor=1.0)


def kept(scores: Tensor) -> Tensor:
    return filter_groups(scores, torch.arange(len(scores)) // 2, low=-0.5)


def normalised(scores: Tensor) -> Tensor:
    return RewardNormalizer(clip=2.0).update(scores[:3]).normalize(scores)


@pytest.mark.parametrize("function", [penalty, kept, normalised])
def test_compiles_without_a_graph_break(function: Callable[[Tensor], Tensor]) -> None:
    scores = 2.0 * torch.randn(6, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scores), function(scores))


def test_limits_beyond_int32() -> None:
    lengths = torch.tensor([100], dtype=torch.int32)
    assert overlong_penalty(lengths, max_length=2**33, buffer=10, penalty_factor=1.0).tolist() == [0.0]


def test_a_small_scale_is_a_scale() -> None:
    scores = torch.tensor([1e9, 1e9 + 5, 1e9 + 10], dtype=torch.float64)
    assert RewardNormalizer().update(scores).normalize(scores).tolist() == [-1.0, 0.0, 1.0]
    tiny = torch.tensor([1e-9, 2e-9, 3e-9])
    torch.testing.assert_close(RewardNormalizer().update(tiny).normalize(tiny), torch.tensor([-1.0, 0.0, 1.0]))
