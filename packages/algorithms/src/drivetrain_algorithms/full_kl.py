"""The exact divergence of two next-token distributions, over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from drivetrain_algorithms._slots import check_choice, require_finite, values_are_read
from drivetrain_algorithms.logprobs import check_temperature

KLDirection = Literal["reverse", "forward", "jensen_shannon"]
"""Which divergence `full_vocabulary_kl` computes."""

_NUMBERS_PER_CHUNK = 2**24
"""Logits in a chunk by default: 64 MiB in float32."""


def full_vocabulary_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor,
    *,
    direction: KLDirection = "reverse",
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """The divergence of the policy from the reference at each token, exactly, over all tokens of the vocabulary.

        p = softmax(logits / T),  q = softmax(ref_logits / T),  m = ½ (p + q)

        reverse         KL(p || q) = Σᵥ pᵥ (log pᵥ - log qᵥ)
        forward         KL(q || p) = Σᵥ qᵥ (log qᵥ - log pᵥ)
        jensen_shannon  ½ KL(p || m) + ½ KL(q || m)

    Where T is the temperature. `"reverse"` is what `kl_estimate` estimates from the sampled token, here without its
    noise, and with the exact gradient: a loss, and the one of on-policy distillation, where the reference is the
    teacher. No T² is multiplied in.

    It takes a chunk of slots at a time, and computes the chunk again in the backward pass: beyond the arguments and the
    gradient of `logits`, fewer than five arrays of `chunk_size * V` numbers exist at once, and nothing is kept from the
    forward pass. No argument is copied, contiguous or not.

    See Agarwal et al., "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649

    Args:
        logits: of the policy, `[B, T, V]`, `[N, V]` or any shape with the vocabulary last. Gradients flow to this
            argument only, once. -inf is a token that cannot occur. Masked slots of any argument may hold anything.
        ref_logits: of the reference, of the same shape.
        mask: bool, of the shape without the vocabulary.
        direction: `"reverse"`, `"forward"` or `"jensen_shannon"`.
        temperature: T, a finite number above 0.
        chunk_size: how many slots are computed at a time, at least 1; None takes as many as have 2²⁴ logits.

    Returns:
        Nats per token, of the mask's shape, in float32 (float64 if either argument is); 0 at masked slots.

    Raises:
        ValueError: a shape, dtype, direction, temperature or chunk size that does not fit; with `value_checks`, NaN,
            +inf or nothing but -inf in an unmasked slot.

    Degenerate cases: equal logits give exactly 0, and a gradient of exactly 0; a token of probability 0 adds nothing,
    but where the other distribution has it: then the divergence is inf (Jensen-Shannon: at most log 2) and its gradient
    need not be finite; a masked slot gives exactly 0, and no gradient.
    """
    _check_logits(logits, ref_logits, mask)
    check_choice("direction", direction, get_args(KLDirection))
    check_temperature(temperature)
    if chunk_size is None:
        chunk_size = max(_NUMBERS_PER_CHUNK // max(logits.shape[-1], 1), 1)
    elif chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 slot")
    result: Tensor = _divergence(logits, ref_logits.detach(), mask, direction, 1.0 / temperature, chunk_size)
    return result


def _check_logits(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> None:
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool mask, for instance mask.bool()")
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if x.dim() == 0 or x.shape[:-1] != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and mask {tuple(mask.shape)}; pass logits of shape [*mask.shape, V]"
            )
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"ref_logits has a vocabulary of {ref_logits.shape[-1]} and logits of {logits.shape[-1]}; cut both to the "
            "tokens they share"
        )
    if values_are_read() and logits.numel():
        for name, x in (("logits", logits), ("ref_logits", ref_logits)):
            # NaN, +inf and nothing but -inf show in the largest one.
            require_finite(f"the largest of {name}", x.detach().amax(-1), mask, None)


def _chunks(shape: torch.Size, size: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of parts that cover a tensor of this shape, each of at most `size` slots; none of them makes a copy."""
    if not shape:
        yield ()
    elif (per_row := prod(shape[1:])) <= size:
        rows = size // max(per_row, 1)
        yield from ((slice(start, start + rows),) for start in range(0, shape[0], rows))
    else:
        yield from ((row, *rest) for row in range(shape[0]) for rest in _chunks(shape[1:], size))


