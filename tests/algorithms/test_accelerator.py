"""On an accelerator: the numbers of the CPU, and no wait for the device."""

from collections.abc import Callable, Iterator

import pytest
import torch
from drivetrain_algorithms import (
    AggregationMode,
    KLKind,
    RewardNormalizer,
    aggregate,
    clipped_value_loss,
    decoupled_group_advantages,
    dpo_loss,
    effective_sample_size,
    explained_variance,
    filter_groups,
    full_vocabulary_kl,
    gae,
    gpg_advantages,
    group_advantages,
    importance_weights,
    kl_estimate,
    loss_denominator,
    mismatch_metrics,
    overlong_penalty,
    pass_at_k_advantages,
    ppo_clip,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reject_divergent,
    remax,
    returns_to_go,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
    spread_over_tokens,
    token_entropy,
    token_logprobs,
    token_rewards,
    value_loss,
    whiten,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def per_token(x: Tensor, mask: Tensor, scores: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The functions of a number per token, on one batch; `x` is `[6, *mask.shape]`. Policy losses: see their test."""
    logprobs, old_logprobs, ref_logprobs, values, new_values, rewards = x
    advantages, returns = gae(
        rewards, values, mask, gamma=0.99, lam=0.95, bootstrap_values=scores, cu_seqlens=cu_seqlens
    )
    kinds: list[KLKind] = ["k1", "abs", "k2", "k3"]
    modes: list[AggregationMode] = ["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean"]
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0).loss
    weights = importance_weights(
        old_logprobs, logprobs, mask, level="geometric", clamp=(0.5, 2.0), reject=(0.1, 9.0), cu_seqlens=cu_seqlens
    )
    rejection = reject_divergent(
        old_logprobs, logprobs, mask, kind="k3", level="sequence_max", limit=3.0, cu_seqlens=cu_seqlens
    )
    return [
        advantages,
        returns,
        returns_to_go(rewards, mask, gamma=0.9, cu_seqlens=cu_seqlens),
        token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1, cu_seqlens=cu_seqlens),
        whiten(rewards, mask),
        reinforce_plus_plus(rewards, mask, gamma=0.9, cu_seqlens=cu_seqlens),
        remax(rewards, scores, mask, cu_seqlens=cu_seqlens),
        spread_over_tokens(scores, mask, cu_seqlens=cu_seqlens),
        sequence_logprobs(logprobs, mask, average=True, cu_seqlens=cu_seqlens),
        loss,
        clipped_value_loss(new_values, values, returns, mask, clip=0.2).loss,
        value_loss(new_values, returns, mask, kind="huber", delta=0.3).loss,
        explained_variance(values, returns, mask),
        sft_loss(logprobs, mask),
        *(kl_estimate(logprobs, ref_logprobs, mask, kind=kind) for kind in kinds),
        *weights,
        *rejection,
        effective_sample_size(weights.weights, mask, level="sequence", cu_seqlens=cu_seqlens),
        *mismatch_metrics(old_logprobs, logprobs, mask, cu_seqlens=cu_seqlens),
        *(
            aggregate(
                loss,
                mask,
                mode=mode,
                denominator=loss_denominator(mask, mode=mode, cu_seqlens=cu_seqlens),
                cu_seqlens=cu_seqlens,
            )
            for mode in modes
        ),
    ]


def per_sequence(scores: Tensor, group_ids: Tensor, mask: Tensor, lengths: Tensor) -> list[Tensor]:
    """The functions of a number per response."""
    pair = scores.chunk(2)
    return [
        group_advantages(scores, group_ids, baseline="mean", scale="std"),
        group_advantages(scores, group_ids, baseline="leave_one_out", scale="none"),
        group_advantages(scores, group_ids, baseline="optimal", scale="none", lengths=lengths),
        pass_at_k_advantages(scores, group_ids, k=2),
        decoupled_group_advantages(torch.stack((scores, -scores.square()), 1), group_ids, weights=(1.0, 0.5)),
        gpg_advantages(scores, group_ids),
        reinforce_plus_plus_baseline(scores, group_ids, mask),
        filter_groups(scores, group_ids, tolerance=0.5),
        overlong_penalty(lengths, max_length=33, buffer=10, penalty_factor=1.0),
        RewardNormalizer(clip=1.0).update(scores).normalize(scores),
        *dpo_loss(*pair, *pair[::-1], beta=0.1),
        *reward_model_loss(*pair, margin=pair[0].abs(), center_coef=0.01),
    ]


def of_logits(logits: Tensor, ref_logits: Tensor, labels: Tensor, mask: Tensor) -> list[Tensor]:
    """The functions of logits, with a gradient."""
    logits = logits.detach().requires_grad_()
    divergence = full_vocabulary_kl(logits, ref_logits, mask, temperature=0.7, chunk_size=5)
    logprobs = token_logprobs(logits, labels, temperature=0.7, mask=mask)
    entropy = token_entropy(logits, mask=mask)
    (gradient,) = torch.autograd.grad((divergence + logprobs + entropy).sum(), logits)
    return [divergence, logprobs, entropy, gradient]


def moved(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [t if t is None else t.pin_memory().cuda(non_blocking=True) for t in tensors]


def check(function: Callable[..., list[Tensor]], *tensors: Tensor | None) -> None:
    expected = function(*tensors)
    results = function(*moved(tensors))
    torch.cuda.set_sync_debug_mode("default")
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_numbers_per_token(packed: bool, waiting_is_an_error: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, 33, generator=generator)
    mask = torch.rand(8, 33, generator=generator) > 0.3
    scores = torch.randn(8, generator=generator)
    cu_seqlens = None
    if packed:
        x, mask, cu_seqlens = x.flatten(1), mask.flatten(), torch.arange(0, 8 * 33 + 1, 33)
    check(per_token, x, mask, scores, cu_seqlens)


def test_the_same_numbers_per_response(waiting_is_an_error: None) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(12, generator=generator)
    group_ids = torch.tensor([3, 3, 3, 3, 0, 0, 7, 7, 7, 5, 0, 0])
    mask = torch.rand(12, 33, generator=generator) > 0.3
    check(per_sequence, scores, group_ids, mask, mask.sum(1))


def test_the_same_numbers_of_logits(waiting_is_an_error: None) -> None:
    generator = torch.Generator().manual_seed(2)
    logits, ref_logits = torch.randn(2, 4, 7, 19, generator=generator)
    labels = torch.randint(19, (4, 7), generator=generator)
    check(of_logits, logits, ref_logits, labels, torch.rand(4, 7, generator=generator) > 0.3)
