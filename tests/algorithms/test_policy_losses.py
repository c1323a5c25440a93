"""What holds for every policy loss, whatever its formula."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import drivetrain_algorithms
import pytest
import torch
from drivetrain_algorithms import (
    AggregationMode,
    PolicyLoss,
    aggregate,
    cispo,
    clip_cov,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    kl_cov,
    loss_denominator,
    ppo_clip,
    reinforce,
    sapo,
    value_checks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Loss = Callable[..., PolicyLoss]


def with_advantages_selected(loss: Loss, *, above: float, **keywords: float) -> Loss:
    """`clip_cov` or `kl_cov`, whose selection here is a function of the token alone, so that it can be split too."""

    def function(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
    ) -> PolicyLoss:
        return loss(logprobs, old_logprobs, advantages, mask, selected=advantages > above, **keywords)

    return function


def of_tokens(loss: Loss, **keywords: float) -> Loss:
    return lambda a, b, c, mask, cu_seqlens=None: loss(a, b, c, mask, **keywords)


def of_sequences(loss: Loss, **keywords: float) -> Loss:
    return lambda a, b, c, mask, cu_seqlens=None: loss(a, b, c, mask, cu_seqlens=cu_seqlens, **keywords)


def decoupled(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
) -> PolicyLoss:
    """The sampler's policy lies half as far again from the proximal one as that from the trained one."""
    return decoupled_ppo(
        logprobs,
        old_logprobs,
        1.5 * old_logprobs - 0.5 * logprobs.detach(),
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        clamp=(0.0, 2.0),
        reject=(0.0, 4.0),
    )


