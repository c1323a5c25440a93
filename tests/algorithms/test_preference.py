import math
from typing import Any

import pytest
import torch
from drivetrain_algorithms import (
    PreferenceLoss,
    aggregate,
    dpo_loss,
    ipo_loss,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
    value_checks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2, LOG3 = math.log(2.0), math.log(3.0)
LOSSES = {
    "sigmoid": lambda *pairs: dpo_loss(*pairs, beta=0.5),
    "conservative": lambda *pairs: dpo_loss(*pairs, beta=0.5, label_smoothing=0.1),
    "robust": lambda *pairs: dpo_loss(*pairs, beta=0.5, kind="robust", label_smoothing=0.1),
    "hinge": lambda *pairs: dpo_loss(*pairs, beta=0.5, kind="hinge"),
    "ipo": lambda *pairs: ipo_loss(*pairs, beta=0.5),
    "reward_model": lambda chosen, rejected, margin, _: reward_model_loss(
        chosen, rejected, margin=margin.abs(), center_coef=0.01
    ),
}
finite = st.floats(-50.0, 50.0)


def pairs(*rows: float | list[float]) -> list[Tensor]:
    """One tensor for each argument, of one pair or of several."""
    return [torch.tensor(row if isinstance(row, list) else [row]) for row in rows]


def random_pairs(size: int = 5, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(3.0 * torch.randn(4, size, dtype=dtype, generator=generator))


# sequence_logprobs


def test_a_response_is_as_probable_as_all_its_tokens_together() -> None:
    logprobs = torch.tensor([[-9.0, -1.0, -2.0, math.nan], [-9.0, -4.0, -math.inf, math.inf], [math.nan] * 4])
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    logprobs.requires_grad_()
    sums, averages = sequence_logprobs(logprobs, mask), sequence_logprobs(logprobs, mask, average=True)
    assert sums.tolist() == [-1.0 - 2.0, -4.0, 0.0]
    assert averages.tolist() == [(-1.0 - 2.0) / 2, -4.0, 0.0]
    sums.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, mask.float())
    logprobs.grad = None
    averages.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4]


