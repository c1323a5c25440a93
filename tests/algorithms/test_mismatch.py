import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drivetrain_algorithms import (
    CorrectionLevel,
    Mismatch,
    Reduce,
    effective_sample_size,
    importance_weights,
    kl_estimate,
    mismatch_metrics,
    value_checks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2 = math.log(2.0)
LEVELS: list[CorrectionLevel] = ["token", "sequence", "geometric"]

# π_rollout and π_old of two sequences, with ratios (2, 1) and 1/2
ROLLOUT = torch.tensor([[0.25, 0.5], [0.5, math.nan]], dtype=torch.float64)
OLD = torch.tensor([[0.5, 0.5], [0.25, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def test_mismatch_by_hand() -> None:
    result = mismatch_metrics(OLD.log(), ROLLOUT.log(), MASK)
    expected = Mismatch(
        k1=torch.tensor((-LOG2 + 0.0 + LOG2) / 3),
        k3=torch.tensor(((2 - 1 - LOG2) + 0.0 + (0.5 - 1 + LOG2)) / 3),
        chi_squared_token=torch.tensor((4 + 1 + 0.25) / 3 - 1),
        chi_squared_sequence=torch.tensor((4 + 0.25) / 2 - 1),
        abs_mean=torch.tensor(2 * LOG2 / 3),
        abs_max=torch.tensor(LOG2),
        probability_abs_mean=torch.tensor(0.5 / 3),
        probability_abs_max=torch.tensor(0.25),
        # deviations (1, 1, -2) / 12 and (-2, 1, 1) / 12
        correlation=torch.tensor((-2 + 1 - 2) / 6),
    )
    for name, value, wanted in zip(Mismatch._fields, result, expected, strict=True):
        assert value.item() == pytest.approx(wanted.item(), abs=1e-7), name
        assert value.dtype is torch.float64, name


def test_equal_policies_do_not_differ() -> None:
    x = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    *differences, correlation = mismatch_metrics(x, x, ones(3, 5))
    assert [x.item() for x in differences] == [0.0] * 8
    assert correlation.item() == pytest.approx(1.0)


def test_in_expectation_k1_and_k3_are_the_divergence_and_chi_squared_the_variance() -> None:
    # a batch that holds each of two actions as often as the engine samples it: 3/4 and 1/4
    engine, learner = torch.tensor([0.75] * 3 + [0.25]).double(), torch.tensor([0.5] * 4).double()
    result = mismatch_metrics(learner.log().unsqueeze(-1), engine.log().unsqueeze(-1), ones(4, 1))
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert result.k1.item() == pytest.approx(kl)
    assert result.k3.item() == pytest.approx(kl)
    chi_squared = 0.25**2 / 0.75 + 0.25**2 / 0.25
    assert result.chi_squared_token.item() == pytest.approx(chi_squared)
    assert result.chi_squared_sequence.item() == pytest.approx(chi_squared)


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([[3.0, 1.0], [0.0, math.nan]])
    assert effective_sample_size(weights, MASK, level="token").item() == pytest.approx(4**2 / (3 * 10))
    # by sequence the weights are their means, 2 and 0
    for level in ("sequence", "geometric"):
        assert effective_sample_size(weights, MASK, level=level).item() == pytest.approx(0.5)
    assert effective_sample_size(weights, MASK & (weights > 0), level="token").item() == pytest.approx(4**2 / (2 * 10))


def test_effective_sample_size_without_samples() -> None:
    for level in LEVELS:
        assert effective_sample_size(torch.zeros(2, 2), MASK, level=level).item() == 0.0
        assert effective_sample_size(torch.ones(2, 2), ~ones(2, 2), level=level).isnan()
        assert effective_sample_size(torch.full((2, 2), 0.3), MASK, level=level).item() == pytest.approx(1.0)


def test_no_token_gives_zero() -> None:
    nothing = torch.full((2, 2), math.nan)
    *differences, correlation = mismatch_metrics(nothing, nothing, ~ones(2, 2))
    assert [x.item() for x in differences] == [0.0] * 8
    assert correlation.isnan()
    *differences, _ = mismatch_metrics(torch.zeros(0, 3), torch.zeros(0, 3), ones(0, 3))
    assert [x.item() for x in differences] == [0.0] * 8


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_slots_change_nothing_and_unmasked_ones_show(garbage: float) -> None:
    clean = mismatch_metrics(OLD.log().nan_to_num(), ROLLOUT.log().nan_to_num(), MASK)
    for position in range(2):
        inputs = [OLD.log().nan_to_num(), ROLLOUT.log().nan_to_num()]
        inputs[position][1, 1] = garbage
        assert [x.item() for x in mismatch_metrics(*inputs, MASK)] == [x.item() for x in clean]
        shown = mismatch_metrics(*inputs, ones(2, 2))
        assert not any(
            x.isfinite() for x in (shown.k1, shown.k3, shown.chi_squared_token, shown.abs_mean, shown.abs_max)
        )
    weights = torch.tensor([[3.0, 1.0], [0.0, garbage]])
    assert effective_sample_size(weights, ones(2, 2), level="token").isnan()


def test_a_weight_beyond_any_float_stays_finite() -> None:
    result = mismatch_metrics(torch.zeros(1, 3), torch.full((1, 3), -500.0), ones(1, 3))
    assert all(x.isfinite() for x in result[:-1])
    assert result.chi_squared_sequence.item() == pytest.approx(math.exp(40.0) - 1)


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


def metrics(old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    weights = importance_weights(old, rollout, mask, level="sequence", clamp=(0.0, 2.0), cu_seqlens=cu_seqlens).weights
    sizes = [effective_sample_size(weights, mask, level=level, cu_seqlens=cu_seqlens) for level in LEVELS]
    return torch.stack((*mismatch_metrics(old, rollout, mask, cu_seqlens=cu_seqlens), *sizes))


@pytest.mark.parametrize("seed", range(5))
def test_packed_and_permuted_batches_give_the_same(seed: int) -> None:
    old, rollout, mask, there, cu_seqlens = batch(seed)
    expected = metrics(old, rollout, mask)
    torch.testing.assert_close(metrics(old[there], rollout[there], mask[there], cu_seqlens), expected, equal_nan=True)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(metrics(old[order], rollout[order], mask[order]), expected, equal_nan=True)


def over_two_ranks(run: Callable[[int, Reduce, Reduce], Tensor]) -> list[Tensor]:
    """Both ranks' results, in two threads that meet at each reduction."""
    sent: list[Tensor] = [torch.zeros(0)] * 2
    barrier = threading.Barrier(2, timeout=30)

    def reduction(rank: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Reduce:
        def reduce(x: Tensor) -> Tensor:
            sent[rank] = x
            barrier.wait()
            result = combine(*sent)
            barrier.wait()
            return result

        return reduce

    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda rank: run(rank, reduction(rank, torch.add), reduction(rank, torch.maximum)), range(2))
        )


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_two_ranks_give_the_numbers_of_one(cut: int) -> None:
    old, rollout, mask, _, _ = batch(11)
    rows = (slice(0, cut), slice(cut, 7))

    def run(rank: int, reduce: Reduce, reduce_max: Reduce) -> Tensor:
        mine = rows[rank]
        weights = importance_weights(old[mine], rollout[mine], mask[mine], level="sequence", clamp=(0.0, 2.0)).weights
        difference = mismatch_metrics(old[mine], rollout[mine], mask[mine], reduce=reduce, reduce_max=reduce_max)
        sizes = [effective_sample_size(weights, mask[mine], level=level, reduce=reduce) for level in LEVELS]
        return torch.stack((*difference, *sizes))

    for result in over_two_ranks(run):
        torch.testing.assert_close(result, metrics(old, rollout, mask))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3), level=st.sampled_from(LEVELS))
def test_properties(seed: int, scale: float, level: CorrectionLevel) -> None:
    old, rollout, mask, _, _ = batch(seed)
    result = mismatch_metrics(old, rollout, mask)
    assert result.k3 >= 0
    assert result.abs_max >= result.abs_mean >= result.k1.abs()
    assert result.probability_abs_max >= result.probability_abs_mean
    assert result.correlation.isnan() or result.correlation.abs() <= 1 + 1e-9
    number = max(int(mask.sum()), 1)
    k3 = kl_estimate(rollout, old, mask, kind="k3").sum() / number
    assert result.k3.item() == pytest.approx(k3.item(), abs=1e-12)
    swapped = mismatch_metrics(rollout, old, mask)
    assert swapped.k1.item() == pytest.approx(-result.k1.item())
    assert swapped.abs_mean.item() == pytest.approx(result.abs_mean.item())

    weights = importance_weights(old, rollout, mask, level=level).weights
    size = effective_sample_size(weights, mask, level=level)
    if mask.any():
        samples = int(mask.sum()) if level == "token" else int(mask.any(-1).sum())
        assert 1 / samples - 1e-9 <= size.item() <= 1 + 1e-9
        scaled = effective_sample_size(scale * weights, mask, level=level)
        assert scaled.item() == pytest.approx(size.item())
    else:
        assert size.isnan()


def test_bad_input_is_named() -> None:
    x, mask = torch.zeros(2, 2), ones(2, 2)
    with pytest.raises(ValueError, match="reduce_max is missing"):
        mismatch_metrics(x, x, mask, reduce=lambda x: x)
    with pytest.raises(ValueError, match="reduce is missing"):
        mismatch_metrics(x, x, mask, reduce_max=lambda x: x)
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(3, 2\)"):
        mismatch_metrics(x, torch.zeros(3, 2), mask)
    with pytest.raises(ValueError, match=r"mask has shape \(4,\)"):
        mismatch_metrics(torch.zeros(4), torch.zeros(4), ones(4))
    with pytest.raises(ValueError, match=r"level='batch'.*token, sequence, geometric"):
        effective_sample_size(x, mask, level="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights has shape \(3, 2\)"):
        effective_sample_size(torch.zeros(3, 2), mask, level="sequence")
    with value_checks(), pytest.raises(ValueError, match="old_logprobs is nan"):
        mismatch_metrics(torch.full((2, 2), math.nan), x, mask)


def test_nothing_carries_a_gradient() -> None:
    x = torch.zeros(2, 2, requires_grad=True)
    assert not any(value.requires_grad for value in mismatch_metrics(x, x - 1.0, ones(2, 2)))
    assert not effective_sample_size(x, ones(2, 2), level="token").requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_they_compile_whole(packed: bool) -> None:
    compiled = torch.compile(metrics, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in (0, 1):
        old, rollout, mask, there, cu_seqlens = batch(seed)
        inputs = (old[there], rollout[there], mask[there], cu_seqlens) if packed else (old, rollout, mask, None)
        torch.testing.assert_close(compiled(*inputs), metrics(*inputs), equal_nan=True)


def test_a_policy_that_is_the_same_everywhere_has_no_correlation() -> None:
    mask = torch.ones(1, 7, dtype=torch.bool)
    constant = torch.full((1, 7), 0.1).log()
    other = torch.rand(1, 7, generator=torch.Generator().manual_seed(0)).log()
    assert mismatch_metrics(constant, other, mask).correlation.isnan()
    assert mismatch_metrics(constant, constant, mask).correlation.isnan()
    assert -1.0 <= mismatch_metrics(other, other, mask).correlation.item() <= 1.0


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_what_is_not_finite_shows_in_every_number(bad: float) -> None:
    old, rollout = torch.tensor([[bad, -1.0, -3.0]]), torch.tensor([[-1.0, -2.0, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert torch.stack(mismatch_metrics(old, rollout, mask)).isnan().all()
    assert torch.stack(mismatch_metrics(rollout, old, mask)).isnan().all()


def test_k3_is_never_negative() -> None:
    old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1e9, -2.0]])
    assert mismatch_metrics(old, rollout, torch.tensor([[True, True]])).k3.item() > 0
