import math

import pytest
import torch
from drivetrain_algorithms import (
    CorrectionLevel,
    DivergenceKind,
    DivergenceLevel,
    ImportanceWeights,
    Rejection,
    aggregate,
    importance_weights,
    kl_estimate,
    loss_denominator,
    ppo_clip,
    reject_divergent,
    value_checks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2 = math.log(2.0)
LEVELS: list[CorrectionLevel] = ["token", "sequence", "geometric"]
KINDS: list[DivergenceKind] = ["k2", "k3", "binary_kl"]
SPANS: list[DivergenceLevel] = ["token", "sequence_sum", "sequence_mean", "sequence_max"]

# d = log π_old - log π_rollout: ratios (2, 2, 1/2), (4, 1, -), (1/8, -, -)
RATIOS = torch.tensor([[2.0, 2.0, 0.5], [4.0, 1.0, math.nan], [0.125, math.nan, math.nan]], dtype=torch.float64)
MASK = RATIOS.isfinite()
ROLLOUT = torch.full((3, 3), -3.0, dtype=torch.float64)
OLD = ROLLOUT + RATIOS.log()


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[2.0, 2.0, 0.5], [4.0, 1.0, 0.0], [0.125, 0.0, 0.0]]),
        ("sequence", [[2.0, 2.0, 2.0], [4.0, 4.0, 0.0], [0.125, 0.0, 0.0]]),
        ("geometric", [[2 ** (1 / 3)] * 3, [2.0, 2.0, 0.0], [0.125, 0.0, 0.0]]),
    ],
)
def test_weights_by_hand(level: CorrectionLevel, expected: list[list[float]]) -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level=level)
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(result.ratio, torch.where(MASK, result.weights, 1.0))
    assert torch.equal(result.keep, MASK)
    assert not result.clamped.any()


def test_truncated_importance_sampling_by_hand() -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level="token", clamp=(0.0, 1.5))
    torch.testing.assert_close(
        result.weights,
        torch.tensor([[1.5, 1.5, 0.5], [1.5, 1.0, 0.0], [0.125, 0.0, 0.0]], dtype=torch.float64),
    )
    assert result.clamped.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert torch.equal(result.keep, MASK)
    assert result.ratio[0, 0].item() == pytest.approx(2.0)
    both = importance_weights(OLD, ROLLOUT, MASK, level="token", clamp=(0.5, 1.5))
    assert both.weights[2, 0].item() == 0.5
    assert both.clamped[2].tolist() == [True, False, False]


def test_icepop_by_hand() -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level="token", reject=(0.2, 3.0))
    torch.testing.assert_close(
        result.weights, torch.tensor([[2.0, 2.0, 0.5], [0.0, 1.0, 0.0], [0.0] * 3], dtype=torch.float64)
    )
    assert result.keep.tolist() == [[True, True, True], [False, True, False], [False] * 3]
    assert result.ratio[1, 0].item() == pytest.approx(4.0)


def test_masked_importance_sampling_by_hand() -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level="sequence", reject=(0.0, 3.0))
    torch.testing.assert_close(
        result.weights, torch.tensor([[2.0] * 3, [0.0] * 3, [0.125, 0.0, 0.0]], dtype=torch.float64)
    )
    assert result.keep.tolist() == [[True] * 3, [False] * 3, [True, False, False]]


def test_geometric_rejection_without_weights() -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level="geometric", clamp=(1.0, 1.0), reject=(0.5, 1.5))
    assert result.weights.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_rejection_goes_by_the_weight_before_the_clamp() -> None:
    result = importance_weights(OLD, ROLLOUT, MASK, level="token", clamp=(0.0, 2.0), reject=(0.2, 3.0))
    assert result.keep.tolist() == [[True, True, True], [False, True, False], [False] * 3]
    assert not result.clamped.any()


