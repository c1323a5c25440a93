"""On an accelerator: the numbers of the CPU, and no wait for the device."""

from collections.abc import Iterator

import pytest
import torch
from drivetrain_algorithms import (
    AggregationMode,
    KLKind,
    aggregate,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    loss_denominator,
    ppo_clip,
    returns_to_go,
    sft_loss,
    token_rewards,
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


def everything(x: Tensor, mask: Tensor, scores: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Every function of the package, on one batch; `x` is `[6, *mask.shape]`."""
    logprobs, old_logprobs, ref_logprobs, values, new_values, rewards = x
    advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=0.95, cu_seqlens=cu_seqlens)
    kinds: list[KLKind] = ["k1", "abs", "k2", "k3"]
    modes: list[AggregationMode] = ["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean"]
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0).loss
    return [
        advantages,
        returns,
        returns_to_go(rewards, mask, gamma=0.9, cu_seqlens=cu_seqlens),
        token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1, cu_seqlens=cu_seqlens),
        whiten(rewards, mask),
        loss,
        clipped_value_loss(new_values, values, returns, mask, clip=0.2).loss,
        explained_variance(values, returns, mask),
        sft_loss(logprobs, mask),
        *(kl_estimate(logprobs, ref_logprobs, mask, kind=kind) for kind in kinds),
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


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_numbers_without_waiting(packed: bool, waiting_is_an_error: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, 33, generator=generator)
    mask = torch.rand(8, 33, generator=generator) > 0.3
    scores = torch.randn(8, generator=generator)
    cu_seqlens = None
    if packed:
        x, mask, cu_seqlens = x.flatten(1), mask.flatten(), torch.arange(0, 8 * 33 + 1, 33)
    expected = everything(x, mask, scores, cu_seqlens)
    on_device = [t if t is None else t.pin_memory().cuda(non_blocking=True) for t in (x, mask, scores, cu_seqlens)]
    results = everything(*on_device)
    torch.cuda.set_sync_debug_mode("default")
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), reference, rtol=1e-4, atol=1e-5)
