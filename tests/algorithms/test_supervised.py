import math

import torch
from drivetrain_algorithms import aggregate, sft_loss


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
