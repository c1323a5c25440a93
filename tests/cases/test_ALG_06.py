"""ALG-06: one masked or rejected token with a huge log-ratio, NaN or -inf makes the whole loss and gradient NaN.

OpenRLHF/OpenRLHF#1314, OpenRLHF/OpenRLHF#1240, NVIDIA-NeMo/RL#4120, radixark/miles#1363,
PrimeIntellect-ai/prime-rl#2085
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from drivetrain_algorithms import (
    PolicyLoss,
    aggregate,
    check_finite,
    cispo,
    clip_cov,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    kl_cov,
    kl_estimate,
    ppo_clip,
    reinforce,
    sapo,
    value_checks,
)
from torch import Tensor


def decoupled(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """The sampler's log-probabilities are as broken as the others."""
    return decoupled_ppo(
        logprobs, old_logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2, reject=(0.0, 5.0)
    )


NONE_SELECTED = torch.tensor([[False, False]])
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]] = {
    "ppo_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.2),
    "dual_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "decoupled_ppo": decoupled,
    "reinforce": reinforce,
    "gspo": partial(gspo, clip_low=3e-4, clip_high=4e-4),
    "gmpo": partial(gmpo, clip_low=0.4, clip_high=0.4),
    "cispo": partial(cispo, clip_low=1.0, clip_high=4.0),
    "sapo": sapo,
    "clip_cov": partial(clip_cov, selected=NONE_SELECTED, clip_low=0.2, clip_high=0.2),
    "kl_cov": partial(kl_cov, selected=NONE_SELECTED, kl_coef=1.0),
    "dppo_tv": partial(dppo_tv, clip_low=0.2, clip_high=0.2, ratio_clamp=20.0),
    "dppo_kl": partial(dppo_kl, clip_low=0.05, clip_high=0.05, ratio_clamp=20.0),
}
every_loss = pytest.mark.parametrize("name", LOSSES)

# What a naive loss reads in the rejected slot: (log π, log π_old).
REJECTED = [
    (0.0, -1000.0),
    (math.nan, 0.0),
    (0.0, math.nan),
    (-math.inf, 0.0),
    (0.0, -math.inf),
    (-math.inf, -math.inf),
]


def test_the_naive_loss_has_the_failure() -> None:
    """Exponentiated first and multiplied by the mask after: what every loss below must not do."""
    logprobs = torch.zeros(1, 2, requires_grad=True)
    ratio = (logprobs - torch.tensor([[-1000.0, 0.0]])).exp()
    loss = -(ratio * torch.tensor([[0.0, 1.0]])).sum()
    loss.backward()
    assert loss.isnan()
    assert logprobs.grad is not None
    assert logprobs.grad.isnan().any()


@every_loss
@pytest.mark.parametrize(("logprob", "old_logprob"), REJECTED)
@pytest.mark.parametrize(("denominator", "expected"), [(2, -0.5), (1, -1.0)])
def test_a_rejected_token_changes_nothing(
    name: str, logprob: float, old_logprob: float, denominator: int, expected: float
) -> None:
    """The mean over both tokens gives the accepted one -0.5, the mean over the kept one -1; exactly 0 at the other."""
    logprobs = torch.tensor([[logprob, 0.0]], requires_grad=True)
    mask = torch.tensor([[False, True]])
    result = LOSSES[name](logprobs, torch.tensor([[old_logprob, 0.0]]), torch.ones(1, 2), mask)
    loss = aggregate(result.loss, mask, mode="token_mean", denominator=denominator)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, expected]]
    assert result.ratio.tolist() == [[1.0, 1.0]]
    assert result.approx_kl.tolist() == [[0.0, 0.0]]
    assert result.clipped.tolist() == [[False, False]]


@every_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nor_does_its_advantage(name: str, garbage: float) -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.tensor([[False, True]])
    result = LOSSES[name](logprobs, torch.zeros(1, 2), torch.tensor([[garbage, 1.0]]), mask)
    aggregate(result.loss, mask, mode="token_mean", denominator=1).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


@every_loss
def test_an_advantage_of_zero_times_an_infinite_ratio_is_zero(name: str) -> None:
    """exp(1000) is inf in a float, and 0 * inf is NaN: the token is not masked, its ratio only counts as e²⁰."""
    logprobs = torch.zeros(2, 1, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    loss = LOSSES[name]
    if name in ("clip_cov", "kl_cov"):
        loss = partial(loss, selected=torch.zeros(2, 1, dtype=torch.bool))
    result = loss(logprobs, torch.tensor([[-1000.0], [0.0]]), torch.tensor([[0.0], [1.0]]), mask)
    aggregate(result.loss, mask, mode="token_mean", denominator=2).backward()
    assert result.loss[0].item() == 0.0
    assert result.ratio.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0], [-0.5]]


@every_loss
@pytest.mark.parametrize(("logprob", "old_logprob"), REJECTED[1:])
def test_an_invalid_number_in_an_unmasked_slot_is_reported(name: str, logprob: float, old_logprob: float) -> None:
    logprobs = torch.tensor([[0.0, logprob]], requires_grad=True)
    old_logprobs = torch.tensor([[0.0, old_logprob]])
    mask = torch.tensor([[False, True]])
    result = LOSSES[name](logprobs, old_logprobs, torch.ones(1, 2), mask)
    assert result.approx_kl[0, 1].isnan()
    if name != "reinforce" or logprob != 0.0:  # which does not read π_old, but for its metrics
        assert not aggregate(result.loss, mask, mode="token_mean", denominator=1).isfinite()
    argument, bad = ("logprobs", logprob) if not math.isfinite(logprob) else ("old_logprobs", old_logprob)
    message = f"logprobs is {bad} at token 1 of sequence 0; 1 of 1 unmasked slots are not finite"
    with value_checks(), pytest.raises(ValueError, match=message):
        LOSSES[name](logprobs, old_logprobs, torch.ones(1, 2), mask)
    with pytest.raises(ValueError, match=f"^{argument.removesuffix('logprobs')}{message}"):
        check_finite(argument, {"logprobs": logprobs, "old_logprobs": old_logprobs}[argument], mask)


@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
@pytest.mark.parametrize(("logprob", "ref_logprob"), REJECTED)
def test_the_penalty_of_a_rejected_token_is_zero_too(kind: str, logprob: float, ref_logprob: float) -> None:
    logprobs = torch.tensor([[logprob, -1.0]], requires_grad=True)
    mask = torch.tensor([[False, True]])
    penalty = kl_estimate(logprobs, torch.tensor([[ref_logprob, -2.0]]), mask, kind=kind)
    aggregate(penalty, mask, mode="token_mean", denominator=1).backward()
    assert penalty[0, 0].item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0].item() == 0.0
    assert logprobs.grad[0, 1].item() == pytest.approx({"k3": 1 - math.exp(-1)}.get(kind, 1.0))