def test_its_negative_sum_is_the_loss_of_supervised_fine_tuning() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    loss = aggregate(sft_loss(logprobs, mask), mask, mode="token_sum", denominator=1)
    torch.testing.assert_close(-sequence_logprobs(logprobs, mask).sum(), loss)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans(), st.integers(0, 2**16))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_packed_equals_padded(lengths: list[int], average: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(7) < torch.tensor(lengths).unsqueeze(-1)
    mask = inside & (torch.rand(len(lengths), 7, generator=generator) > 0.3)
    logprobs = torch.where(mask, torch.randn(mask.shape, dtype=torch.float64, generator=generator), math.nan)
    cu_seqlens = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    weight = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    padded, packed = logprobs.clone().requires_grad_(), logprobs[inside].requires_grad_()
    results = [
        sequence_logprobs(padded, mask, average=average),
        sequence_logprobs(packed, mask[inside], average=average, cu_seqlens=cu_seqlens),
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    for result in results:
        (result * weight).sum().backward()
    assert padded.grad is not None
    assert packed.grad is not None
    assert torch.equal(packed.grad, padded.grad[inside])
    assert padded.grad[~mask].eq(0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_shows_in_its_own_sequence_only(packed: bool) -> None:
    logprobs = torch.tensor([[-1.0, math.nan], [-1.0, -2.0], [-math.inf, -1.0]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 2, 4, 6]) if packed else None
    if packed:
        logprobs, mask = logprobs.flatten(), mask.flatten()
    result = sequence_logprobs(logprobs, mask, cu_seqlens=cu_seqlens)
    assert result.isnan().tolist() == [True, False, False]
    assert result[1:].tolist() == [-3.0, -math.inf]


def test_half_precision_is_summed_in_float32() -> None:
    logprobs = torch.full((1, 300), -1.0, dtype=torch.bfloat16)
    result = sequence_logprobs(logprobs, torch.ones(1, 300, dtype=torch.bool))
    assert result.dtype is torch.float32
    assert result.tolist() == [-300.0]  # in bfloat16 the sum would stop at -256


# dpo_loss


def test_direct_preference_by_hand() -> None:
    # r = 0.5 (-3 + 5) = 1 and 0.5 (-4 + 4 - 2 ln 3) = -ln 3 + 0; the second pair the other way round
    arguments = pairs([-3.0, -4.0], [-4.0 - 2 * LOG3, -2.0], [-5.0, -4.0], [-4.0, -2.0 - 2 * LOG3])
    result = dpo_loss(*arguments, beta=0.5)
    assert result.chosen_rewards.tolist() == pytest.approx([1.0, 0.0])
    assert result.rejected_rewards.tolist() == pytest.approx([-LOG3, LOG3])
    assert result.margins.tolist() == pytest.approx([1.0 + LOG3, -LOG3])
    assert result.accurate.tolist() == [True, False]
    # σ(1 + ln 3) = 3e / (3e + 1) and σ(-ln 3) = 1/4
    assert result.loss.tolist() == pytest.approx([math.log1p(1 / (3 * math.e)), math.log(4.0)])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # at a margin of ln 3: σ = 3/4, so that -log σ(m) = ln 4/3 and -log σ(-m) = ln 4
        ({}, math.log(4 / 3)),
        ({"label_smoothing": 0.1}, 0.9 * math.log(4 / 3) + 0.1 * math.log(4.0)),
        ({"kind": "robust"}, math.log(4 / 3)),
        ({"kind": "robust", "label_smoothing": 0.1}, (0.9 * math.log(4 / 3) - 0.1 * math.log(4.0)) / 0.8),
        ({"kind": "hinge"}, 0.0),
    ],
)
def test_each_kind_at_a_margin_of_log_3(settings: dict[str, Any], expected: float) -> None:
    result = dpo_loss(*pairs(-1.0, -2.0, -1.0, -2.0 + LOG3), beta=1.0, **settings)
    assert result.margins.item() == pytest.approx(LOG3)
    assert result.loss.item() == pytest.approx(expected, abs=1e-7)


def test_the_hinge_by_hand() -> None:
    chosen = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    result = dpo_loss(chosen, torch.zeros(3), torch.zeros(3), torch.zeros(3), beta=0.5, kind="hinge")
    result.loss.sum().backward()
    assert result.loss.tolist() == [0.75, 0.0, 1.5]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-0.5, 0.0, -0.5]


def test_before_the_first_update_the_loss_is_log_2_and_pulls_both_ways_alike() -> None:
    chosen, rejected = (x.float().requires_grad_() for x in random_pairs()[:2])
    result = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.3)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([LOG2] * 5)
    assert result.margins.eq(0).all()
    assert not result.accurate.any()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.15] * 5)  # -β σ(0)
    assert rejected.grad.tolist() == pytest.approx([0.15] * 5)


def test_conservative_dpo_stops_where_the_labels_are_as_sure_as_they_can_be() -> None:
    margin = math.log(0.9 / 0.1)
    for offset, sign in [(-0.5, -1), (0.0, 0), (0.5, 1)]:
        chosen = torch.tensor([margin + offset], dtype=torch.float64, requires_grad=True)
        zero = torch.zeros(1, dtype=torch.float64)
        dpo_loss(chosen, zero, zero, zero, beta=1.0, label_smoothing=0.1).loss.sum().backward()
        assert chosen.grad is not None
        assert chosen.grad.item() * sign >= 0
        assert abs(chosen.grad.item()) == pytest.approx(0.0, abs=1e-12) if sign == 0 else abs(chosen.grad.item()) > 0.01


