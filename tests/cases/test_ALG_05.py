"""ALG-05: a micro-batch without a trainable token makes the loss NaN; tokens left out of the sum stay in its divisor.

verl-project/verl#782, huggingface/trl#6369, huggingface/trl#6439
"""

import math
from typing import get_args

import pytest
import torch
from drivetrain_algorithms import AggregationMode, aggregate, loss_denominator, ppo_clip
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, UpdateResult
from torch import Tensor

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
SEQUENCES = [[1, 4, 5, 6, 2], [1, 3, 3, 2], [1, 6, 6, 6, 4], [1, 2, 5]]
NORM_LENGTH = 4


def norm_length(mode: AggregationMode) -> int | None:
    return NORM_LENGTH if mode == "seq_mean_token_sum_norm" else None


def batch_of(*trained: bool) -> PackedBatch:
    """The four sequences, with a prompt of one token each; those not trained have no token in the mask."""
    masks = [[own and index > 0 for index in range(len(ids))] for ids, own in zip(SEQUENCES, trained, strict=True)]
    return PackedBatch.pack(SEQUENCES, masks)


def tiny_learner() -> Learner[PolicyModel]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3))
    # As many slots as the longest sequence has: each sequence is a micro-batch of its own.
    return Learner(PolicyModel(model), LearnerConfig(lr=1e-2, max_tokens_per_microbatch=4, weight_decay=0.1))


def update(
    learner: Learner[PolicyModel], batch: PackedBatch, mode: AggregationMode, calls: list[float]
) -> UpdateResult:
    mask, bounds = batch.loss_mask, batch.cu_seqlens
    denominator = loss_denominator(mask, mode=mode, cu_seqlens=bounds, norm_length=norm_length(mode))

    def loss(part: PackedBatch) -> LossTerms:
        logprobs = learner.module(part).logprobs
        # What was never computed for untrained tokens may be anything.
        advantages = torch.where(part.loss_mask, 0.5 + part.positions, math.nan)
        policy = ppo_clip(logprobs, logprobs.detach(), advantages, part.loss_mask, clip_low=0.2, clip_high=0.2)
        total = aggregate(policy.loss, part.loss_mask, mode=mode, denominator=denominator, cu_seqlens=part.cu_seqlens)
        calls.append(total.item())
        return LossTerms(loss=total)

    return learner.update(batch, loss)


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("mode", MODES)
def test_the_third_of_four_micro_batches_is_empty(mode: AggregationMode) -> None:
    values = torch.arange(16.0).view(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2], values[2] = False, math.nan
    kept = [0, 1, 3]
    denominator = loss_denominator(mask, mode=mode, norm_length=norm_length(mode))
    assert denominator.item() == loss_denominator(mask[kept], mode=mode, norm_length=norm_length(mode)).item()

    def gradients(rows: list[int]) -> tuple[float, Tensor]:
        values.grad = None
        total = 0.0
        for row in rows:
            loss = aggregate(values[row : row + 1], mask[row : row + 1], mode=mode, denominator=denominator)
            loss.backward()
            total += loss.item()
        assert values.grad is not None
        return total, values.grad.clone()

    values.requires_grad_()
    with_it, without_it = gradients([0, 1, 2, 3]), gradients(kept)
    assert with_it[0] == without_it[0]
    assert torch.equal(with_it[1], without_it[1])
    assert with_it[1][2].eq(0).all()
    assert with_it[1][kept].gt(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_learner_takes_the_step_it_would_have_taken_without_it(mode: AggregationMode) -> None:
    learner, other = tiny_learner(), tiny_learner()
    batch = batch_of(True, True, False, True)
    calls: list[float] = []
    result = update(learner, batch, mode, calls)
    expected = update(other, batch.select([0, 1, 3]), mode, [])
    assert len(calls) == 4
    assert calls[2] == 0.0
    assert result == expected
    assert result.skipped is None
    assert result.grad_norm > 0
    assert same(learner.state_dict(), other.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_at_all(mode: AggregationMode) -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    values = torch.full((4, 4), math.nan, requires_grad=True)
    denominator = loss_denominator(mask, mode=mode, norm_length=norm_length(mode))
    for row in range(4):
        loss = aggregate(values[row : row + 1], mask[row : row + 1], mode=mode, denominator=denominator)
        loss.backward()
        assert loss.item() == 0.0
    assert values.grad is not None
    assert values.grad.eq(0).all()

    learner, nothing = tiny_learner(), batch_of(False, False, False, False)
    fresh = learner.state_dict()
    for _ in range(2):
        before = learner.state_dict()
        result = update(learner, nothing, mode, [])
        assert (result.loss, result.grad_norm) == (0.0, 0.0)
        assert result.skipped == "no slot has loss_mask true"
        # Not even AdamW's step, its moments or the weight decay have moved.
        assert same(learner.state_dict(), before)
        trained = update(learner, batch_of(True, True, True, True), mode, [])
        assert trained.skipped is None
    after = learner.state_dict()
    assert not same(after, fresh)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert after["step"].item() == 2


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_three_of_four_answers_truncated_count_for_nothing(mode: AggregationMode) -> None:
    truncated = torch.tensor([True, False, True, True])
    answers = torch.ones(4, 4, dtype=torch.bool)
    mask = answers & ~truncated.unsqueeze(-1)
    denominator = loss_denominator(mask, mode=mode, norm_length=norm_length(mode))
    # Four tokens, one sequence; with the truncated answers in the divisor it would be four times as much.
    assert denominator.item() == {"token_mean": 4, "seq_mean_token_sum_norm": 1 * NORM_LENGTH}.get(mode, 1)
    expected = {"seq_mean_token_sum": 4 * 0.7}.get(mode, 0.7)
    assert aggregate(torch.full((4, 4), 0.7), mask, mode=mode, denominator=denominator).item() == pytest.approx(
        expected
    )

    learner, alone = tiny_learner(), tiny_learner()
    batch = batch_of(*(~truncated).tolist())
    assert update(learner, batch, mode, []) == update(alone, batch.select([1]), mode, [])
    assert same(learner.state_dict(), alone.state_dict())