def test_two_calls_combine() -> None:
    kept = importance_weights(OLD, ROLLOUT, MASK, level="geometric", reject=(0.5, 1.5)).keep
    result = importance_weights(OLD, ROLLOUT, kept, level="token", clamp=(0.0, 1.5))
    torch.testing.assert_close(
        result.weights, torch.tensor([[1.5, 1.5, 0.5], [0.0] * 3, [0.0] * 3], dtype=torch.float64)
    )
    assert result.keep.tolist() == [[True] * 3, [False] * 3, [False] * 3]


def test_a_rejected_token_leaves_the_loss_and_the_divisor() -> None:
    logprobs = ROLLOUT.clone().requires_grad_()
    corrected = importance_weights(OLD, ROLLOUT, MASK, level="token", reject=(0.2, 3.0))
    loss = ppo_clip(
        logprobs, ROLLOUT, torch.full((3, 3), -1.0, dtype=torch.float64), corrected.keep, clip_low=0.2, clip_high=0.2
    ).loss

    def mean(mask: Tensor) -> Tensor:
        denominator = loss_denominator(mask, mode="token_mean")
        return aggregate(loss * corrected.weights, mask, mode="token_mean", denominator=denominator)

    # each kept token has a loss of 1, weighed 2, 2, 1/2 and 1
    assert mean(corrected.keep).item() == pytest.approx(5.5 / 4)
    assert mean(MASK).item() == pytest.approx(5.5 / 6)
    (gradient,) = torch.autograd.grad(mean(corrected.keep), logprobs)
    torch.testing.assert_close(4 * gradient, corrected.weights)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
def test_dividing_by_the_mean_weight_gives_weights_of_mean_one(mode: str) -> None:
    level: CorrectionLevel = "token" if mode == "token_mean" else "sequence"
    weights = importance_weights(OLD, ROLLOUT, MASK, level=level, clamp=(0.0, 2.0)).weights
    denominator = loss_denominator(MASK, mode=mode)  # type: ignore[arg-type]

    def mean(x: Tensor) -> Tensor:
        return aggregate(x, MASK, mode=mode, denominator=denominator)  # type: ignore[arg-type]

    by_hand = (2 + 2 + 0.5 + 2 + 1 + 0.125) / 6 if level == "token" else (2 + 2 + 0.125) / 3
    assert mean(weights).item() == pytest.approx(by_hand)
    assert mean(weights / mean(weights)).item() == pytest.approx(1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_weigh_exactly_one(level: CorrectionLevel) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    result = importance_weights(x, x, ones(4, 6), level=level, clamp=(0.9, 1.1), reject=(0.99, 1.01))
    assert result.weights.eq(1).all()
    assert result.keep.all()


def test_the_levels_of_one_token_are_the_same() -> None:
    old, rollout = torch.randn(2, 5, 1, generator=torch.Generator().manual_seed(1))
    results = [importance_weights(old, rollout, ones(5, 1), level=level, reject=(0.5, 2.0)) for level in LEVELS]
    for result in results[1:]:
        assert torch.equal(result.weights, results[0].weights)
        assert torch.equal(result.keep, results[0].keep)


def test_the_sequence_weight_makes_an_expectation_under_the_engine_one_under_the_learner() -> None:
    # two tokens of three actions each: all nine sequences, weighed by how often the engine samples them
    engine, learner, value = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    engine, learner = engine.log_softmax(-1), learner.log_softmax(-1)
    actions = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    rollout, old = (torch.stack((p[0, actions[:, 0]], p[1, actions[:, 1]]), -1) for p in (engine, learner))
    score = value[0, actions[:, 0]] * value[1, actions[:, 1]]
    weights = importance_weights(old, rollout, ones(9, 2), level="sequence").weights[:, 0]
    assert (rollout.sum(-1).exp() * weights * score).sum().item() == pytest.approx(
        (old.sum(-1).exp() * score).sum().item()
    )


def test_nothing_carries_a_gradient() -> None:
    old, rollout = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    weights = importance_weights(old, rollout, ones(2, 2), level="sequence")
    rejection = reject_divergent(old, rollout, ones(2, 2), kind="k3", level="sequence_sum", limit=1.0)
    assert not any(x.requires_grad for x in (*weights, *rejection))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1000.0])
