"""ALG-01: token-mean loss changes with the micro-batch split, because each micro-batch divides by its own token count.

verl-project/verl#5625, verl-project/verl#7321, verl-project/verl#906, NovaSky-AI/SkyRL#1296, NovaSky-AI/SkyRL#925
"""

from typing import get_args

import pytest
import torch
from drivetrain_algorithms import AggregationMode, aggregate, loss_denominator, sft_loss
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch
from torch import Tensor, nn

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
LENGTHS = [100, 900]
EXPECTED = {
    "token_mean": 0.32,  # (100 · 0.5 + 900 · 0.3) / 1000; a mean of means gives 0.40
    "token_sum": 320.0,
    "seq_mean_token_sum": 160.0,
    "seq_mean_token_mean": 0.40,  # here a mean of means is what was asked for
    "seq_mean_token_sum_norm": 0.16,  # 320 / (2 · 1000)
}


def denominator_of(mask: Tensor, mode: AggregationMode) -> Tensor:
    return loss_denominator(mask, mode=mode, norm_length=1000 if mode == "seq_mean_token_sum_norm" else None)


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_and_nine_hundred_tokens_in_one_micro_batch_and_in_two(mode: AggregationMode) -> None:
    mask = torch.arange(900) < torch.tensor(LENGTHS).unsqueeze(-1)
    levels = torch.tensor([[0.5], [0.3]], requires_grad=True)
    denominator = denominator_of(mask, mode)
    found = []
    for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        losses = [
            aggregate(levels[rows].expand(-1, 900), mask[rows], mode=mode, denominator=denominator) for rows in parts
        ]
        (gradient,) = torch.autograd.grad(sum(losses, torch.zeros(())), levels)
        found.append((sum(loss.item() for loss in losses), gradient))
    (one, one_gradient), (two, two_gradient) = found
    assert one == pytest.approx(EXPECTED[mode], rel=1e-6)
    assert two == pytest.approx(EXPECTED[mode], rel=1e-6)
    torch.testing.assert_close(two_gradient, one_gradient, rtol=1e-6, atol=1e-6)


class Policy(nn.Module):
    """A table of logits and what follows from it: small enough to look at every gradient, with log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(11, 6, generator=generator))
        self.head = nn.Parameter(torch.randn(6, 11, generator=generator))

    def forward(self, batch: PackedBatch) -> Tensor:
        logits = self.embedding[batch.input_ids] @ self.head
        return logits.log_softmax(-1).gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)


def step(batch: PackedBatch, mode: AggregationMode, max_tokens: int) -> tuple[int, float, list[Tensor]]:
    """How many micro-batches the learner made, the loss of the step, and the gradients the optimizer was given."""
    learner = Learner(Policy(), LearnerConfig(lr=1e-3, max_tokens_per_microbatch=max_tokens, max_grad_norm=None))
    denominator = loss_denominator(
        batch.loss_mask,
        mode=mode,
        cu_seqlens=batch.cu_seqlens,
        norm_length=1000 if mode == "seq_mean_token_sum_norm" else None,
    )
    gradients: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: gradients.extend(p.grad.clone() for p in learner.module.parameters())
    )
    calls: list[int] = []

    def loss(part: PackedBatch) -> LossTerms:
        calls.append(part.num_tokens)
        per_token = sft_loss(learner.module(part), part.loss_mask)
        total = aggregate(per_token, part.loss_mask, mode=mode, denominator=denominator, cu_seqlens=part.cu_seqlens)
        return LossTerms(loss=total)

    result = learner.update(batch, loss)
    return len(calls), result.loss, gradients


@pytest.mark.parametrize("mode", MODES)
def test_the_learner_gives_the_same_gradients_whatever_the_split(mode: AggregationMode) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [100, 900, 1, 7, 40, 3, 2]  # of the responses; each follows three prompt tokens
    sequences = [torch.randint(11, (3 + length,), generator=generator).tolist() for length in lengths]
    batch = PackedBatch.pack(sequences, [[index >= 3 for index in range(len(ids))] for ids in sequences])
    count, expected, expected_gradients = step(batch, mode, 10_000)
    assert count == 1
    largest = max(gradient.abs().max().item() for gradient in expected_gradients)
    for max_tokens, parts in [(910, 2), (110, 3), (1, 7)]:  # the last micro-batch is smaller than the others
        count, loss, gradients = step(batch, mode, max_tokens)
        assert count >= parts
        assert loss == pytest.approx(expected, rel=1e-6)
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6 * largest)
