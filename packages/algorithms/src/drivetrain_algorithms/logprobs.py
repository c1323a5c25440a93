"""Log-probabilities and entropies in plain torch: what a fused or sharded computation of them must equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drivetrain_algorithms._slots import as_float, require_finite, values_are_read


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """The log-probability of each label.

        log π(yₜ) = zₜ[yₜ] - log Σᵥ exp zₜ[v],  zₜ = logits / T

    Where T is the temperature of the policy: logits are divided by it, log-probabilities never are. Labels are aligned
    with the logits, so whoever assembles the batch shifts: the logits in slot t are those that predict label t.

    Args:
        logits: `[B, T, V]`, `[N, V]` or any shape with the vocabulary last. Gradients flow to this argument only. -inf
            is a token that cannot occur.
        labels: int, of the shape without the vocabulary, each in [0, V). No number is special, -100 neither: the mask
            says which slots have a label.
        temperature: T, a finite number above 0.
        mask: bool, of the shape of the labels. Masked slots of any argument may hold anything. None: all count.

    Returns:
        Nats, of the shape of the labels, in float32 (float64 for float64 logits); 0 at masked slots.

    Raises:
        ValueError: a shape, dtype or temperature that does not fit; with `value_checks`, an unmasked label out of
            range, or an unmasked slot with NaN, +inf or nothing but -inf. Without, an unmasked label out of
            range is seen on a CPU, and is an assertion of the device's on an accelerator.

    Degenerate cases: a vocabulary of one token gives 0; a label whose logit is -inf gives -inf; a masked slot has a
    log-probability and a gradient of exactly 0.
    """
    check_temperature(temperature)
    mask = _check_logits(logits, labels, mask)
    labels = torch.where(mask, labels.to(torch.int64), 0)
    logprobs = _log_softmax(logits, mask, temperature).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.where(mask, logprobs, 0.0)


def token_entropy(logits: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """The entropy of each next-token distribution.

        Hₜ = -Σᵥ pₜ[v] log pₜ[v],  pₜ = softmax(logits / T)

    Where T is the temperature of the policy.

    Args:
        logits: `[B, T, V]`, `[N, V]` or any shape with the vocabulary last. -inf is a token that cannot occur.
        temperature: T, a finite number above 0.
        mask: bool, of the shape without the vocabulary. Masked slots may hold anything. None: all count.

    Returns:
        Nats, of the shape without the vocabulary, in float32 (float64 for float64 logits), with the gradient of
        `logits`; 0 at masked slots.

    Raises:
        ValueError: a shape, dtype or temperature that does not fit; with `value_checks`, an unmasked slot with NaN,
            +inf or nothing but -inf.

    Degenerate cases: one token that can occur gives 0, V equal logits log V; a token of probability 0 adds nothing, in
    the gradient neither; a masked slot has an entropy and a gradient of exactly 0.
    """
    check_temperature(temperature)
    mask = _check_logits(logits, None, mask)
    log_p = _log_softmax(logits, mask, temperature)
    # 0 * -inf is no number, neither here nor in the gradient.
    entropy = -(log_p.exp() * torch.where(log_p == -math.inf, 0.0, log_p)).sum(-1)
    return torch.where(mask, entropy, 0.0)


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The log-probability of each label from hidden states and a linear head.

        zₜ = W hₜ + b
        zₜ = c tanh(zₜ / c)     with a soft cap c
        log π(yₜ) = (zₜ / T)[yₜ] - log Σᵥ exp (zₜ / T)[v]

    The products run in float32 at least, whatever hidden states and head are kept in. All logits exist at once: it is
    what to test against, not what to train with.

    See Gemma Team, "Gemma 2" (2024), https://arxiv.org/abs/2408.00118, for the soft cap of the logits.

    Args:
        hidden: `h`, `[B, T, D]`, `[N, D]` or any shape with the width last.
        weight: `W`, `[V, D]`. Gradients flow to hidden states, weight and bias.
        labels: int, of the shape of the hidden states without the width, each in [0, V), as in `token_logprobs`.
        temperature: T, a finite number above 0; it divides what is capped already.
        soft_cap: c, a finite number above 0; None for none.
        bias: `b`, `[V]`, or None.
        mask: bool, of the shape of the labels. Masked slots of hidden states and labels may hold anything. None: all
            count.

    Returns:
        Nats, of the shape of the labels, in float32 (float64 for float64 hidden states or weight); 0 at masked slots.

    Raises:
        ValueError: a shape, dtype, temperature or cap that does not fit; with `value_checks`, as in `token_logprobs`.

    Degenerate cases: those of `token_logprobs`; a masked slot adds nothing to any gradient.
    """
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; pass [..., D] and [V, D]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one per token of the vocabulary, [{len(weight)}]")
    if soft_cap is not None and not 0.0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap={soft_cap} must be a finite number above 0; pass None to leave it out")
    if mask is not None and mask.shape == hidden.shape[:-1]:
        hidden = torch.where(mask.bool().unsqueeze(-1), hidden, 0.0)
    dtype = torch.promote_types(as_float(hidden).dtype, as_float(weight).dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap) + 0.0 * logits  # the cap would hide an inf
    return token_logprobs(logits, labels, temperature=temperature, mask=mask)


def check_temperature(temperature: float) -> None:
    """Require a finite number above 0."""
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a finite number above 0; greedy sampling has no log-probs")


def _log_softmax(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Uniform, and without gradient, at masked slots."""
    return (torch.where(mask.unsqueeze(-1), as_float(logits), 0.0) / temperature).log_softmax(-1)


def _check_logits(logits: Tensor, labels: Tensor | None, mask: Tensor | None) -> Tensor:
    """Require shapes that fit, and return the mask."""
    if logits.dim() == 0:
        raise ValueError("logits has shape (); pass the vocabulary as the last dimension, for instance [N, V]")
    slots = logits.shape[:-1]
    if labels is not None and (labels.shape != slots or labels.is_floating_point() or labels.dtype is torch.bool):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and dtype {labels.dtype}; pass ids of shape {tuple(slots)}, "
            "that of the logits without the vocabulary"
        )
    if mask is None:
        mask = torch.ones(slots, dtype=torch.bool, device=logits.device)
    elif mask.shape != slots or mask.dtype is not torch.bool:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; pass bool of shape {tuple(slots)}, "
            "that of the logits without the vocabulary"
        )
    if values_are_read() and logits.numel():
        # NaN, +inf and nothing but -inf show in the largest one.
        require_finite("the largest of logits", logits.detach().amax(-1), mask, None)
    free = labels is not None and labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if labels is not None and logits.numel() and (free or values_are_read()):
        outside = (mask & ((labels < 0) | (labels >= logits.shape[-1]))).flatten().nonzero().flatten()
        if len(outside):
            first = int(outside[0])
            raise ValueError(
                f"labels is {int(labels.flatten()[first])} at slot {first}; pass ids from 0 to "
                f"{logits.shape[-1] - 1}, and mask the slots that have none"
            )
    return mask