LOSSES: dict[str, Loss] = {
    "ppo_clip": of_tokens(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "decoupled_ppo": decoupled,
    "reinforce": of_tokens(reinforce),
    "gspo": of_sequences(gspo, clip_low=0.1, clip_high=0.1, dual_clip=3.0),
    "gmpo": of_sequences(gmpo, clip_low=0.4, clip_high=0.4),
    "cispo": of_tokens(cispo, clip_low=0.5, clip_high=1.0),
    "sapo": of_tokens(sapo),
    "clip_cov": with_advantages_selected(clip_cov, above=1.0, clip_low=0.2, clip_high=0.28),
    "kl_cov": with_advantages_selected(kl_cov, above=1.0, kl_coef=0.5),
    "dppo_tv": of_tokens(dppo_tv, clip_low=0.1, clip_high=0.1, ratio_clamp=20.0),
    "dppo_kl": of_tokens(dppo_kl, clip_low=0.05, clip_high=0.05, ratio_clamp=20.0),
}
OF_SEQUENCES = ("gspo", "gmpo")

every_loss = pytest.mark.parametrize("name", LOSSES)


class Batch(NamedTuple):
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


def random_batch(num_sequences: int, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    uniform, change, advantages = torch.randn(3, num_sequences, length, dtype=dtype, generator=generator)
    old_logprobs = -uniform.abs() - 0.01
    logprobs = (old_logprobs + 0.5 * change).clamp(max=-0.01)
    mask = torch.rand(num_sequences, length, generator=generator) > 0.3
    return Batch(logprobs, old_logprobs, advantages, mask)


def with_gradient(loss: Loss, batch: Batch, cu_seqlens: Tensor | None = None) -> tuple[PolicyLoss, Tensor]:
    logprobs = batch.logprobs.clone().requires_grad_()
    result = loss(logprobs, *batch[1:], cu_seqlens=cu_seqlens)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result, gradient


def test_no_policy_loss_is_missing_here() -> None:
    losses = {
        name
        for name in drivetrain_algorithms.__all__
        if getattr(getattr(drivetrain_algorithms, name), "__annotations__", {}).get("return") == "PolicyLoss"
    }
    assert losses == set(LOSSES)


@every_loss
def test_before_the_first_update_the_gradient_is_that_of_reinforce(name: str) -> None:
    batch = random_batch(5, 9)
    result, gradient = with_gradient(LOSSES[name], batch._replace(old_logprobs=batch.logprobs))
    expected = torch.where(batch.mask, -batch.advantages, 0.0)
    if name == "clip_cov":
        expected = torch.where(batch.advantages > 1.0, 0.0, expected)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert result.ratio.eq(1).all()
    assert result.log_ratio.eq(0).all()
    assert result.approx_kl.eq(0).all()


@every_loss
def test_the_metrics_are_of_the_token_in_every_loss(name: str) -> None:
    batch = random_batch(5, 9)
    result = LOSSES[name](*batch)
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    torch.testing.assert_close(result.log_ratio, log_ratio)
    torch.testing.assert_close(result.ratio, log_ratio.exp())
    torch.testing.assert_close(result.approx_kl, log_ratio.exp() - 1 - log_ratio)
    assert result.clipped.dtype is torch.bool
    assert not result.clipped[~batch.mask].any()
    assert result.clipped.any() == (name not in ("reinforce", "sapo"))


@every_loss
@pytest.mark.parametrize("garbage", [-1000.0, math.nan, -math.inf, math.inf])
def test_masked_slots_may_hold_anything(name: str, garbage: float) -> None:
    batch = random_batch(4, 6)
    clean, gradient = with_gradient(LOSSES[name], batch)
    for position in range(3):
        dirty = list(batch)
        dirty[position] = torch.where(batch.mask, dirty[position], garbage)
        result, dirty_gradient = with_gradient(LOSSES[name], Batch(*dirty))
        assert all(torch.equal(a, b) for a, b in zip(result, clean, strict=True))
        assert torch.equal(dirty_gradient, gradient)
    assert gradient[~batch.mask].eq(0).all()
    assert clean.loss[~batch.mask].eq(0).all()


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_not_finite_in_an_unmasked_slot_shows(name: str, bad: float, argument: str) -> None:
    batch = random_batch(3, 4)
    batch.mask[:, :2] = True
    batch.mask[2, 3] = False
    getattr(batch, argument)[1, 1] = bad
    result, gradient = with_gradient(LOSSES[name], batch)
    if (name, argument) == ("reinforce", "old_logprobs"):  # it enters the metrics alone
        assert not result.approx_kl[1, 1].isfinite()
        assert result.loss.isfinite().all()
        return
    if name == "clip_cov" and argument == "advantages" and bad == math.inf:
        assert result.loss[1, 1].isnan()  # selected, and yet not hidden
    assert not result.loss[1, 1].isfinite()
    if argument != "logprobs" or name != "reinforce":
        assert not gradient[1, 1].isfinite()
    # Nothing of it in another sequence, nor at a masked slot.
    assert result.loss[[0, 2]].isfinite().all()
    assert gradient[[0, 2]].isfinite().all()
    assert gradient[~batch.mask].eq(0).all()
    assert result.loss[~batch.mask].eq(0).all()


@every_loss
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("old_logprob", [-1000.0, 1000.0])
def test_a_ratio_beyond_any_float_stays_finite(name: str, advantage: float, old_logprob: float) -> None:
    batch = Batch(
        torch.full((1, 2), -0.5), torch.full((1, 2), -0.5), torch.full((1, 2), advantage), torch.ones(1, 2).bool()
    )
    batch.old_logprobs[0, 0] = old_logprob
    result, gradient = with_gradient(LOSSES[name], batch)
    assert result.loss.isfinite().all()
    assert gradient.isfinite().all()
    assert result.ratio[0, 0].item() == pytest.approx(math.exp(min(-0.5 - old_logprob, 20.0)))
    if advantage == 0.0:
        assert gradient.eq(0).all()


@every_loss
def test_a_batch_that_is_masked_whole_gives_zero(name: str) -> None:
    batch = random_batch(3, 4)._replace(mask=torch.zeros(3, 4, dtype=torch.bool))
    logprobs = torch.full((3, 4), math.nan, requires_grad=True)
    result = LOSSES[name](logprobs, *batch[1:])
    denominator = loss_denominator(batch.mask, mode="token_mean")
    loss = aggregate(result.loss, batch.mask, mode="token_mean", denominator=denominator)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.eq(0).all()


@every_loss
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_micro_batches_sum_to_the_whole(name: str, mode: AggregationMode) -> None:
    batch = random_batch(7, 5)
    batch.mask[3] = False
    norm_length = 5 if mode == "seq_mean_token_sum_norm" else None
    denominator = loss_denominator(batch.mask, mode=mode, norm_length=norm_length)

    def step(bounds: list[int]) -> tuple[float, Tensor]:
        logprobs = batch.logprobs.clone().requires_grad_()
        total = 0.0
        for start, stop in itertools.pairwise(bounds):
            part = Batch(*(x[start:stop] for x in batch))
            result = LOSSES[name](logprobs[start:stop], *part[1:])
            loss = aggregate(result.loss, part.mask, mode=mode, denominator=denominator)
            loss.backward()
            total += loss.item()
        assert logprobs.grad is not None
        return total, logprobs.grad

    whole, gradient = step([0, 7])
    for bounds in ([0, 1, 7], [0, 3, 4, 4, 7], list(range(8))):
        total, split_gradient = step(bounds)
        assert total == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-12)


@every_loss
def test_packed_equals_padded_in_any_order(name: str) -> None:
    lengths = torch.tensor([5, 0, 1, 8, 4, 3])
    batch = random_batch(6, 8)
    batch.mask[4] = False
    batch.mask[3] = True
    inside = torch.arange(8) < lengths.unsqueeze(-1)
    padded, gradient = with_gradient(LOSSES[name], batch._replace(mask=batch.mask & inside))
    for order in ([0, 1, 2, 3, 4, 5], [4, 3, 1, 5, 0, 2]):
        kept = inside[order]
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths[order])).cumsum(0).int()
        packed, packed_gradient = with_gradient(LOSSES[name], Batch(*(x[order][kept] for x in batch)), cu_seqlens)
        for one, other in zip(packed, padded, strict=True):
            torch.testing.assert_close(one, other[order][kept], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(packed_gradient, gradient[order][kept], rtol=1e-12, atol=1e-12)


@every_loss
def test_padding_changes_nothing(name: str) -> None:
    batch = random_batch(4, 6)
    plain, gradient = with_gradient(LOSSES[name], batch)
    widened = Batch(
        *(torch.nn.functional.pad(x, (2, 3), value=math.nan) for x in batch[:3]),
        torch.nn.functional.pad(batch.mask, (2, 3)),
    )
    result, wide_gradient = with_gradient(LOSSES[name], widened)
    for one, other in zip(result, plain, strict=True):
        torch.testing.assert_close(one[:, 2:8], other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide_gradient[:, 2:8], gradient, rtol=1e-12, atol=1e-12)


@every_loss
def test_only_the_loss_has_a_gradient_and_only_to_the_logprobs(name: str) -> None:
    batch = random_batch(3, 4)
    tensors = [x.clone().requires_grad_() for x in batch[:3]]
    result = LOSSES[name](*tensors, batch.mask)
    assert [x.requires_grad for x in result] == [True, False, False, False, False]
    result.loss.sum().backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None


@every_loss
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_arithmetic_runs_in_float32_or_float64(name: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    logprobs, old_logprobs, advantages, mask = random_batch(3, 4)
    result = LOSSES[name](logprobs.to(dtype), old_logprobs.to(dtype), advantages.to(dtype), mask)
    assert {x.dtype for x in (result.loss, result.ratio, result.log_ratio, result.approx_kl)} == {expected}


@every_loss
def test_float32_gives_the_numbers_of_float64(name: str) -> None:
    batch = random_batch(6, 50)
    result, gradient = with_gradient(LOSSES[name], batch)
    single, single_gradient = with_gradient(LOSSES[name], Batch(*(x.float() for x in batch[:3]), batch.mask))
    torch.testing.assert_close(single.loss, result.loss.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single_gradient, gradient.float(), rtol=1e-4, atol=1e-5)


@every_loss
def test_what_does_not_fit_is_named(name: str) -> None:
    batch = random_batch(3, 4)
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64"):
        LOSSES[name](*batch[:3], batch.mask.long())
    with pytest.raises(ValueError, match=r"advantages has shape \(3, 1\) and mask \(3, 4\)"):
        LOSSES[name](batch.logprobs, batch.old_logprobs, batch.advantages[:, :1], batch.mask)
    if name in OF_SEQUENCES:
        flat = Batch(*(x.flatten() for x in batch))
        with pytest.raises(ValueError, match=r"packed \[N\] together with cu_seqlens"):
            LOSSES[name](*flat)
        with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 11"):
            LOSSES[name](*flat, cu_seqlens=torch.tensor([0, 5, 11]))


@every_loss
def test_value_checks_name_the_place_of_a_nan(name: str) -> None:
    batch = random_batch(3, 4)
    batch.mask[1, 2] = True
    batch.advantages[1, 2] = math.nan
    with value_checks(), pytest.raises(ValueError, match="advantages is nan at token 2 of sequence 1"):
        LOSSES[name](*batch)


@pytest.mark.parametrize(
    ("name", "packed"), [(name, False) for name in LOSSES] + [(name, True) for name in OF_SEQUENCES]
)
def test_compiles_without_a_graph_break(name: str, packed: bool) -> None:
    batch, cu_seqlens = random_batch(4, 6), None
    if packed:
        batch, cu_seqlens = Batch(*(x.flatten() for x in batch)), torch.tensor([0, 5, 5, 24])
    torch.compiler.reset()
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    result, gradient = with_gradient(LOSSES[name], batch, cu_seqlens)
    compiled_result, compiled_gradient = with_gradient(compiled, batch, cu_seqlens)
    for one, other in zip(compiled_result, result, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(compiled_gradient, gradient)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_loss
@pytest.mark.parametrize("packed", [False, True])
def test_an_accelerator_gives_the_numbers_of_the_cpu_and_is_not_waited_for(name: str, packed: bool) -> None:
    batch, cu_seqlens = random_batch(4, 6), None
    if packed:
        batch, cu_seqlens = Batch(*(x.flatten() for x in batch)), torch.tensor([0, 5, 5, 24])
    expected, expected_gradient = with_gradient(LOSSES[name], batch, cu_seqlens)
    there = Batch(*(x.cuda() for x in batch))
    bounds = None if cu_seqlens is None else cu_seqlens.cuda()
    with_gradient(LOSSES[name], there, bounds)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        result, gradient = with_gradient(LOSSES[name], there, bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip((*result, gradient), (*expected, expected_gradient), strict=True):
        torch.testing.assert_close(one.cpu(), other)


LOGPROB = st.floats(-1000.0, -0.0, width=32) | st.floats(-2.0, -0.0, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-100.0, 100.0, width=32), st.booleans()), max_size=12)


@every_loss
@settings(deadline=None, max_examples=50, derandomize=True)
@given(tokens=TOKENS)
def test_a_token_is_never_pushed_against_its_advantage(
    name: str, tokens: list[tuple[float, float, float, bool]]
) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(1, -1, 4)
    batch = Batch(*(columns[..., i].contiguous() for i in range(3)), columns[..., 3].bool())
    result, gradient = with_gradient(LOSSES[name], batch)
    assert result.loss.isfinite().all()
    assert all(x.shape == batch.mask.shape for x in result)
    if name == "kl_cov":  # a penalty pulls back
        assert (gradient * batch.advantages)[~result.clipped].le(0).all()
    else:
        assert (gradient * batch.advantages).le(0).all()
    assert gradient[~batch.mask].eq(0).all()


@every_loss
@settings(deadline=None, max_examples=30, derandomize=True)
@given(tokens=TOKENS, scale=st.floats(0.125, 8.0))
def test_the_loss_is_proportional_to_the_advantages(
    name: str, tokens: list[tuple[float, float, float, bool]], scale: float
) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(1, -1, 4)
    batch = Batch(*(columns[..., i].contiguous() for i in range(3)), columns[..., 3].bool())
    loss = LOSSES[name]
    if name in ("clip_cov", "kl_cov"):
        keywords = {"clip_low": 0.2, "clip_high": 0.2} if name == "clip_cov" else {"kl_coef": 0.0}
        loss = with_advantages_selected(getattr(drivetrain_algorithms, name), above=math.inf, **keywords)
    once = loss(*batch).loss
    scaled = loss(*batch._replace(advantages=scale * batch.advantages)).loss
    torch.testing.assert_close(scaled, scale * once, rtol=1e-9, atol=1e-9)