def test_masked_slots_change_nothing(level: CorrectionLevel, garbage: float) -> None:
    clean = importance_weights(ROLLOUT + 0.3, ROLLOUT, MASK, level=level, clamp=(0.0, 2.0), reject=(0.5, 3.0))
    for position in range(2):
        inputs = [ROLLOUT + 0.3, ROLLOUT.clone()]
        inputs[position][~MASK] = garbage
        result = importance_weights(*inputs, MASK, level=level, clamp=(0.0, 2.0), reject=(0.5, 3.0))
        assert all(torch.equal(a, b) for a, b in zip(result, clean, strict=True))
        assert not result.weights[~MASK].any()
        assert result.ratio[~MASK].eq(1).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unmasked_nan_and_inf_show_and_are_not_rejected(level: CorrectionLevel, bad: float) -> None:
    for position in range(2):
        inputs = [torch.zeros(2, 2), torch.zeros(2, 2)]
        inputs[position][0, 1] = bad
        result = importance_weights(*inputs, ones(2, 2), level=level, clamp=(0.5, 2.0), reject=(0.1, 10.0))
        assert result.weights.isnan().tolist() == [[level != "token", True], [False, False]]
        assert result.keep.all()
        assert not result.clamped.any()


def test_a_weight_beyond_any_float_stays_finite() -> None:
    result = importance_weights(torch.zeros(1, 3), torch.full((1, 3), -500.0), ones(1, 3), level="sequence")
    assert result.weights.tolist() == [pytest.approx([math.exp(20.0)] * 3)]
    tiny = importance_weights(torch.full((1, 3), -500.0), torch.zeros(1, 3), ones(1, 3), level="sequence")
    assert tiny.weights.tolist() == [[0.0] * 3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k2", [LOG2**2 / 2, 0.0, (2 * LOG2) ** 2 / 2]),
        ("k3", [2 - 1 - LOG2, 0.0, 0.25 - 1 + 2 * LOG2]),
        # coins of 1/2 and 1/4, 1/2 and 1/2, 1/8 and 1/2
        ("binary_kl", [0.25 * math.log(1 / 2) + 0.75 * math.log(1.5), 0.0, 0.5 * math.log(4) + 0.5 * math.log(4 / 7)]),
    ],
)
def test_divergences_by_hand(kind: DivergenceKind, expected: list[float]) -> None:
    old = torch.tensor([0.5, 0.5, 0.125], dtype=torch.float64).log()
    rollout = torch.tensor([0.25, 0.5, 0.5], dtype=torch.float64).log()
    if kind == "binary_kl":  # the larger of both directions
        expected[0] = max(expected[0], 0.5 * math.log(2) + 0.5 * math.log(2 / 3))
        expected[2] = max(expected[2], 0.125 * math.log(1 / 4) + 0.875 * math.log(7 / 4))
    result = reject_divergent(old, rollout, ones(3), kind=kind, level="token", limit=0.3)
    assert result.divergence.tolist() == pytest.approx(expected)
    assert result.keep.tolist() == [x <= 0.3 for x in expected]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0.5, 2.0, 0.0], [4.5, 0.0, 0.0]]),
        ("sequence_sum", [[2.5, 2.5, 2.5], [4.5, 0.0, 0.0]]),
        ("sequence_mean", [[2.5 / 3] * 3, [4.5, 0.0, 0.0]]),
        ("sequence_max", [[2.0] * 3, [4.5, 0.0, 0.0]]),
    ],
)
def test_spans_by_hand(level: DivergenceLevel, expected: list[list[float]]) -> None:
    # ½ d² of d = 1, -2, 0 and 3
    d = torch.tensor([[1.0, -2.0, 0.0], [3.0, math.nan, math.inf]], dtype=torch.float64)
    mask = d.isfinite()
    result = reject_divergent(d, torch.zeros_like(d), mask, kind="k2", level=level, limit=2.2)
    torch.testing.assert_close(result.divergence, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(result.keep, mask & (result.divergence <= 2.2))
    assert not result.keep[1].any()


def test_k3_is_that_of_kl_estimate() -> None:
    old, rollout = -torch.rand(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result = reject_divergent(old, rollout, ones(9), kind="k3", level="token", limit=1.0)
    # sampled by the engine, so that the engine's policy is the one estimated from
    torch.testing.assert_close(result.divergence, kl_estimate(rollout, old, ones(9), kind="k3"))


def test_coins_that_always_or_never_fall_on_one_side() -> None:
    old = torch.tensor([0.0, 0.0, -1e-7, -200.0, 1e-7])
    rollout = torch.tensor([0.0, -LOG2, 0.0, -200.0, 0.0])
    result = reject_divergent(old, rollout, ones(5), kind="binary_kl", level="token", limit=1.0)
    assert result.divergence[[0, 3, 4]].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert result.divergence[1:3].tolist() == [math.inf, math.inf]
    assert result.keep.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", SPANS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_garbage_in_masked_and_in_unmasked_slots(kind: DivergenceKind, level: DivergenceLevel, bad: float) -> None:
    for position in range(2):
        inputs = [torch.full((2, 2), -1.0), torch.full((2, 2), -1.5)]
        inputs[position][0, 1] = bad
        masked = reject_divergent(
            *inputs, torch.tensor([[True, False], [True, True]]), kind=kind, level=level, limit=9.0
        )
        assert masked.divergence.isfinite().all()
        assert masked.divergence[0, 1].item() == 0.0
        assert masked.keep.tolist() == [[True, False], [True, True]]
        shown = reject_divergent(*inputs, ones(2, 2), kind=kind, level=level, limit=0.0)
        assert shown.divergence.isnan().tolist() == [[level != "token", True], [False, False]]
        assert shown.keep.tolist() == [[level != "token", True], [False, False]]


def both(old: Tensor, rollout: Tensor, mask: Tensor, **where: Tensor) -> list[ImportanceWeights | Rejection]:
    return [
        *(
            importance_weights(old, rollout, mask, level=x, clamp=(0.5, 1.5), reject=(0.3, 2.0), **where)
            for x in LEVELS
        ),
        *(
            reject_divergent(old, rollout, mask, kind=kind, level=level, limit=0.2, **where)
            for kind in KINDS
            for level in SPANS
        ),
    ]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and a mask of ragged sequences, some empty, some fully masked; where they are; cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(7, 6, dtype=torch.float64, generator=generator)
    rollout = old + 0.5 * torch.randn(7, 6, dtype=torch.float64, generator=generator)
    lengths = torch.randint(0, 7, (7,), generator=generator)
    there = torch.arange(6) < lengths.unsqueeze(-1)
    mask = there & (torch.rand(7, 6, generator=generator) > 0.3)
    mask[int(torch.randint(0, 7, (), generator=generator))] = False
    return old, rollout.clamp(max=0.0), mask, there, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


@pytest.mark.parametrize("seed", range(5))
def test_packed_permuted_and_split_batches_give_the_same(seed: int) -> None:
    old, rollout, mask, there, cu_seqlens = batch(seed)
    expected = both(old, rollout, mask)
    packed = both(old[there], rollout[there], mask[there], cu_seqlens=cu_seqlens)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    permuted = both(old[order], rollout[order], mask[order])
    parts = [both(old[i : i + 1], rollout[i : i + 1], mask[i : i + 1]) for i in range(7)]
    for i, result in enumerate(expected):
        for j, x in enumerate(result):
            torch.testing.assert_close(packed[i][j], x[there])
            assert torch.equal(permuted[i][j], x[order])
            assert torch.equal(torch.cat([part[i][j] for part in parts]), x)


def test_a_batch_of_nothing_but_masked_slots() -> None:
    nothing = torch.full((2, 3), math.nan)
    for result in both(nothing, nothing, ~ones(2, 3)):
        if isinstance(result, ImportanceWeights):
            assert not result.weights.any()
            assert not result.keep.any()
        else:
            assert not result.divergence.any()
            assert not result.keep.any()
    for shape in ((0, 4), (3, 0)):
        assert all(result[0].shape == shape for result in both(torch.zeros(shape), torch.zeros(shape), ones(*shape)))


def test_by_token_any_shape_will_do() -> None:
    old, rollout = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(4))
    result = importance_weights(old, rollout, ones(2, 3, 4), level="token", clamp=(0.0, 2.0))
    flat = importance_weights(old.flatten(), rollout.flatten(), ones(24), level="token", clamp=(0.0, 2.0))
    assert torch.equal(result.weights.flatten(), flat.weights)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    low=st.floats(0.0, 1.0),
    high=st.floats(1.0, 5.0),
    shift=st.floats(-3.0, 3.0),
)
def test_properties(seed: int, level: CorrectionLevel, low: float, high: float, shift: float) -> None:
    old, rollout, mask, _, _ = batch(seed)
    raw = importance_weights(old, rollout, mask, level=level)
    clamped = importance_weights(old, rollout, mask, level=level, clamp=(low, high))
    rejected = importance_weights(old, rollout, mask, level=level, reject=(low, high))
    assert ((clamped.weights >= low) & (clamped.weights <= high))[mask].all()
    assert torch.equal(clamped.weights[mask & ~clamped.clamped], raw.weights[mask & ~clamped.clamped])
    assert torch.equal(rejected.weights, torch.where(rejected.keep, raw.weights, 0.0))
    assert not (rejected.keep & ~mask).any()
    # what the clamp changes is what lies outside, which is what is rejected
    assert torch.equal(mask & ~rejected.keep, clamped.clamped)
    # the other way round the weights are the inverse
    swapped = importance_weights(rollout, old, mask, level=level)
    torch.testing.assert_close((swapped.weights * raw.weights)[mask], torch.ones(int(mask.sum()), dtype=torch.float64))
    moved = importance_weights(old + shift, rollout + shift, mask, level=level)
    torch.testing.assert_close(moved.weights, raw.weights)
    if level != "token":
        counts = mask.sum(-1, keepdim=True)
        assert torch.equal(rejected.keep, mask & (rejected.keep.sum(-1, keepdim=True) == counts))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), limit=st.floats(0.0, 2.0))