def _dtype(logits: Tensor, ref_logits: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (logits.dtype, ref_logits.dtype) else torch.float32


def _log_softmax(logits: Tensor, mask: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """A tensor of its own; uniform at masked slots."""
    scaled = torch.where(mask.unsqueeze(-1), logits, 0.0).to(dtype).mul_(scale)
    return scaled.sub_(scaled.logsumexp(-1, keepdim=True))


def _terms(log_p: Tensor, log_q: Tensor, *, to_mean: bool = False) -> tuple[Tensor, Tensor]:
    """p, and the terms of KL(p || q), or of KL(p || m); a term is 0 where p is."""
    p = log_p.exp()
    gap = log_p - log_q
    if to_mean:  # log p - log m = -log(1 + ½ (q / p - 1)); where q / p is more than a float holds, p is nothing
        gap = gap.neg_().clamp_max_(80.0).expm1_().mul_(0.5).log1p_().neg_()
    return p, gap.mul_(p).masked_fill_(p == 0, 0.0)


def _chunk_divergence(log_p: Tensor, log_q: Tensor, direction: str) -> Tensor:
    match direction:
        case "reverse":
            return _terms(log_p, log_q)[1].sum(-1)
        case "forward":
            return _terms(log_q, log_p)[1].sum(-1)
    towards_p = _terms(log_p, log_q, to_mean=True)[1].sum(-1)
    return towards_p.add_(_terms(log_q, log_p, to_mean=True)[1].sum(-1)).mul_(0.5)


def _chunk_gradient(log_p: Tensor, log_q: Tensor, direction: str) -> Tensor:
    """By the logits at T = 1; `log_p` and `log_q` are overwritten."""
    if direction == "forward":
        return log_p.exp_().sub_(log_q.exp_())
    # p (log p - log q - KL(p || q)), or ½ p (log p - log m - KL(p || m)), where what m changes cancels out.
    to_mean = direction == "jensen_shannon"
    p, gradient = _terms(log_p, log_q, to_mean=to_mean)
    gradient.sub_(p.mul_(gradient.sum(-1, keepdim=True)))
    return gradient.mul_(0.5) if to_mean else gradient


# Operators of their own, and no `torch.autograd.Function`: `torch.compile` takes them as they are, whatever the number
# of slots, and neither unrolls the loop over chunks nor keeps what a chunk computes.
@torch.library.custom_op("drivetrain_algorithms::divergence", mutates_args=())
def _divergence(
    logits: Tensor, ref_logits: Tensor, mask: Tensor, direction: str, scale: float, chunk_size: int
) -> Tensor:
    result = torch.empty(mask.shape, dtype=_dtype(logits, ref_logits), device=logits.device)
    for chunk in _chunks(mask.shape, chunk_size):
        kept = mask[chunk]
        log_p = _log_softmax(logits[chunk], kept, scale, result.dtype)
        log_q = _log_softmax(ref_logits[chunk], kept, scale, result.dtype)
        # Rounding alone can take a divergence below 0.
        result[chunk] = torch.where(kept, _chunk_divergence(log_p, log_q, direction).clamp_min_(0.0), 0.0)
        del log_p, log_q  # before those of the next chunk
    return result


@torch.library.custom_op("drivetrain_algorithms::divergence_gradient", mutates_args=())
def _gradient(
    weight: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor,
    direction: str,
    scale: float,
    chunk_size: int,
) -> Tensor:
    dtype = _dtype(logits, ref_logits)
    result = torch.empty_like(logits)
    for chunk in _chunks(mask.shape, chunk_size):
        kept = mask[chunk]
        log_p = _log_softmax(logits[chunk], kept, scale, dtype)
        log_q = _log_softmax(ref_logits[chunk], kept, scale, dtype)
        gradient = _chunk_gradient(log_p, log_q, direction).mul_((scale * weight[chunk]).unsqueeze(-1))
        result[chunk] = gradient.masked_fill_(~kept.unsqueeze(-1), 0.0)
        del log_p, log_q, gradient
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.direction, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
    gradient = _gradient(weight, *ctx.saved_tensors, ctx.direction, ctx.scale, ctx.chunk_size)
    return gradient, None, None, None, None, None


_divergence.register_fake(
    lambda logits, ref_logits, mask, *_: torch.empty(mask.shape, dtype=_dtype(logits, ref_logits), device=logits.device)
)
_gradient.register_fake(lambda _weight, logits, *_: torch.empty_like(logits))
_divergence.register_autograd(_backward, setup_context=_setup_context)
