import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drivetrain_algorithms import (
    Reduce,
    aggregate,
    clip_cov,
    kl_cov,
    loss_denominator,
    ppo_clip,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2 = math.log(2.0)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def random_tokens(seed: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, those of before, advantages and mask, float64."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, change, advantages = torch.randn(3, 6, 8, dtype=torch.float64, generator=generator)
    mask = torch.rand(6, 8, generator=generator) > 0.3
    return logprobs.requires_grad_(), logprobs.detach() + 0.5 * change, advantages, mask


def on_ranks(function: Callable[[int, Reduce], Tensor], ranks: int) -> list[Tensor]:
    """The results of each of the ranks, which run side by side and sum what they reduce."""
    barrier = threading.Barrier(ranks, timeout=30)
    posted: list[Tensor] = [torch.empty(0)] * ranks

    def run(rank: int) -> Tensor:
        def reduce(x: Tensor) -> Tensor:
            posted[rank] = x.clone()
            barrier.wait()
            total = torch.stack(posted).sum(0)
            barrier.wait()
            return total

        return function(rank, reduce)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def test_covariances_by_hand() -> None:
    # Means -2 and 1 over the unmasked tokens: (1, 0, -1) times (1, -1, 0).
    logprobs = torch.tensor([[-1.0, math.nan, -2.0, -3.0]])
    advantages = torch.tensor([[2.0, math.inf, 0.0, 1.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert token_covariances(logprobs, advantages, mask).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_covariances_sum_to_n_times_the_covariance() -> None:
    logprobs, _, advantages, mask = random_tokens()
    expected = torch.cov(torch.stack((logprobs.detach()[mask], advantages[mask])), correction=0)[0, 1]
    covariances = token_covariances(logprobs, advantages, mask)
    torch.testing.assert_close(covariances.sum() / mask.sum(), expected, rtol=1e-12, atol=1e-12)
    assert not covariances.requires_grad
    torch.testing.assert_close(token_covariances(advantages, logprobs, mask), covariances)  # symmetric
    torch.testing.assert_close(token_covariances(logprobs + 7.0, 2.0 * advantages - 3.0, mask), 2.0 * covariances)


def test_covariances_of_nothing_and_of_equals_are_zero_and_nan_shows() -> None:
    logprobs, _, advantages, mask = random_tokens()
    assert token_covariances(logprobs, torch.full_like(advantages, 0.1), mask).eq(0).all()
    assert token_covariances(torch.full_like(advantages, -0.7), advantages, mask).eq(0).all()
    assert token_covariances(logprobs, advantages, torch.zeros_like(mask)).eq(0).all()
    advantages[mask.nonzero()[0].tolist()[0], mask.nonzero()[0].tolist()[1]] = math.nan
    covariances = token_covariances(logprobs, advantages, mask)
    assert covariances[mask].isnan().all()
    assert covariances[~mask].eq(0).all()
    assert not select_kl_cov(covariances, mask, fraction=0.5).any()


def test_kl_cov_selects_the_largest() -> None:
    covariances = torch.tensor([[3.0, 9.0, -1.0, 2.0], [5.0, math.nan, 4.0, 0.0]])
    mask = torch.tensor([[True, False, True, True], [True, False, True, True]])
    for fraction, expected in [  # of 6 tokens
        (0.0, []),
        (1e-9, [5.0]),  # at least one
        (0.49, [5.0, 4.0]),  # ⌊2.94⌋
        (0.5, [5.0, 4.0, 3.0]),
        (1.0, [5.0, 4.0, 3.0, 2.0, 0.0, -1.0]),
    ]:
        selected = select_kl_cov(covariances, mask, fraction=fraction)
        assert sorted(covariances[selected].tolist(), reverse=True) == expected
        assert not selected[~mask].any()


@pytest.mark.parametrize("fill", [0.0, -0.0, 3.5, -math.inf])
def test_equals_at_the_border_are_left_out(fill: float) -> None:
    covariances = torch.full((3, 4), fill)
    covariances[0, 1] *= -1.0 if fill == 0.0 else 1.0  # -0 equals 0
    assert not select_kl_cov(covariances, ones(3, 4), fraction=0.5).any()
    assert select_kl_cov(covariances, ones(3, 4), fraction=1.0).all()
    covariances[1, 1] = 4.0
    assert select_kl_cov(covariances, ones(3, 4), fraction=0.5).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("start", [1.0, -1.0, 0.0])
def test_the_border_is_found_between_neighbouring_floats(start: float) -> None:
    neighbours = [torch.tensor(start)]
    for _ in range(7):
        neighbours.append(torch.nextafter(neighbours[-1], torch.tensor(math.inf)))
    for count in range(1, 8):
        selected = select_kl_cov(torch.stack(neighbours), ones(8), fraction=count / 8)
        assert selected.tolist() == [False] * (8 - count) + [True] * count


def test_nan_is_never_selected() -> None:
    covariances = torch.tensor([1.0, math.nan, 3.0, math.inf])
    assert select_kl_cov(covariances, ones(4), fraction=0.5).tolist() == [False, False, True, True]
    assert select_kl_cov(covariances, ones(4), fraction=1.0).tolist() == [True, False, True, True]


def test_clip_cov_draws_among_those_between_the_bounds() -> None:
    covariances = torch.tensor([[0.5, 1.0, 1.1, 2.0, 4.9, 5.0, 6.0, 3.0, 3.0]])
    uniforms = torch.tensor([[0.9, 0.9, 0.1, 0.3, 0.2, 0.9, 0.9, 0.9, math.nan]])
    mask = torch.tensor([[True] * 8 + [False]])
    for fraction, expected in [(0.0, []), (0.01, [7]), (0.25, [3, 7]), (0.4, [3, 4, 7]), (1.0, [2, 3, 4, 7])]:
        selected = select_clip_cov(covariances, uniforms, mask, lower=1.0, upper=5.0, fraction=fraction)
        assert selected[0].nonzero().flatten().tolist() == expected  # ⌊8 fraction⌋ of 2, 3, 4, 7, and at least one
    assert not select_clip_cov(covariances, uniforms, mask, lower=7.0, upper=math.inf, fraction=1.0).any()


def test_clip_cov_draws_each_candidate_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    covariances = torch.arange(10.0).unsqueeze(0)
    counts = torch.zeros(10)
    for _ in range(500):
        uniforms = torch.rand(1, 10, generator=generator)
        selected = select_clip_cov(covariances, uniforms, ones(1, 10), lower=1.5, upper=7.5, fraction=0.2)
        assert selected.sum() == 2
        counts += selected[0]
    assert counts[:2].eq(0).all()
    assert counts[8:].eq(0).all()
    assert (counts[2:8] - 1000 / 6).abs().max() < 50  # four standard deviations


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    fraction=st.floats(0.0, 1.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_selection_is_that_of_sorting(values: list[float], fraction: float, dtype: torch.dtype) -> None:
    covariances = torch.tensor(values, dtype=dtype)
    count = max(1, int(fraction * len(values))) if fraction > 0 else 0
    border = sorted(values, reverse=True)[count] if count < len(values) else None
    expected = [border is None or value > border for value in values]
    assert select_kl_cov(covariances, ones(len(values)), fraction=fraction).tolist() == expected


@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.1, 0.37, 1.0])
def test_ranks_select_what_one_process_does(fraction: float) -> None:
    logprobs, _, advantages, mask = random_tokens()
    logprobs = logprobs.detach()
    mask[3:5] = False
    uniforms = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))
    rows = [[0, 1, 2], [3, 4], [5]]  # the second rank has no unmasked token

    def step(part: list[int] | slice, reduce: Reduce | None) -> Tensor:
        covariances = token_covariances(logprobs[part], advantages[part], mask[part], reduce=reduce)
        top = select_kl_cov(covariances, mask[part], fraction=fraction, reduce=reduce)
        drawn = select_clip_cov(
            covariances, uniforms[part], mask[part], lower=-0.5, upper=0.5, fraction=fraction, reduce=reduce
        )
        return torch.stack((covariances, top.double(), drawn.double()))

    together = step(slice(None), None)
    for part, result in zip(rows, on_ranks(lambda rank, reduce: step(rows[rank], reduce), 3), strict=True):
        torch.testing.assert_close(result, together[:, part], rtol=1e-12, atol=1e-12)


def test_packing_and_padding_do_not_change_the_selection() -> None:
    logprobs, _, advantages, mask = random_tokens()
    uniforms = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))

    def selections(*tensors: Tensor) -> Tensor:
        a, b, u, m = tensors
        covariances = token_covariances(a, b, m)
        drawn = select_clip_cov(covariances, u, m, lower=-0.5, upper=0.5, fraction=0.2)
        return torch.stack((select_kl_cov(covariances, m, fraction=0.2), drawn))

    padded = selections(logprobs, advantages, uniforms, mask)
    packed = selections(*(x[mask] for x in (logprobs, advantages, uniforms, mask)))
    assert torch.equal(packed, padded[:, mask])
    assert not padded[:, ~mask].any()
    assert (packed.sum(1) == int(0.2 * int(mask.sum()))).all()


