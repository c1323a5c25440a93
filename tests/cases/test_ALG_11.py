"""A KL penalty that has no gradient, the wrong gradient or the wrong sign: its coefficient does nothing, or drives the
policy away from the reference (NVIDIA-NeMo/RL#2506, allenai/open-instruct#530, allenai/open-instruct#535,
qiancheng0/ToolRL#52, fla-org/flash-linear-attention#1073).

The policy is a categorical one over four actions, and every expectation is exact: a sum over the actions, weighed by
how often they are sampled.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from drivetrain_algorithms import (
    KLKind,
    aggregate,
    full_vocabulary_kl,
    kl_estimate,
    loss_denominator,
    token_rewards,
)
from torch import Tensor

REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
START = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64).log()
ALL = torch.ones(4, dtype=torch.bool)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Of what two sets of logits stand for, by the definition."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum()


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum()


def expected_loss(logits: Tensor, kind: KLKind, straight_through: bool) -> Tensor:
    """The expectation of the loss over actions that were sampled: how often is a constant, as in any batch."""
    logprobs = logits.log_softmax(-1)
    estimate = kl_estimate(logprobs, REFERENCE, ALL, kind=kind, straight_through=straight_through)
    return (logprobs.detach().exp() * estimate).sum()


def finite_differences(function: Callable[[Tensor], Tensor]) -> Tensor:
    steps = 1e-6 * torch.eye(4, dtype=torch.float64)
    return torch.stack([(function(START + step) - function(START - step)) / 2e-6 for step in steps])


LOSSES: list[tuple[KLKind, bool, Callable[[Tensor], Tensor]]] = [
    ("k2", False, lambda x: kl(x, REFERENCE)),
    ("k3", False, lambda x: kl(REFERENCE, x)),
    ("abs", False, lambda x: 2.0 * total_variation(x, REFERENCE)),
    ("k1", True, lambda x: kl(x, REFERENCE)),
    ("abs", True, lambda x: kl(x, REFERENCE)),
    ("k2", True, lambda x: kl(x, REFERENCE)),
    ("k3", True, lambda x: kl(x, REFERENCE)),
]


@pytest.mark.parametrize(("kind", "straight_through", "divergence"), LOSSES)
def test_the_gradient_is_that_of_the_divergence_it_is_said_to_be(
    kind: KLKind, straight_through: bool, divergence: Callable[[Tensor], Tensor]
) -> None:
    logits = START.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(logits, kind, straight_through), logits)
    expected = finite_differences(divergence)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_k1_has_no_gradient_in_expectation_and_is_refused_as_a_loss() -> None:
    logits = START.clone().requires_grad_()
    # why: the same loss, written out
    (gradient,) = torch.autograd.grad((START.softmax(-1) * (logits.log_softmax(-1) - REFERENCE)).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"kind='k1'.*no loss.*expected gradient is 0"):
        expected_loss(logits, "k1", False)
    assert kl_estimate.__doc__ is not None
    assert "k1 belongs in the rewards" in " ".join(kl_estimate.__doc__.split())
    # as a value, which is what a reward takes, it is the divergence
    assert expected_loss(START, "k1", False).item() == pytest.approx(kl(START, REFERENCE).item())


def falls(step: Callable[[Tensor], Tensor]) -> bool:
    """Whether KL(π || π_ref) falls in each of 50 steps of gradient descent on a loss with coefficient 1, reward 0."""
    logits, divergences = START, [kl(START, REFERENCE).item()]
    for _ in range(50):
        logits = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(step(logits), logits)
        logits = logits - 0.5 * gradient
        divergences.append(kl(logits, REFERENCE).item())
    return all(after < before for before, after in pairwise(divergences)) and divergences[-1] < 0.1 * divergences[0]


@pytest.mark.parametrize(
    ("kind", "straight_through"), [(kind, straight) for kind, straight, _ in LOSSES if kind != "abs" or straight]
)
def test_the_divergence_falls_in_every_step_as_a_loss(kind: KLKind, straight_through: bool) -> None:
    assert falls(lambda logits: expected_loss(logits, kind, straight_through))
    assert not falls(lambda logits: -expected_loss(logits, kind, straight_through))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_divergence_falls_in_every_step_as_the_whole_one(direction: str) -> None:
    assert falls(lambda x: full_vocabulary_kl(x, REFERENCE, torch.tensor(True), direction=direction))  # type: ignore[arg-type]


def test_the_divergence_falls_in_every_step_as_a_reward() -> None:
    """k1 in the rewards: there the score term ∇log π gives it its gradient."""

    def step(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1).unsqueeze(-1)
        rewards = token_rewards(
            torch.zeros(4, dtype=torch.float64),
            logprobs.detach(),
            REFERENCE.unsqueeze(-1),
            ALL.unsqueeze(-1),
            kl_coef=1.0,
        )
        assert torch.equal(rewards[:, 0], REFERENCE - logprobs[:, 0].detach())  # charged, not paid
        frequency = logprobs.detach().exp()
        return -(frequency * logprobs * rewards).sum()

    assert falls(step)


def test_the_mean_is_taken_after_masking() -> None:
    logprobs = torch.stack((START, torch.full((4,), torch.nan, dtype=torch.float64))).requires_grad_()
    mask = torch.tensor([[True] * 4, [False] * 4])
    estimate = kl_estimate(logprobs, REFERENCE.expand(2, 4), mask, kind="k2")
    loss = aggregate(estimate, mask, mode="token_mean", denominator=loss_denominator(mask, mode="token_mean"))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(0.5 * (START - REFERENCE).square().mean().item())
    torch.testing.assert_close(gradient[0], (START - REFERENCE) / 4)
    assert not gradient[1].any()
