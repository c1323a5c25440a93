import pytest
import torch
from drivetrain_learner import logprobs as module
from drivetrain_learner.logprobs import head_logprobs
from torch import Tensor


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(*, with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator).requires_grad_()
    weight = torch.randn(11, 5, generator=generator).requires_grad_()
    bias = torch.randn(11, generator=generator).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(0, 11, (7,), generator=generator)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_give_the_whole_softmax_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk: int, with_entropy: bool, with_bias: bool
) -> None:
    monkeypatch.setattr(module, "_LOGITS_PER_CHUNK", chunk * 11)
    hidden, weight, bias, labels = inputs(with_bias=with_bias)
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    expected, expected_entropy = plain(hidden, weight, bias, labels, 0.7)
    result = head_logprobs(hidden, weight, bias, labels, temperature=0.7, entropy=with_entropy)
    torch.testing.assert_close(result.logprobs, expected)

    slope = torch.linspace(-2, 3, 7)
    total, expected_total = (result.logprobs * slope).sum(), (expected * slope).sum()
    if with_entropy:
        torch.testing.assert_close(result.entropy, expected_entropy)
        total, expected_total = (
            total + (result.entropy * slope**2).sum(),
            expected_total + (expected_entropy * slope**2).sum(),
        )
    else:
        assert result.entropy is None
    for got, want in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected_total, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_two_equal_logits() -> None:
    """log 1/2 at temperature 1; the entropy is log 2 at any temperature."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [3.0]])
    for temperature in (1.0, 0.1):
        result = head_logprobs(hidden, weight, None, torch.tensor([1]), temperature=temperature, entropy=True)
        assert result.logprobs.item() == pytest.approx(-0.6931472)
        assert result.entropy is not None
        assert result.entropy.item() == pytest.approx(0.6931472)


def test_a_token_that_cannot_occur_leaves_the_entropy_finite() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, float("-inf")])
    result = head_logprobs(hidden, torch.zeros(3, 1), bias, torch.tensor([0]), entropy=True)
    assert result.entropy is not None
    assert result.entropy.item() == pytest.approx(0.6931472)
    (result.logprobs + result.entropy).backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == 0.0


def test_no_tokens() -> None:
    hidden, weight, _, _ = inputs(with_bias=False)
    result = head_logprobs(hidden[:0], weight, None, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert result.logprobs.shape == (0,)
    result.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_half_precision_products_with_an_fp32_softmax() -> None:
    hidden, weight, _, labels = inputs(with_bias=False)
    result = head_logprobs(hidden, weight, None, labels, dtype=torch.bfloat16)
    expected, _ = plain(hidden.bfloat16().float(), weight.bfloat16().float(), None, labels, 1.0)
    assert result.logprobs.dtype == torch.float32
    torch.testing.assert_close(result.logprobs, expected, rtol=0, atol=0.05)
    result.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
