import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drivetrain_algorithms import (
    GroupBaseline,
    GroupScale,
    aggregate,
    decoupled_group_advantages,
    group_advantages,
    loss_denominator,
    pass_at_k_advantages,
    ppo_clip,
    spread_over_tokens,
    value_checks,
    whiten,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan
BASELINES: list[GroupBaseline] = ["mean", "leave_one_out", "optimal", "none"]
SCALES: list[GroupScale] = ["std", "none", "mean"]
EVERY = list(itertools.product(BASELINES, SCALES))
NAMED: dict[str, dict[str, Any]] = {
    "GRPO": {"baseline": "mean", "scale": "std"},
    "Dr. GRPO": {"baseline": "mean", "scale": "none"},
    "RLOO": {"baseline": "leave_one_out", "scale": "none"},
    "OPO": {"baseline": "optimal", "scale": "none"},
    "MaxRL": {"baseline": "mean", "scale": "mean"},
}


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def advantages_of(
    scores: Tensor, group_ids: Tensor, baseline: GroupBaseline, scale: GroupScale, lengths: Tensor
) -> Tensor:
    return group_advantages(
        scores, group_ids, baseline=baseline, scale=scale, lengths=lengths if baseline == "optimal" else None
    )


def one_group_at_a_time(
    scores: Tensor, group_ids: Tensor, baseline: GroupBaseline, scale: GroupScale, lengths: Tensor
) -> Tensor:
    """The definition, for groups of unequal scores."""
    result = torch.zeros_like(scores)
    for group in set(group_ids.tolist()):
        members = (group_ids == group).nonzero().flatten().tolist()
        mean = scores[members].mean()
        for i in members:
            match baseline:
                case "mean":
                    off = mean
                case "leave_one_out":
                    off = scores[[j for j in members if j != i]].mean()
                case "optimal":
                    off = (scores[members] * lengths[members]).sum() / lengths[members].sum()
                case "none":
                    off = torch.zeros(())
            match scale:
                case "std":
                    over = scores[members].std() + 1e-6
                case "none":
                    over = torch.ones(())
                case "mean":
                    over = mean
            result[i] = (scores[i] - off) / over
    return result


def a_batch(num_groups: int = 5, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and lengths of groups of 2, 3, 4, ... responses, shuffled, ids with gaps."""
    generator = torch.Generator().manual_seed(seed)
    group_ids = torch.cat([torch.full((2 + g,), 3 * g) for g in range(num_groups)])
    group_ids = group_ids[torch.randperm(len(group_ids), generator=generator)]
    scores = torch.rand(len(group_ids), dtype=torch.float64, generator=generator)
    return scores, group_ids, torch.randint(1, 100, (len(group_ids),), generator=generator)


def test_the_named_settings_by_hand() -> None:
    # One group with scores 0, 0, 3: μ = 1, σ² = (1 + 1 + 4) / 2 = 3. Lengths 1, 2, 3: b = 9 / 6 = 1.5.
    # The means of the others are 1.5, 1.5, 0.
    scores, group_ids, lengths = torch.tensor([0.0, 0.0, 3.0]), ids(1, 1, 1), torch.tensor([1, 2, 3])
    root = math.sqrt(3.0) + 1e-6
    expected = {
        "GRPO": [-1.0 / root, -1.0 / root, 2.0 / root],
        "Dr. GRPO": [-1.0, -1.0, 2.0],
        "RLOO": [-1.5, -1.5, 3.0],
        "OPO": [-1.5, -1.5, 1.5],
        "MaxRL": [-1.0, -1.0, 2.0],
    }
    for name, settings_ in NAMED.items():
        result = group_advantages(scores, group_ids, **settings_, lengths=lengths if name == "OPO" else None)
        assert result.tolist() == pytest.approx(expected[name]), name
        assert result.dtype is torch.float32
    maxrl = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ids(0, 0, 0, 0), baseline="mean", scale="mean")
    assert maxrl.tolist() == [3.0, -1.0, -1.0, -1.0]  # 1 of 4 solved it: (1 - 1/4) / (1/4)


@pytest.mark.parametrize(("baseline", "scale"), EVERY)
def test_unequal_groups_in_any_order_equal_the_definition(baseline: GroupBaseline, scale: GroupScale) -> None:
    scores, group_ids, lengths = a_batch()
    result = advantages_of(scores, group_ids, baseline, scale, lengths)
    torch.testing.assert_close(
        result, one_group_at_a_time(scores, group_ids, baseline, scale, lengths), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("baseline", "scale"), EVERY)
def test_a_permuted_batch_gives_the_same_bits_permuted(baseline: GroupBaseline, scale: GroupScale) -> None:
    scores, group_ids, lengths = a_batch(12)
    scores = (scores * 8).round() / 7  # with ties
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    plain = advantages_of(scores, group_ids, baseline, scale, lengths)
    permuted = advantages_of(scores[order], group_ids[order], baseline, scale, lengths[order])
    assert torch.equal(permuted, plain[order])


@pytest.mark.parametrize(("baseline", "scale"), EVERY)
def test_a_group_does_not_depend_on_the_others_nor_on_its_id(baseline: GroupBaseline, scale: GroupScale) -> None:
    scores, group_ids, lengths = a_batch()
    whole = advantages_of(scores, group_ids, baseline, scale, lengths)
    for group in group_ids.unique().tolist():
        own = group_ids == group
        alone = advantages_of(scores[own], torch.zeros_like(group_ids[own]), baseline, scale, lengths[own])
        assert torch.equal(alone, whole[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("baseline", "scale"), [pair for pair in EVERY if pair[0] != "none"])
def test_equal_scores_give_exactly_zero(baseline: GroupBaseline, scale: GroupScale, dtype: torch.dtype) -> None:
    for score in (0.0, 0.1, 1.0, 1e6 / 3):
        scores = torch.full((7,), score).to(dtype)
        result = advantages_of(scores, ids(0, 0, 0, 2, 2, 2, 5), baseline, scale, torch.arange(7))
        assert result.tolist() == [0.0] * 7


@pytest.mark.parametrize("size", [3, 6, 10, 49])
def test_equal_scores_that_do_not_add_up_exactly_give_exactly_zero(size: int) -> None:
    scores = torch.full((size,), 0.1, dtype=torch.float64)  # ten times 0.1 is not 1
    for baseline, scale in EVERY[:-3]:
        result = advantages_of(scores, torch.zeros(size, dtype=torch.int64), baseline, scale, torch.arange(size))
        assert result.eq(0).all()


def test_a_group_of_one() -> None:
    scores, group_ids = torch.tensor([5.0, 2.0, 4.0]), ids(0, 1, 1)
    for baseline in ("mean", "leave_one_out", "optimal"):
        for scale in SCALES:
            result = advantages_of(scores, group_ids, baseline, scale, torch.tensor([3, 1, 1]))
            assert result[0] == 0.0
            assert result[1] < 0.0 < result[2]
    raw = [group_advantages(scores, group_ids, baseline="none", scale=scale)[0].item() for scale in SCALES]
    assert raw == [0.0, 5.0, 1.0]


def test_without_a_baseline() -> None:
    scores, group_ids = torch.tensor([1.0, 3.0, 0.0, 0.0, 7.0, 7.0]), ids(0, 0, 1, 1, 2, 2)
    assert torch.equal(group_advantages(scores, group_ids, baseline="none", scale="none"), scores)
    # μ = 2 and 7; a group of equal scores is not divided by 10⁻⁶
    assert group_advantages(scores, group_ids, baseline="none", scale="mean").tolist() == [0.5, 1.5, 0.0, 0.0, 1.0, 1.0]
    scaled = group_advantages(scores, group_ids, baseline="none", scale="std").tolist()
    assert scaled == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2), 0.0, 0.0, 0.0, 0.0], rel=1e-5)


def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_one() -> None:
    scores, group_ids, _ = a_batch()
    sizes = torch.stack([(group_ids == i).sum() for i in group_ids])
    mean = group_advantages(scores, group_ids, baseline="mean", scale="none")
    rloo = group_advantages(scores, group_ids, baseline="leave_one_out", scale="none")
    torch.testing.assert_close(rloo, mean * sizes / (sizes - 1), rtol=1e-12, atol=1e-12)


def test_the_optimal_baseline_with_equal_lengths_is_the_mean() -> None:
    scores, group_ids, lengths = a_batch()
    mean = group_advantages(scores, group_ids, baseline="mean", scale="std")
    optimal = group_advantages(scores, group_ids, baseline="optimal", scale="std", lengths=torch.full_like(lengths, 9))
    torch.testing.assert_close(optimal, mean, rtol=1e-12, atol=1e-12)
    nothing = group_advantages(scores, group_ids, baseline="optimal", scale="none", lengths=lengths * (group_ids != 0))
    assert nothing[group_ids == 0].tolist() == [0.0, 0.0]


def test_a_large_mean_costs_no_digits() -> None:
    scores = torch.tensor([1e6, 1e6 + 0.25, 1e6 + 0.5], dtype=torch.float64)
    for baseline, scale in [("mean", "std"), ("leave_one_out", "none")]:
        result = group_advantages(scores, ids(0, 0, 0), baseline=baseline, scale=scale)  # type: ignore[arg-type]
        small = group_advantages(scores - 1e6, ids(0, 0, 0), baseline=baseline, scale=scale)  # type: ignore[arg-type]
        torch.testing.assert_close(result, small, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("baseline", BASELINES[:3])
def test_what_is_not_finite_shows_in_its_own_group_only(baseline: GroupBaseline, bad: float) -> None:
    scores = torch.tensor([1.0, bad, 2.0, 5.0, 7.0])
    for scale in ("std", "none"):
        result = advantages_of(scores, ids(0, 0, 0, 1, 1), baseline, scale, torch.ones(5, dtype=torch.int64))
        assert result.isfinite().tolist() == [False, False, False, True, True]


def test_advantages_carry_no_gradient() -> None:
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not group_advantages(scores, ids(0, 0), baseline="mean", scale="std").requires_grad
    assert not pass_at_k_advantages(scores, ids(0, 0), k=2).requires_grad
    assert not decoupled_group_advantages(scores.unsqueeze(1), ids(0, 0), weights=[1.0]).requires_grad


finite = st.floats(-100.0, 100.0, width=32)
members = st.lists(st.tuples(finite, st.integers(0, 4)), min_size=5, max_size=24)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(members, st.floats(-50.0, 50.0), st.floats(0.1, 10.0))
def test_properties_of_a_group(batch: list[tuple[float, int]], shift: float, factor: float) -> None:
    scores = torch.tensor([score for score, _ in batch], dtype=torch.float64)
    group_ids = ids(*(group for _, group in batch))
    centred = group_advantages(scores, group_ids, baseline="mean", scale="none")
    grpo = group_advantages(scores, group_ids, baseline="mean", scale="std")
    for group in group_ids.unique():
        own = group_ids == group
        assert abs(centred[own].sum().item()) < 1e-9
        if own.sum() > 1 and scores[own].std() > 1e-2:
            assert grpo[own].std().item() == pytest.approx(1.0, abs=2e-4)  # up to the ε
    for name, advantages in [("none", centred), ("std", grpo)]:
        moved = group_advantages(scores + shift, group_ids, baseline="mean", scale=name)  # type: ignore[arg-type]
        torch.testing.assert_close(moved, advantages, rtol=1e-6, atol=1e-6)
    stretched = group_advantages(factor * scores, group_ids, baseline="mean", scale="none")
    torch.testing.assert_close(stretched, factor * centred, rtol=1e-9, atol=1e-9)


def test_a_split_between_groups_sums_to_the_whole() -> None:
    scores, group_ids, lengths = a_batch()
    scores, total = scores.float(), len(scores)
    mask = torch.arange(12) < (lengths % 13).unsqueeze(-1)
    logprobs = torch.randn(total, 12, generator=torch.Generator().manual_seed(2))

    def gradient(parts: list[Tensor]) -> Tensor:
        leaf = logprobs.clone().requires_grad_()
        denominator = loss_denominator(mask, mode="token_mean")
        for part in parts:
            per_response = group_advantages(
                scores[part], torch.unique(group_ids[part], return_inverse=True)[1], baseline="mean", scale="std"
            )
            advantages = spread_over_tokens(per_response, mask[part])
            loss = ppo_clip(leaf[part], logprobs[part], advantages, mask[part], clip_low=0.2, clip_high=0.2).loss
            aggregate(loss, mask[part], mode="token_mean", denominator=denominator).backward()
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient([torch.arange(total)])
    split = gradient([(group_ids == group).nonzero().flatten() for group in group_ids.unique()])
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-8)
    assert whole.abs().sum() > 0


# pass@k


def best_of_every_subset(scores: list[float], k: int) -> list[float]:
    def best(members: tuple[int, ...]) -> float:
        return max((scores[j] for j in members), default=0.0)

    result = []
    for i in range(len(scores)):
        subsets = [s for s in itertools.combinations(range(len(scores)), k) if i in s]
        gains = [best(s) - best(tuple(j for j in s if j != i)) for s in subsets]
        result.append(sum(gains) / len(gains) if gains else 0.0)
    return result


def test_pass_at_k_by_hand() -> None:
    # k = 2 of 0, 1, 4, 4: a 4 adds 4, 3 and 0 to the 0, the 1 and the other 4; the 1 adds 1, 0 and 0; the 0 nothing.
    result = pass_at_k_advantages(torch.tensor([4.0, 0.0, 1.0, 4.0]), ids(0, 0, 0, 0), k=2)
    assert result.tolist() == pytest.approx([7 / 3, 0.0, 1 / 3, 7 / 3])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 8])
def test_pass_at_k_equals_all_subsets(k: int) -> None:
    scores, group_ids, _ = a_batch(6)
    for values in (scores - 0.3, (scores * 3).round(), (scores > 0.6).double()):
        result = pass_at_k_advantages(values, group_ids, k=k)
        for group in group_ids.unique():
            own = group_ids == group
            expected = best_of_every_subset(values[own].tolist(), k)
            assert result[own].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_pass_at_k_of_the_whole_group_rewards_the_lead_of_the_best() -> None:
    scores, group_ids = torch.tensor([0.25, 1.0, 0.5, 3.0, 3.0, 1.0]), ids(0, 0, 0, 1, 1, 1)
    assert pass_at_k_advantages(scores, group_ids, k=3).tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_pass_at_one_gives_the_scores_and_small_groups_nothing() -> None:
    scores, group_ids = torch.tensor([0.25, -1.0, 0.5, 3.0]), ids(0, 0, 2, 2)
    torch.testing.assert_close(pass_at_k_advantages(scores, group_ids, k=1), scores)
    assert pass_at_k_advantages(scores, group_ids, k=3).tolist() == [0.0] * 4
    assert pass_at_k_advantages(torch.full((4,), 0.3), ids(1, 1, 1, 1), k=2).tolist() == [0.0] * 4


def test_pass_at_k_in_large_groups() -> None:
    # Of n responses c are right, so A = C(n - c, k - 1) / C(n - 1, k - 1) for each of them, and 0 for the others.
    n, c, k = 5000, 40, 64
    scores = torch.zeros(n)
    scores[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:c]] = 1.0
    result = pass_at_k_advantages(scores, torch.zeros(n, dtype=torch.int64), k=k)
    expected = math.comb(n - c, k - 1) / math.comb(n - 1, k - 1)
    assert result[scores == 1].tolist() == pytest.approx([expected] * c, rel=1e-6)
    assert result[scores == 0].eq(0).all()


def test_pass_at_k_points_where_the_objective_rises() -> None:
    # Three actions with probabilities p and scores 0, 1, 3: the gradient of E[max of 2] is k E[Â ∇ log π].
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    values, n, k = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 4, 2
    p = logits.softmax(0)
    objective = sum(p[a] * p[b] * torch.maximum(values[a], values[b]) for a in range(3) for b in range(3))
    (expected,) = torch.autograd.grad(objective, logits)  # type: ignore[arg-type]
    estimate = torch.zeros(3, dtype=torch.float64)
    for actions in itertools.product(range(3), repeat=n):
        advantages = pass_at_k_advantages(values[list(actions)], torch.zeros(n, dtype=torch.int64), k=k)
        log_likelihood = (advantages * logits.log_softmax(0)[list(actions)]).mean() * k
        (gradient,) = torch.autograd.grad(log_likelihood, logits)
        estimate += p.detach()[list(actions)].prod() * gradient
    torch.testing.assert_close(estimate, expected, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(members, st.integers(2, 6), st.randoms(use_true_random=False))
def test_properties_of_pass_at_k(batch: list[tuple[float, int]], k: int, random: Any) -> None:
    scores = torch.tensor([score for score, _ in batch], dtype=torch.float64)
    group_ids = ids(*(group for _, group in batch))
    result = pass_at_k_advantages(scores, group_ids, k=k)
    assert (result >= 0).all()
    torch.testing.assert_close(pass_at_k_advantages(scores + 17.0, group_ids, k=k), result, rtol=1e-9, atol=1e-9)
    order = list(range(len(scores)))
    random.shuffle(order)
    permuted = pass_at_k_advantages(scores[order], group_ids[order], k=k)
    torch.testing.assert_close(permuted, result[order], rtol=1e-12, atol=1e-12)
    for i, j in itertools.combinations(range(len(scores)), 2):
        if group_ids[i] == group_ids[j] and scores[i] <= scores[j]:
            assert result[i] <= result[j] + 1e-9


def test_a_nan_shows_in_its_own_group_only() -> None:
    result = pass_at_k_advantages(torch.tensor([1.0, NAN, 2.0, 5.0, 7.0]), ids(0, 0, 0, 1, 1), k=2)
    assert result.isnan().tolist() == [True, True, True, False, False]


# Several rewards


def test_decoupled_by_hand() -> None:
    # Both rewards of group 0 have σ = 1/√2 · their gap, so each gives ∓1/√2; in group 1 the second says nothing.
    rewards = torch.tensor([[0.0, 10.0], [1.0, 0.0], [0.0, 5.0], [1.0, 5.0]])
    result = decoupled_group_advantages(rewards, ids(0, 0, 1, 1), weights=[1.0, 0.5])
    half = 1 / math.sqrt(2)
    assert result.tolist() == pytest.approx([-half + 0.5 * half, half - 0.5 * half, -half, half], rel=1e-5)


def test_one_reward_is_grpo_and_weights_are_linear() -> None:
    scores, group_ids, _ = a_batch()
    rewards = torch.stack((scores, scores.roll(1), scores.square()), 1)
    grpo = [group_advantages(column, group_ids, baseline="mean", scale="std") for column in rewards.unbind(1)]
    assert torch.equal(decoupled_group_advantages(rewards[:, :1], group_ids, weights=[1.0]), grpo[0])
    result = decoupled_group_advantages(rewards, group_ids, weights=[1.0, 0.0, 2.5])
    torch.testing.assert_close(result, grpo[0] + 2.5 * grpo[2], rtol=1e-12, atol=1e-12)


def test_added_first_different_rewards_fall_together_but_not_decoupled() -> None:
    # (1, 0) and (0, 1) have one sum; the first reward is rare (1 of 4), the second is not (2 of 4).
    rewards, group_ids = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), ids(0, 0, 0, 0)
    summed = group_advantages(rewards.sum(1), group_ids, baseline="mean", scale="std")
    assert summed[0] == summed[1]
    decoupled = decoupled_group_advantages(rewards, group_ids, weights=[1.0, 1.0])
    assert decoupled[0] > decoupled[1] + 0.1
    whitened = whiten(decoupled, torch.ones(4, dtype=torch.bool))  # the last step of GDPO
    assert whitened.std().item() == pytest.approx(1.0, rel=1e-5)


# Spreading


def test_spread_over_tokens_by_hand() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    x = torch.tensor([2.0, NAN], requires_grad=True)
    result = spread_over_tokens(x, mask)
    assert result.tolist() == [[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=6))
def test_spread_packed_equals_padded(rows: list[list[bool]]) -> None:
    lengths = [len(row) for row in rows]
    mask = torch.zeros(len(rows), 6, dtype=torch.bool)
    for row, flags in zip(mask, rows, strict=True):
        row[: len(flags)] = torch.tensor(flags)
    inside = torch.arange(6) < torch.tensor(lengths).reshape(-1, 1)
    x = torch.arange(1.0, 1.0 + len(rows))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = spread_over_tokens(x, mask[inside], cu_seqlens=cu_seqlens)
    assert torch.equal(packed, spread_over_tokens(x, mask)[inside])


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 2, 2, 6])])
def test_gradients_in_float64(cu_seqlens: Tensor | None) -> None:
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()
    if cu_seqlens is not None:
        mask = mask.flatten()
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: spread_over_tokens(x, mask, cu_seqlens=cu_seqlens), x)


# What every function owes


def test_empty_batches() -> None:
    nothing, none = torch.zeros(0), ids()
    for baseline, scale in EVERY:
        assert advantages_of(nothing, none, baseline, scale, none).shape == (0,)
    assert pass_at_k_advantages(nothing, none, k=3).shape == (0,)
    assert decoupled_group_advantages(torch.zeros(0, 2), none, weights=[1.0, 1.0]).shape == (0,)
    assert spread_over_tokens(nothing, torch.zeros(0, 4, dtype=torch.bool)).shape == (0, 4)


def test_misfits_are_named() -> None:
    s, g = torch.zeros(3), ids(0, 0, 1)

    def rejects(match: str, f: Callable[[], Tensor]) -> None:
        with pytest.raises(ValueError, match=match):
            f()

    grpo: dict[str, Any] = NAMED["GRPO"]
    rejects(r"scores has shape \(2,\).*\[3\]", lambda: group_advantages(s[:2], g, **grpo))
    rejects(r"scores has shape \(3, 1\)", lambda: group_advantages(s.unsqueeze(1), g, **grpo))
    rejects(
        r"group_ids has shape \(3,\) and dtype torch.int32.*return_inverse",
        lambda: group_advantages(s, g.int(), **grpo),
    )
    rejects(r"group_ids has shape \(3, 1\)", lambda: group_advantages(s, g.unsqueeze(1), **grpo))
    rejects(r"group_ids runs from 0 to 3 with 3 responses", lambda: group_advantages(s, ids(0, 3, 1), **grpo))
    rejects(r"group_ids runs from -1 to 1", lambda: group_advantages(s, ids(0, -1, 1), **grpo))
    rejects(r"group_ids runs from 0 to 9", lambda: pass_at_k_advantages(s, ids(0, 9, 1), k=2))
    rejects("group_ids runs", lambda: decoupled_group_advantages(s.unsqueeze(1), ids(0, 9, 1), weights=[1.0]))
    rejects(
        "baseline='median'.*mean, leave_one_out, optimal, none",
        lambda: group_advantages(s, g, baseline="median", scale="std"),  # type: ignore[arg-type]
    )
    rejects("scale='iqr'.*std, none, mean", lambda: group_advantages(s, g, baseline="mean", scale="iqr"))  # type: ignore[arg-type]
    rejects("lengths is None", lambda: group_advantages(s, g, baseline="optimal", scale="none"))
    rejects("lengths is a tensor with baseline='mean'", lambda: group_advantages(s, g, **grpo, lengths=g))
    rejects(r"lengths has shape \(2,\)", lambda: group_advantages(s, g, **NAMED["OPO"], lengths=g[:2]))
    rejects(r"lengths is -4 at index 2", lambda: group_advantages(s, g, **NAMED["OPO"], lengths=ids(1, 1, -4)))
    rejects(r"scores is -1.0 at index 1", lambda: group_advantages(torch.tensor([0.0, -1.0, 2.0]), g, **NAMED["MaxRL"]))
    rejects("k=0", lambda: pass_at_k_advantages(s, g, k=0))
    rejects(r"scores has shape \(3,\) with 1 weights", lambda: decoupled_group_advantages(s, g, weights=[1.0]))
    rejects("with 1 weights", lambda: decoupled_group_advantages(torch.zeros(3, 2), g, weights=[1.0]))
    rejects(r"weights\[1\]=-1.0", lambda: decoupled_group_advantages(torch.zeros(3, 2), g, weights=[1.0, -1.0]))
    rejects(r"weights\[0\]=nan", lambda: decoupled_group_advantages(torch.zeros(3, 1), g, weights=[NAN]))
    mask = torch.ones(2, 4, dtype=torch.bool)
    rejects(r"x has shape \(3,\); pass one per sequence, \[2\]", lambda: spread_over_tokens(s, mask))
    rejects(r"mask\.bool\(\)", lambda: spread_over_tokens(s[:2], mask.float()))


def test_value_checks_name_a_nan() -> None:
    scores = torch.tensor([0.0, NAN])
    with value_checks(), pytest.raises(ValueError, match="scores is nan at index 1"):
        group_advantages(scores, ids(0, 0), baseline="mean", scale="std")
    with value_checks(), pytest.raises(ValueError, match="scores is nan at index 1"):
        pass_at_k_advantages(scores, ids(0, 0), k=2)


def test_arbitrary_keys_become_ids() -> None:
    keys = torch.tensor([2**61, -5, 2**61, -5])
    result = group_advantages(
        torch.tensor([1.0, 5.0, 3.0, 5.0]), torch.unique(keys, return_inverse=True)[1], baseline="mean", scale="none"
    )
    assert result.tolist() == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", [*NAMED, "pass@k", "decoupled", "spread"])
def test_one_graph(name: str) -> None:
    scores, group_ids, lengths = a_batch(3)

    def f(scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        match name:
            case "pass@k":
                return pass_at_k_advantages(scores, group_ids, k=3)
            case "decoupled":
                return decoupled_group_advantages(torch.stack((scores, -scores), 1), group_ids, weights=[1.0, 0.5])
            case "spread":
                cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
                return spread_over_tokens(scores, everywhere, cu_seqlens=cu_seqlens)
        return group_advantages(scores, group_ids, **NAMED[name], lengths=lengths if name == "OPO" else None)

    everywhere = torch.ones(int(lengths.sum()), dtype=torch.bool)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scores, group_ids, lengths), f(scores, group_ids, lengths))


def test_what_is_not_checked_stays_in_its_group() -> None:
    # Compiled code reads no values: it is where an accelerator is without `value_checks`.
    def f(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        maxrl = group_advantages(scores, group_ids, **NAMED["MaxRL"])
        return maxrl, group_advantages(scores, group_ids, baseline="mean", scale="none")

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    scores, group_ids = torch.tensor([1.0, 3.0, -1.0, 2.0, 0.0]), ids(7, 7, -2, -2, 0)
    maxrl, centred = compiled(scores, group_ids)
    assert maxrl[:2].tolist() == [-0.5, 0.5]
    assert maxrl.isnan().tolist() == [False, False, True, True, False]
    assert centred.tolist() == [-1.0, 1.0, -1.5, 1.5, 0.0]


def test_a_flag_per_response_stays_a_flag() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    spread = spread_over_tokens(torch.tensor([True, False]), mask)
    assert spread.tolist() == [[True, True, False], [False, False, False]]
    packed = spread_over_tokens(torch.tensor([True, False]), mask.flatten(), cu_seqlens=torch.tensor([0, 3, 6]))
    assert torch.equal(packed, spread.flatten())


def test_lengths_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"lengths has dtype torch\.float32"):
        group_advantages(torch.ones(2), ids(0, 0), baseline="optimal", scale="none", lengths=torch.tensor([1.5, 2.5]))