def test_properties_of_rejection(seed: int, kind: DivergenceKind, limit: float) -> None:
    old, rollout, mask, _, _ = batch(seed)
    by = {x: reject_divergent(old, rollout, mask, kind=kind, level=x, limit=limit) for x in SPANS}
    for result in by.values():
        assert (result.divergence >= -1e-12).all()
        assert torch.equal(result.keep, mask & (result.divergence <= limit))
    ascending = [by[x].divergence for x in ("sequence_mean", "sequence_max", "sequence_sum")]
    assert (ascending[0] <= ascending[1] + 1e-12).all()
    assert (ascending[1] <= ascending[2] + 1e-12).all()
    if kind != "k3":
        swapped = reject_divergent(rollout, old, mask, kind=kind, level="token", limit=limit)
        torch.testing.assert_close(swapped.divergence, by["token"].divergence)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "batch"}, r"level='batch'.*token, sequence, geometric"),
        ({"clamp": (-0.1, 2.0)}, r"clamp=\(-0\.1, 2\.0\) must"),
        ({"clamp": (0.0, math.nan)}, r"clamp=\(0\.0, nan\) must"),
        ({"reject": (2.0, 0.5)}, r"reject=\(2\.0, 0\.5\) must"),
        ({"old_logprobs": torch.zeros(2, 3)}, r"old_logprobs has shape \(2, 3\)"),
        ({"mask": torch.ones(2, 2)}, r"mask has dtype torch\.float32"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "every per-token tensor is packed"),
    ],
)
def test_bad_input_of_weights_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "old_logprobs": torch.zeros(2, 2),
        "rollout_logprobs": torch.zeros(2, 2),
        "mask": ones(2, 2),
        "level": "token",
    }
    with pytest.raises(ValueError, match=message):
        importance_weights(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "k1"}, r"kind='k1'.*k2, k3, binary_kl"),
        ({"level": "sequence"}, r"level='sequence'.*token, sequence_sum, sequence_mean, sequence_max"),
        ({"limit": -0.1}, r"limit=-0\.1"),
        ({"limit": math.nan}, "limit=nan"),
        ({"rollout_logprobs": torch.zeros(4)}, r"rollout_logprobs has shape \(4,\)"),
        ({"mask": ones(4), "old_logprobs": torch.zeros(4), "rollout_logprobs": torch.zeros(4)}, "pass .B, T."),
    ],
)
def test_bad_input_of_rejection_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "old_logprobs": torch.zeros(2, 2),
        "rollout_logprobs": torch.zeros(2, 2),
        "mask": ones(2, 2),
        "kind": "k3",
        "level": "sequence_mean",
        "limit": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        reject_divergent(**(arguments | change))  # type: ignore[arg-type]


