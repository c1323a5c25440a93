import math
from collections.abc import Callable

import pytest
import torch
from drivetrain_algorithms import PolicyLoss, aggregate, gmpo, gspo, loss_denominator, ppo_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG2 = math.log(2.0)
BOTH = pytest.mark.parametrize("loss", [gspo, gmpo])


def bools(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows).bool()


def random_sequences(seed: int = 0, *, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, those of before, one advantage per sequence, and a mask; float64."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, change = torch.randn(2, 6, 9, dtype=torch.float64, generator=generator)
    advantages = torch.randn(6, 1, dtype=torch.float64, generator=generator).expand(6, 9)
    mask = torch.rand(6, 9, generator=generator) > 0.3
    return logprobs.requires_grad_(), logprobs.detach() + scale * change, advantages, mask


def mean_over_sequences(result: PolicyLoss, mask: Tensor) -> Tensor:
    mode = "seq_mean_token_mean"
    return aggregate(result.loss, mask, mode=mode, denominator=loss_denominator(mask, mode=mode))


def test_gspo_by_hand() -> None:
    # Mean log-ratios log 2 and -log 2 over the unmasked tokens, clipped to [.8, 1.2].
    logprobs = torch.tensor([[3 * LOG2, 99.0, -LOG2], [-LOG2, -LOG2, 99.0]]).requires_grad_()
    mask = bools([[1, 0, 1], [1, 1, 0]])
    for advantages, loss, gradient, clipped in [
        ((1.0, 1.0), (-1.2, -0.5), (0.0, -0.5), (True, False)),
        ((-1.0, -1.0), (2.0, 0.8), (2.0, 0.0), (False, True)),
    ]:
        tokens = torch.tensor(advantages).unsqueeze(1).expand(2, 3)
        result = gspo(logprobs, torch.zeros(2, 3), tokens, mask, clip_low=0.2, clip_high=0.2)
        (got,) = torch.autograd.grad(result.loss.sum(), logprobs)
        for row in range(2):
            assert result.loss[row].tolist() == pytest.approx([loss[row] * m for m in mask[row].tolist()])
            assert got[row].tolist() == pytest.approx([gradient[row] * m for m in mask[row].tolist()])
            assert result.clipped[row].tolist() == [clipped[row] and m for m in mask[row].tolist()]
        assert result.ratio[0].tolist() == pytest.approx([8.0, 1.0, 0.5])


def test_the_dual_clip_of_gspo_bounds_bad_sequences() -> None:
    logprobs = torch.tensor([[math.log(16.0), 0.0]]).requires_grad_()
    result = gspo(
        logprobs, torch.zeros(1, 2), -torch.ones(1, 2), bools([[1, 1]]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == [[3.0, 3.0]]
    assert gradient.eq(0).all()
    assert result.clipped.all()


def test_gmpo_by_hand() -> None:
    # Log-ratios 1, -1, .2, of which the first is clipped to .5: their mean is -.1.
    logprobs = torch.tensor([[1.0, -1.0, 99.0, 0.2]]).requires_grad_()
    mask = bools([[1, 1, 0, 1]])
    good = gmpo(logprobs, torch.zeros(1, 4), 2.0 * torch.ones(1, 4), mask, clip_low=0.4, clip_high=0.5)
    (gradient,) = torch.autograd.grad(good.loss.sum(), logprobs)
    g = 2.0 * math.exp(-0.1)
    assert good.loss[0].tolist() == pytest.approx([-g, -g, 0.0, -g])
    assert gradient[0].tolist() == pytest.approx([0.0, -g, 0.0, -g])
    assert good.clipped.tolist() == [[True, False, False, False]]
    # With a negative advantage the second is clipped to -.4: the mean is .8 / 3.
    bad = gmpo(logprobs, torch.zeros(1, 4), -torch.ones(1, 4), mask, clip_low=0.4, clip_high=0.5)
    (gradient,) = torch.autograd.grad(bad.loss.sum(), logprobs)
    g = math.exp(0.8 / 3)
    assert bad.loss[0].tolist() == pytest.approx([g, g, 0.0, g])
    assert gradient[0].tolist() == pytest.approx([g, 0.0, 0.0, g])
    assert bad.clipped.tolist() == [[False, True, False, False]]


def sequence_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, kind: str, low: float, high: float
) -> Tensor:
    """The papers' objectives, sequence by sequence, with the gradient through the whole sequence."""
    losses = []
    for row in range(len(mask)):
        difference = (logprobs[row] - old_logprobs[row])[mask[row]]
        advantage = advantages[row, 0]
        if len(difference) == 0:
            continue
        if kind == "gspo":
            ratio = difference.mean().exp()
            losses.append(torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage))
        else:
            held = difference.clamp(max=high) if advantage > 0 else difference.clamp(min=-low)
            losses.append(-held.mean().exp() * advantage)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("loss", "low", "high"), [(gspo, 0.1, 0.1), (gspo, 1.0, math.inf), (gmpo, 0.3, 0.4)])
def test_value_and_gradient_are_those_of_the_sequence_objective(
    loss: Callable[..., PolicyLoss], low: float, high: float
) -> None:
    logprobs, old_logprobs, advantages, mask = random_sequences()
    mask[2] = False

    def objective(x: Tensor) -> Tensor:
        return sequence_objective(x, old_logprobs, advantages, mask, kind=loss.__name__, low=low, high=high)

    assert torch.autograd.gradcheck(objective, logprobs)
    got = mean_over_sequences(loss(logprobs, old_logprobs, advantages, mask, clip_low=low, clip_high=high), mask)
    expected = objective(logprobs)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprobs)[0] for x in (got, expected)), rtol=1e-12, atol=1e-12)


