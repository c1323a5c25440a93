"""Log-probs and entropies of labels from hidden states, without ever holding all the logits.

N: tokens. H: hidden size. V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Logits held at a time, over all tokens of a chunk: 512 MiB in fp32.
_LOGITS_PER_CHUNK = 2**27


class TokenOutputs(NamedTuple):
    """What a policy says about the labels of a batch."""

    logprobs: Tensor
    """fp32 `[N]`: log pi(label | the tokens before it); 0 where `loss_mask` is false."""
    entropy: Tensor | None
    """fp32 `[N]`: entropy, in nats, of the distribution the label was drawn from; 0 where `loss_mask` is false."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
) -> TokenOutputs:
    """Log-softmax of a linear head at the labels.

        logits = (hidden @ weight.T + bias) / temperature
        logprobs = logits[label] - logsumexp(logits)
        entropy = -sum p log p, where p = softmax(logits)

    The logits are made chunk by chunk, and made again in the backward pass: memory is `[chunk, V]`, never `[N, V]`.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`, the head's weight.
        bias: `[V]` or None.
        labels: int64 `[N]`.
        temperature: of the softmax.
        entropy: whether to compute the entropy too.
        dtype: of the matrix products (the softmax is always fp32); that of `hidden` by default.
    """
    dtype = dtype or hidden.dtype
    logprobs, entropies = _apply(hidden, weight, bias, labels, 1.0 / temperature, entropy, dtype)
    return TokenOutputs(logprobs, entropies if entropy else None)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        with_entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        norms = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        cast = weight.to(dtype)
        for rows in _chunks(count, weight.shape[0]):
            logits = _logits(hidden[rows], cast, bias, scale, dtype)
            norms[rows] = norm = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, labels[rows, None])[:, 0] - norm
            if with_entropy:
                log_p = logits.sub_(norm[:, None])
                p = log_p.exp()
                # A logit of -inf has probability 0 and adds nothing.
                entropies[rows] = -p.mul_(log_p.clamp_min_(torch.finfo(log_p.dtype).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, norms, entropies)
        ctx.scale, ctx.with_entropy, ctx.dtype = scale, with_entropy, dtype
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, norms, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast = weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            log_p = _logits(hidden[rows], cast, bias, ctx.scale, ctx.dtype).sub_(norms[rows, None])
            g = grad_logprobs[rows, None]
            if ctx.with_entropy:
                # d entropy / d logit_j = -p_j (log p_j + entropy), d logprob / d logit_j = [j = label] - p_j
                e = grad_entropies[rows, None]
                p = log_p.exp()
                log_p.clamp_min_(torch.finfo(log_p.dtype).min)
                grad = p.mul_(log_p.add_(entropies[rows, None]).mul_(-e).sub_(g))
            else:
                grad = log_p.exp_().mul_(-g)
            grad.scatter_add_(-1, labels[rows, None], g)
            grad.mul_(ctx.scale)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            cast_grad = grad.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = cast_grad @ cast
            if grad_weight is not None:
                grad_weight += cast_grad.T @ hidden[rows].to(ctx.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


_apply: Callable[..., tuple[Tensor, Tensor]] = _HeadLogprobs.apply


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """fp32 `[chunk, V]`, a tensor of its own."""
    logits = (hidden.to(dtype) @ weight.T).float()
    if bias is not None:
        logits += bias
    return logits if scale == 1.0 else logits.mul_(scale)


def _chunks(count: int, vocabulary: int) -> list[slice]:
    size = max(_LOGITS_PER_CHUNK // vocabulary, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