def test_value_checks_name_the_token() -> None:
    rollout = torch.zeros(2, 2)
    rollout[1, 0] = -math.inf
    with value_checks(), pytest.raises(ValueError, match="rollout_logprobs is -inf at token 0 of sequence 1"):
        importance_weights(torch.zeros(2, 2), rollout, ones(2, 2), level="sequence")


def test_half_precision_is_computed_in_float32() -> None:
    x = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert importance_weights(x, x, ones(2, 2), level="geometric").weights.dtype is torch.float32


@pytest.mark.parametrize("packed", [False, True])
def test_they_compile_whole(packed: bool) -> None:
    def everything(old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
        first = importance_weights(old, rollout, mask, level="geometric", reject=(0.5, 2.0), cu_seqlens=cu_seqlens)
        second = importance_weights(old, rollout, first.keep, level="token", clamp=(0.5, 1.5), cu_seqlens=cu_seqlens)
        third = reject_divergent(
            old, rollout, mask, kind="binary_kl", level="sequence_max", limit=0.2, cu_seqlens=cu_seqlens
        )
        return [*first, *second, *third]

    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in (0, 1):
        old, rollout, mask, there, cu_seqlens = batch(seed)
        inputs = (old[there], rollout[there], mask[there], cu_seqlens) if packed else (old, rollout, mask, None)
        torch.testing.assert_close(compiled(*inputs), everything(*inputs))


def test_a_divergence_beyond_any_float_is_rejected() -> None:
    old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1e9, -2.0]])
    result = reject_divergent(old, rollout, torch.tensor([[True, True]]), kind="k3", level="token", limit=1.0)
    assert result.keep.tolist() == [[False, True]]
    assert (result.divergence >= 0).all()


@pytest.mark.parametrize("bounds", [2.0, (1.0,), (0.0, 1.0, 2.0)])
def test_bounds_are_a_pair(bounds: object) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"must be \(low, high\), for instance"):
        importance_weights(x, x, torch.ones(1, 2, dtype=torch.bool), level="token", clamp=bounds)  # type: ignore[arg-type]


def test_bounds_are_kept_themselves() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert importance_weights(x, x, mask, level="token", reject=(1.0, 2.0)).keep.all()
    assert importance_weights(x, x, mask, level="token", reject=(0.5, 1.0)).keep.all()