def test_with_no_token_selected_they_are_ppo_and_the_plain_surrogate() -> None:
    tokens = random_tokens()
    nothing = torch.zeros_like(tokens[3])
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    pairs = [
        (clip_cov(*tokens, selected=nothing, **bounds), ppo_clip(*tokens, **bounds)),
        (kl_cov(*tokens, selected=nothing, kl_coef=1.0), ppo_clip(*tokens, clip_low=1.0, clip_high=math.inf)),
    ]
    for one, other in pairs:
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x, y)
        assert torch.equal(*(torch.autograd.grad(x.loss.sum(), tokens[0])[0] for x in (one, other)))


def test_clip_cov_by_hand() -> None:
    logprobs = torch.tensor([LOG2, LOG2, 0.0, 0.0], requires_grad=True)
    selected = torch.tensor([False, True, True, True])
    mask = torch.tensor([True, True, True, False])
    result = clip_cov(
        logprobs,
        torch.zeros(4),
        torch.tensor([-1.0, -1.0, 3.0, 3.0]),
        mask,
        selected=selected,
        clip_low=0.2,
        clip_high=0.2,
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert gradient.tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert result.clipped.tolist() == [False, True, True, False]
    assert result.ratio.tolist() == pytest.approx([2.0, 2.0, 1.0, 1.0])


def test_kl_cov_by_hand() -> None:
    # -r Â + ½ |log r| where selected: log 2, -log 2, 0, and log 2 without the penalty
    logprobs = torch.tensor([LOG2, -LOG2, 0.0, LOG2, 1.0], requires_grad=True)
    selected = torch.tensor([True, True, True, False, True])
    mask = torch.tensor([True, True, True, True, False])
    result = kl_cov(logprobs, torch.zeros(5), torch.ones(5), mask, selected=selected, kl_coef=0.5)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == pytest.approx([-2.0 + LOG2 / 2, -0.5 + LOG2 / 2, -1.0, -2.0, 0.0])
    assert gradient.tolist() == pytest.approx([-1.5, -1.0, -1.0, -2.0, 0.0])
    assert result.clipped.tolist() == [True, True, True, False, False]


def test_a_step_with_its_selection_does_not_depend_on_the_micro_batches() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    covariances = token_covariances(old_logprobs, advantages, mask)
    selected = select_kl_cov(covariances, mask, fraction=0.2)
    denominator = loss_denominator(mask, mode="token_mean")

    def gradient(parts: list[list[int]]) -> Tensor:
        losses = [
            aggregate(
                kl_cov(logprobs[p], old_logprobs[p], advantages[p], mask[p], selected=selected[p], kl_coef=1.0).loss,
                mask[p],
                mode="token_mean",
                denominator=denominator,
            )
            for p in parts
        ]
        return torch.autograd.grad(torch.stack(losses).sum(), logprobs)[0]

    torch.testing.assert_close(gradient([[0, 1, 2], [3, 4, 5]]), gradient([list(range(6))]), rtol=1e-12, atol=1e-12)
    alone = [select_kl_cov(covariances[p], mask[p], fraction=0.2) for p in ([0, 1, 2], [3, 4, 5])]
    assert not torch.equal(torch.cat(alone), selected)  # which is why it is an argument


def test_gradients_in_float64() -> None:
    logprobs, old_logprobs, advantages, mask = random_tokens()
    selected = advantages > 0.5
    assert torch.autograd.gradcheck(
        lambda x: clip_cov(x, old_logprobs, advantages, mask, selected=selected, clip_low=0.2, clip_high=0.3).loss,
        logprobs,
    )
    assert torch.autograd.gradcheck(
        lambda x: kl_cov(x, old_logprobs, advantages, mask, selected=selected, kl_coef=0.7).loss, logprobs
    )


def test_the_selection_compiles_without_a_graph_break() -> None:
    logprobs, _, advantages, mask = random_tokens()
    uniforms = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))

    def selections(a: Tensor, b: Tensor, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        covariances = token_covariances(a, b, m)
        drawn = select_clip_cov(covariances, u, m, lower=-0.5, upper=0.5, fraction=0.2)
        return covariances, select_kl_cov(covariances, m, fraction=0.2), drawn

    torch.compiler.reset()
    arguments = (logprobs.detach(), advantages, uniforms, mask)
    compiled = torch.compile(selections, fullgraph=True, backend="aot_eager")(*arguments)
    for one, other in zip(compiled, selections(*arguments), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_accelerator_selects_as_the_cpu_does_and_is_not_waited_for() -> None:
    logprobs, _, advantages, mask = random_tokens()
    uniforms = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))

    def selections(a: Tensor, b: Tensor, u: Tensor, m: Tensor) -> list[Tensor]:
        covariances = token_covariances(a, b, m)
        drawn = select_clip_cov(covariances, u, m, lower=-0.5, upper=0.5, fraction=0.2)
        return [covariances, select_kl_cov(covariances, m, fraction=0.2), drawn]

    arguments = (logprobs.detach(), advantages, uniforms, mask)
    there = [x.cuda() for x in arguments]
    selections(*there)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = selections(*there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(got, selections(*arguments), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_what_does_not_fit_is_named() -> None:
    x, mask = torch.zeros(2), ones(2)
    for loss, keywords in ((clip_cov, {"clip_low": 0.2, "clip_high": 0.2}), (kl_cov, {"kl_coef": 1.0})):
        with pytest.raises(ValueError, match=r"selected has dtype torch.float32; pass a bool tensor"):
            loss(x, x, x, mask, selected=x, **keywords)
        with pytest.raises(ValueError, match=r"selected has shape \(3,\) and mask \(2,\)"):
            loss(x, x, x, mask, selected=ones(3), **keywords)
    with pytest.raises(ValueError, match=r"kl_coef=-1.0 must be a finite number, at least 0"):
        kl_cov(x, x, x, mask, selected=mask, kl_coef=-1.0)
    with pytest.raises(ValueError, match=r"clip_low=1.5 must lie between"):
        clip_cov(x, x, x, mask, selected=mask, clip_low=1.5, clip_high=0.2)
    with pytest.raises(ValueError, match=r"fraction=1.5 must lie between 0 and 1"):
        select_kl_cov(x, mask, fraction=1.5)
    with pytest.raises(ValueError, match=r"fraction=-0.1 must lie between 0 and 1"):
        select_clip_cov(x, x, mask, lower=0.0, upper=1.0, fraction=-0.1)
    with pytest.raises(ValueError, match=r"lower=5.0 must be below upper=1.0"):
        select_clip_cov(x, x, mask, lower=5.0, upper=1.0, fraction=0.1)
    with pytest.raises(ValueError, match=r"uniforms has shape \(1,\) and mask \(2,\)"):
        select_clip_cov(x, x[:1], mask, lower=0.0, upper=1.0, fraction=0.1)
    with pytest.raises(ValueError, match=r"advantages has shape \(1,\) and mask \(2,\)"):
        token_covariances(x, x[:1], mask)