def test_sequences_of_one_token_make_gspo_ppo_and_are_differentiable_as_they_stand() -> None:
    logprobs, old_logprobs, advantages, mask = (x.reshape(-1, 1) for x in random_sequences())
    logprobs = logprobs.detach().requires_grad_()
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    sequence, token = (f(logprobs, old_logprobs, advantages, mask, **bounds) for f in (gspo, ppo_clip))
    for one, other in zip(sequence, token, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: gspo(x, old_logprobs, advantages, mask, **bounds).loss, logprobs)


def test_sequences_of_one_token_make_gmpo_ppo_between_exponentials() -> None:
    logprobs, old_logprobs, advantages, mask = (x.reshape(-1, 1) for x in random_sequences())
    logprobs = logprobs.detach().requires_grad_()
    sequence = gmpo(logprobs, old_logprobs, advantages, mask, clip_low=0.3, clip_high=0.4)
    token = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=1 - math.exp(-0.3), clip_high=math.exp(0.4) - 1)
    for one, other in zip(sequence, token, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: gmpo(x, old_logprobs, advantages, mask, clip_low=0.3, clip_high=0.4).loss, logprobs
    )


def test_without_bounds_gmpo_is_gspo() -> None:
    tokens = random_sequences()
    wide = gmpo(*tokens, clip_low=math.inf, clip_high=math.inf)
    plain = gspo(*tokens, clip_low=1.0, clip_high=math.inf)
    torch.testing.assert_close(wide.loss, plain.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.loss.sum(), tokens[0])[0] for x in (wide, plain)), rtol=1e-12, atol=1e-12
    )


@BOTH
def test_advantages_may_differ_from_token_to_token(loss: Callable[..., PolicyLoss]) -> None:
    # Ratio 1: the gradient at a token is that token's advantage, and no other's.
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 0.5]])
    result = loss(logprobs, logprobs.detach(), advantages, bools([[1, 1, 1]]), clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert gradient.tolist() == [[-1.0, 2.0, -0.5]]


@BOTH
def test_a_sequence_of_nan_spoils_no_other(loss: Callable[..., PolicyLoss]) -> None:
    logprobs, old_logprobs, advantages, mask = random_sequences()
    mask[:, :2] = True
    mask[1, 4] = False
    old_logprobs[1, 0] = math.nan
    result = loss(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss[1][mask[1]].isnan().all()
    assert gradient[1, 0].isnan()
    for x in (result.loss, gradient):
        assert x[1, 4].item() == 0.0
        assert x[[0, 2, 3, 4, 5]].isfinite().all()


@BOTH
@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]])
def test_packed_batches_of_nothing(loss: Callable[..., PolicyLoss], cu_seqlens: list[int]) -> None:
    x = torch.zeros(0, requires_grad=True)
    result = loss(x, x.detach(), x.detach(), x.bool(), clip_low=0.2, clip_high=0.2, cu_seqlens=torch.tensor(cu_seqlens))
    assert result.loss.shape == (0,)
    result.loss.sum().backward()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    log_ratios=st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=6),
    advantage=st.sampled_from([-1.0, 1.0]),
    bound=st.floats(0.0, 1.0),
)
def test_clipping_only_ever_makes_the_loss_larger(log_ratios: list[float], advantage: float, bound: float) -> None:
    logprobs = torch.tensor([log_ratios], dtype=torch.float64)
    tokens = (logprobs, torch.zeros_like(logprobs), torch.full_like(logprobs, advantage), logprobs.isfinite())
    plain = gspo(*tokens, clip_low=1.0, clip_high=math.inf)
    assert plain.loss[0, 0].item() == pytest.approx(-advantage * math.exp(sum(log_ratios) / len(log_ratios)))
    for loss in (gspo, gmpo):
        clipped = loss(*tokens, clip_low=bound, clip_high=bound)
        assert (clipped.loss >= plain.loss - 1e-12).all()
        assert clipped.loss.eq(clipped.loss[0, 0]).all()  # equal advantages: one number per sequence


@pytest.mark.parametrize(
    ("loss", "keywords", "message"),
    [
        (gspo, {"clip_low": 1.2, "clip_high": 0.2}, "clip_low=1.2 must lie between 0 and 1"),
        (gspo, {"clip_low": 0.2, "clip_high": -0.2}, "clip_high=-0.2 must be at least 0"),
        (gspo, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        (gmpo, {"clip_low": -0.4, "clip_high": 0.4}, "clip_low=-0.4 must be at least 0"),
        (gmpo, {"clip_low": 0.4, "clip_high": math.nan}, "clip_high=nan must be at least 0"),
    ],
)
def test_bounds_that_do_not_fit_are_named(
    loss: Callable[..., PolicyLoss], keywords: dict[str, float], message: str
) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        loss(x, x, x, bools([[1, 1]]), **keywords)


def test_gmpo_has_no_gradient_beyond_any_float() -> None:
    logprobs = torch.zeros(1, 1, requires_grad=True)
    bound = {"clip_low": math.inf, "clip_high": math.inf}
    gmpo(logprobs, torch.tensor([[-1000.0]]), -torch.ones(1, 1), torch.tensor([[True]]), **bound).loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0