@given(finite, st.floats(0.0, 0.45))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_the_robust_loss_is_unbiased_under_flipped_labels(margin: float, flipped: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    chosen = torch.tensor([margin], dtype=torch.float64)
    clean = dpo_loss(chosen, zero, zero, zero, beta=1.0).loss
    kept = dpo_loss(chosen, zero, zero, zero, beta=1.0, kind="robust", label_smoothing=flipped).loss
    swapped = dpo_loss(zero, chosen, zero, zero, beta=1.0, kind="robust", label_smoothing=flipped).loss
    torch.testing.assert_close((1 - flipped) * kept + flipped * swapped, clean, rtol=1e-9, atol=1e-9)


@given(finite, finite, finite, finite, st.floats(0.01, 5.0))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_only_the_margin_counts_and_more_of_it_is_better(a: float, b: float, c: float, d: float, beta: float) -> None:
    arguments = list(torch.tensor([[a], [b], [c], [d]], dtype=torch.float64))
    chosen, rejected, *references = arguments
    for kind in ("sigmoid", "hinge"):
        result = dpo_loss(*arguments, beta=beta, kind=kind)  # type: ignore[arg-type]
        assert result.loss.item() >= 0
        assert result.margins.item() == pytest.approx(beta * ((a - c) - (b - d)), abs=1e-9)
        assert result.accurate.item() == (result.chosen_rewards > result.rejected_rewards).item()
        moved = dpo_loss(chosen + 7.0, rejected + 7.0, *references, beta=beta, kind=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(moved.loss, result.loss, rtol=1e-9, atol=1e-9)
        better = dpo_loss(chosen + 1.0, rejected, *references, beta=beta, kind=kind)  # type: ignore[arg-type]
        assert better.loss.item() <= result.loss.item()


def test_without_a_reference_the_policy_is_its_own_reward() -> None:
    chosen, rejected, *_ = random_pairs()
    zeros = torch.zeros(5)
    result = dpo_loss(chosen, rejected, zeros, zeros, beta=2.0)
    torch.testing.assert_close(result.loss, -torch.log(torch.sigmoid(2.0 * (chosen - rejected))))


def test_length_normalised_dpo_is_dpo_of_averages() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = -torch.rand(2, 4, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([[1], [6], [3], [2]])
    chosen, rejected = sequence_logprobs(policy, mask, average=True).chunk(2)
    references = sequence_logprobs(reference, mask, average=True).chunk(2)
    by_hand = [(policy[i][: int(mask[i].sum())] - reference[i][: int(mask[i].sum())]).mean().item() for i in range(4)]
    margins = dpo_loss(chosen, rejected, *references, beta=5.0).margins
    assert margins.tolist() == pytest.approx([5 * (by_hand[0] - by_hand[2]), 5 * (by_hand[1] - by_hand[3])], abs=1e-6)


# ipo_loss


def test_identity_preference_by_hand() -> None:
    # h = (-1 + 1.5) - (-2 + 1.75) = 0.75, and 1 / (2 · 0.25) = 2
    chosen, rejected, *references = pairs(-1.0, -2.0, -1.5, -1.75)
    chosen.requires_grad_()
    result = ipo_loss(chosen, rejected, *references, beta=0.25)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx((0.75 - 2.0) ** 2)
    assert result.chosen_rewards.item() == pytest.approx(0.25 * 0.5)
    assert result.rejected_rewards.item() == pytest.approx(0.25 * -0.25)
    assert result.margins.item() == pytest.approx(0.25 * 0.75)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(2 * (0.75 - 2.0))


def test_identity_preference_stops_at_its_margin_and_begins_at_zero() -> None:
    zero = torch.zeros(1)
    assert ipo_loss(zero, zero, zero, zero, beta=0.1).loss.item() == pytest.approx(1 / (4 * 0.1**2))
    chosen = torch.tensor([5.0], requires_grad=True)
    result = ipo_loss(chosen, zero, zero, zero, beta=0.1)
    result.loss.sum().backward()
    assert result.loss.item() == 0.0
    assert result.margins.item() == pytest.approx(0.5)
    assert chosen.grad is not None
    assert chosen.grad.item() == 0.0


# reward_model_loss


def test_reward_model_by_hand() -> None:
    chosen, rejected = pairs([2.0, 1.0, 0.0], [2.0 - LOG3, 1.0, LOG3])
    assert reward_model_loss(chosen, rejected).loss.tolist() == pytest.approx([math.log(4 / 3), LOG2, math.log(4.0)])
    with_margin = reward_model_loss(chosen, rejected, margin=torch.tensor([2 * LOG3, 0.0, 0.0]))
    assert with_margin.loss.tolist() == pytest.approx([math.log(4.0), LOG2, math.log(4.0)])
    assert with_margin.margins.tolist() == pytest.approx([LOG3, 0.0, -LOG3])
    assert with_margin.accurate.tolist() == [True, False, False]
    centred = reward_model_loss(chosen, rejected, center_coef=0.01)
    assert centred.loss[1].item() == pytest.approx(LOG2 + 0.01 * (1.0 + 1.0) ** 2)
    assert torch.equal(centred.chosen_rewards, chosen)
    assert torch.equal(centred.rejected_rewards, rejected)


def test_a_reward_model_is_dpo_of_its_own_rewards() -> None:
    arguments = random_pairs()
    dpo = dpo_loss(*arguments, beta=0.7)
    torch.testing.assert_close(reward_model_loss(dpo.chosen_rewards, dpo.rejected_rewards).loss, dpo.loss)


def test_centring_removes_the_freedom_that_preferences_leave() -> None:
    offset = torch.tensor(4.0, requires_grad=True)
    chosen, rejected = torch.tensor([1.0, 0.5]), torch.tensor([-1.0, -0.5])
    (free,) = torch.autograd.grad(reward_model_loss(chosen + offset, rejected + offset).loss.sum(), offset)
    assert free.item() == 0.0
    (held,) = torch.autograd.grad(
        reward_model_loss(chosen + offset, rejected + offset, center_coef=0.01).loss.sum(), offset
    )
    assert held.item() == pytest.approx(2 * (2 * 0.01 * 8.0 * 2))  # two pairs, each 2 c (s + s') · 2 with s + s' = 8


# all of them


@pytest.mark.parametrize("name", LOSSES)
def test_pairs_do_not_see_each_other(name: str) -> None:
    arguments = random_pairs(7)
    whole = LOSSES[name](*arguments)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    permuted = LOSSES[name](*(x[order] for x in arguments))
    parts = [LOSSES[name](*(x[rows] for x in arguments)) for rows in (slice(0, 1), slice(1, 5), slice(5, 7))]
    for field in PreferenceLoss._fields:
        assert torch.equal(getattr(permuted, field), getattr(whole, field)[order])
        assert torch.equal(torch.cat([getattr(part, field) for part in parts]), getattr(whole, field))


@given(st.sampled_from(sorted(LOSSES)), st.integers(1, 6), st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_a_step_does_not_depend_on_how_its_pairs_were_split(name: str, size: int, data: st.DataObject) -> None:
    owners = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    chosen, *others = random_pairs(size, seed=size)
    expected = chosen.clone().requires_grad_()
    (LOSSES[name](expected, *others).loss.sum() / size).backward()
    split = chosen.clone().requires_grad_()
    for owner in range(3):  # a part may have no pair at all
        own = owners == owner
        (LOSSES[name](split[own], *(x[own] for x in others)).loss.sum() / size).backward()
    torch.testing.assert_close(split.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_float64_flow_to_the_model_only(name: str) -> None:
    arguments = [x.requires_grad_() for x in random_pairs()]
    chosen, rejected, *references = arguments
    assert torch.autograd.gradcheck(lambda a, b: LOSSES[name](a, b, *references).loss, (chosen, rejected))
    result = LOSSES[name](*arguments)
    result.loss.sum().backward()
    assert [x.grad is None for x in arguments] == [False, False, True, True]
    assert [field for field in PreferenceLoss._fields if getattr(result, field).requires_grad] == ["loss"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("margin", [1e4, -1e4, 1e30, -1e30])
def test_margins_of_any_size_are_finite(name: str, margin: float) -> None:
    dtype = torch.float64 if abs(margin) > 1e10 else torch.float32
    chosen = torch.tensor([margin], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=dtype)
    loss = LOSSES[name](chosen, zero, zero, zero).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert loss.item() >= 0 or name == "robust"
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_own_pair_only(name: str, bad: float) -> None:
    for position in range(3 if name == "reward_model" else 4):
        arguments = random_pairs(3)
        arguments[position][1] = bad
        chosen = arguments[0].requires_grad_()
        loss = LOSSES[name](*arguments).loss
        loss.sum().backward()
        assert chosen.grad is not None
        assert loss.isfinite().tolist() == chosen.grad.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("name", LOSSES)
def test_no_pairs_and_half_precision(name: str) -> None:
    nothing = [torch.zeros(0, requires_grad=True) for _ in range(4)]
    result = LOSSES[name](*nothing)
    result.loss.sum().backward()
    assert result.loss.shape == result.accurate.shape == (0,)
    assert LOSSES[name](*(x.bfloat16() for x in random_pairs())).loss.dtype is torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_compiles_without_a_graph_break(name: str) -> None:
    arguments = random_pairs()
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments).loss, LOSSES[name](*arguments).loss)


@pytest.mark.parametrize("packed", [False, True])
def test_sequence_logprobs_compile_without_a_graph_break(packed: bool) -> None:
    logprobs, mask = torch.randn(6), torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    cu_seqlens = torch.tensor([0, 2, 2, 6]) if packed else None
    if not packed:
        logprobs, mask = logprobs.view(2, 3), mask.view(2, 3)
    compiled = torch.compile(sequence_logprobs, fullgraph=True, backend="aot_eager")
    expected = sequence_logprobs(logprobs, mask, average=True, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(compiled(logprobs, mask, average=True, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta=0.0 must be above 0"),
        ({"beta": -0.1}, r"beta=-0\.1 must be a finite number"),
        ({"beta": math.inf}, "beta=inf"),
        ({"beta": 0.1, "label_smoothing": 0.5}, "label_smoothing=0.5 must be at least 0 and below 0.5"),
        ({"beta": 0.1, "label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ({"beta": 0.1, "label_smoothing": math.nan}, "label_smoothing=nan"),
        ({"beta": 0.1, "label_smoothing": 0.1, "kind": "hinge"}, "label_smoothing=0.1 has no meaning for kind='hinge'"),
        ({"beta": 0.1, "kind": "ipo"}, "kind='ipo'.*sigmoid, hinge, robust"),
    ],
)
def test_coefficients_that_do_not_fit_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(*pairs(0.0, 0.0, 0.0, 0.0), **settings)


def test_shapes_that_do_not_fit_are_named() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"ref_rejected_logprobs has shape \(1,\) and chosen_logprobs \(2,\)"):
        dpo_loss(two, two, two, one, beta=0.1)
    with pytest.raises(ValueError, match=r"chosen_logprobs has shape \(2, 3\); pass one number per pair"):
        ipo_loss(torch.zeros(2, 3), two, two, two, beta=0.1)
    with pytest.raises(ValueError, match="beta=0"):
        ipo_loss(two, two, two, two, beta=0)
    with pytest.raises(ValueError, match=r"margin has shape \(1,\)"):
        reward_model_loss(two, two, margin=one)
    with pytest.raises(ValueError, match="center_coef=-1"):
        reward_model_loss(two, two, center_coef=-1)
    with pytest.raises(ValueError, match="mask has dtype"):
        sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"logprobs has shape \(2,\)"):
        sequence_logprobs(two, torch.ones(2, 3, dtype=torch.bool))


def test_value_checks_name_the_pair() -> None:
    good, bad = torch.zeros(2), torch.tensor([0.0, math.nan])
    with value_checks():
        with pytest.raises(ValueError, match="rejected_logprobs is nan at index 1; 1 of 2"):
            dpo_loss(good, bad, good, good, beta=0.1)
        with pytest.raises(ValueError, match="margin is nan at index 1"):
            reward_model_loss(good, good, margin=bad)
        with pytest.raises(ValueError, match="logprobs is nan at token 1 of sequence 0"):
            sequence_logprobs(bad.unsqueeze(0), torch.ones(1, 2, dtype=torch.bool))


def test_long_packed_responses_lose_no_digits() -> None:
    length = 32_768
    logprobs = -3.0 * torch.rand(2, length, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, length, dtype=torch.bool)
    truth = logprobs.double().sum(1)
    packed = sequence_logprobs(logprobs.flatten(), mask.flatten(), cu_seqlens=torch.tensor([0, length, 2 * length]))
    torch.testing.assert_close(packed.double(), truth, rtol=1e-7, atol=0.0)
    assert torch.equal(packed, sequence_logprobs(logprobs, mask))


def test_a_negative_margin_is_refused() -> None:
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="margin"):
        reward_model_loss(two, two, margin=torch.tensor([1.0, -5.0]))
