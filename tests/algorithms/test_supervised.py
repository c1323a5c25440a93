import math

import pytest
import torch
from drivetrain_algorithms import aggregate, loss_denominator, sft_loss, value_checks


def test_it_is_the_cross_entropy_of_the_unmasked_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    labels = torch.randint(7, (2, 5), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    logprobs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = aggregate(sft_loss(logprobs, mask), mask, mode="token_mean", denominator=5)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[mask], labels[mask]))


def test_masked_slots_give_exactly_zero_and_unmasked_inf_shows() -> None:
    logprobs = torch.tensor([math.nan, -math.inf, -2.0, -math.inf], requires_grad=True)
    loss = sft_loss(logprobs, torch.tensor([False, False, True, True]))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0, 2.0, math.inf]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.0, -1.0]


def test_gradients_in_float64() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, torch.tensor([True, False, True])), logprobs)


def test_packed_equals_padded_and_parts_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.arange(6) < torch.tensor([[6], [0], [2], [4]])
    mask = inside & (torch.rand(4, 6, generator=generator) > 0.3)
    logprobs = torch.where(mask, -torch.rand(4, 6, dtype=torch.float64, generator=generator), math.nan)
    denominator = loss_denominator(mask, mode="token_mean")

    def mean(rows: slice) -> float:
        loss = sft_loss(logprobs[rows], mask[rows])
        return aggregate(loss, mask[rows], mode="token_mean", denominator=denominator).item()

    assert torch.equal(sft_loss(logprobs[inside], mask[inside]), sft_loss(logprobs, mask)[inside])
    assert mean(slice(0, 1)) + mean(slice(1, 2)) + mean(slice(2, 4)) == pytest.approx(mean(slice(0, 4)), rel=1e-12)


def test_half_precision_is_computed_in_float32_and_all_masked_is_zero() -> None:
    logprobs = torch.full((2, 3), math.nan, dtype=torch.bfloat16, requires_grad=True)
    loss = sft_loss(logprobs, torch.zeros(2, 3, dtype=torch.bool))
    loss.sum().backward()
    assert loss.dtype is torch.float32
    assert loss.eq(0).all()
    assert logprobs.grad is not None
    assert logprobs.grad.eq(0).all()


def test_compiles_without_a_graph_break() -> None:
    logprobs, mask = torch.tensor([-1.0, math.nan]), torch.tensor([True, False])
    assert torch.compile(sft_loss, fullgraph=True, backend="aot_eager")(logprobs, mask).tolist() == [1.0, 0.0]


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"logprobs has shape \(2,\) and mask \(3,\)"):
        sft_loss(torch.zeros(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has dtype torch\.float32"):
        sft_loss(torch.zeros(2), torch.ones(2))
    with value_checks(), pytest.raises(ValueError, match="logprobs is -inf at slot 1; 1 of 2 unmasked slots"):
        sft_loss(torch.tensor([0.0, -math.inf]), torch.ones(2, dtype=torch.bool))
