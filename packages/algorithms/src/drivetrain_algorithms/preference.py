"""Losses of pairs of responses of which one is preferred: direct preference optimisation, and reward models."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from drivetrain_algorithms._groups import check_not_negative
from drivetrain_algorithms._slots import (
    as_float,
    check_batch,
    check_choice,
    check_coefficient,
    check_finite_values,
    masked,
    sequence_sums,
    token_counts,
)

DPOKind = Literal["sigmoid", "hinge", "robust"]
"""What `dpo_loss` does with a margin."""


class PreferenceLoss(NamedTuple):
    """A loss per pair and what it was made of. Only `loss` carries a gradient."""

    loss: Tensor
    """What to minimise, `[B]`. Sum it, and divide by the number of pairs of the whole step: all micro-batches and all
    ranks. Then the step does not depend on how its pairs were split."""
    chosen_rewards: Tensor
    """What the model pays the chosen response, `[B]`."""
    rejected_rewards: Tensor
    """What it pays the rejected one, `[B]`."""
    margins: Tensor
    """`chosen_rewards - rejected_rewards`, `[B]`."""
    accurate: Tensor
    """bool, `[B]`: the chosen response is paid more than the rejected one; False where they are paid the same."""


def sequence_logprobs(
    logprobs: Tensor, mask: Tensor, *, average: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The log-probability of each whole response.

        log π(y) = Σₜ log π(yₜ)
        log π(y) / |y|             with average=True

    Where yₜ is the token in slot t, the sum runs over the unmasked slots of the sequence, and |y| is their number.

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, or packed `[N]`. Masked slots may hold anything, also NaN and inf.
        mask: bool, of the same shape; True at the tokens of the response, False at those of the prompt.
        average: divide by the number of tokens, for `ipo_loss` and for length-normalised `dpo_loss`.
        cu_seqlens: `[S + 1]` int, for a packed batch.

    Returns:
        Nats, `[B]` or `[S]`, in float32 (float64 for float64 input), with the gradient of `logprobs`.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: a sequence without an unmasked slot has the log-probability 0, that of an empty response; masked
    slots have a gradient of exactly 0; a log-probability that is not finite in an unmasked slot shows in its own
    sequence and in no other.
    """
    check_batch(mask, cu_seqlens, logprobs=logprobs)
    sums = sequence_sums(masked(logprobs, mask), cu_seqlens)
    return sums / token_counts(mask, cu_seqlens).clamp(min=1) if average else sums


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Direct preference optimisation: the policy learns from pairs, as its own reward model.

        r(y) = β (log π(y) - log π_ref(y))
        m = r(y_chosen) - r(y_rejected)
        sigmoid    L = -(1 - ε) log σ(m) - ε log σ(-m)
        robust     L = (-(1 - ε) log σ(m) + ε log σ(-m)) / (1 - 2ε)
        hinge      L = max(0, 1 - m)

    Where log π(y) is the log-probability of a whole response, as `sequence_logprobs` gives it, and ε the chance that a
    label is wrong: `"sigmoid"` with ε = 0 is DPO, and with ε > 0 conservative DPO, which stops at the margin
    log((1 - ε) / ε); `"robust"` is unbiased under flipped labels; `"hinge"` is the loss of SLiC-HF, with its margin in
    units of β.

    With log-probabilities per token (`average=True`) it is length-normalised DPO, with a β larger by about the length
    of a response. Zeros in place of both references make it reference-free.

    See Rafailov et al., "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290; Mitchell, "A Note on
    DPO with Noisy Preferences" (2023), https://ericmitchell.ai/cdpo.pdf; Chowdhury et al., "Provably Robust DPO"
    (2024), https://arxiv.org/abs/2403.00409; Zhao et al., "SLiC-HF" (2023), https://arxiv.org/abs/2305.10425; for the
    length-normalised form, Lambert et al., "Tulu 3" (2024), https://arxiv.org/abs/2411.15124

    Args:
        chosen_logprobs: `log π` of the preferred responses, `[B]`. Gradients flow to this argument and the next.
        rejected_logprobs: `log π` of the others, `[B]`, pair by pair.
        ref_chosen_logprobs: `log π_ref` of the preferred responses, `[B]`.
        ref_rejected_logprobs: `log π_ref` of the others, `[B]`.
        beta: β, above 0, per nat: how costly it is to leave the reference.
        kind: `"sigmoid"`, `"robust"` or `"hinge"`.
        label_smoothing: ε, at least 0 and below 0.5; 0 for `"hinge"`.

    Returns:
        `PreferenceLoss`, per pair, in float32 (float64 for float64 input); its rewards are r. Divide the sum of the
        losses by the number of pairs of the whole step.

    Raises:
        ValueError: a shape, dtype, coefficient or kind that does not fit.

    Degenerate cases: before the first update π = π_ref, the margin is 0 and the loss log 2 (1 for `"hinge"`); margins
    of any size give finite losses; no pairs give an empty loss, whose sum is 0; a pair with a log-probability that is
    not finite, also one of -inf for a rejected response, has a loss and a gradient of NaN.
    """
    _check_pairs(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    _check_beta(beta)
    check_choice("kind", kind, get_args(DPOKind))
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be at least 0 and below 0.5, where labels say nothing"
        )
    chosen = beta * (as_float(chosen_logprobs) - as_float(ref_chosen_logprobs).detach())
    rejected = beta * (as_float(rejected_logprobs) - as_float(ref_rejected_logprobs).detach())
    margins = _shown(chosen - rejected)
    match kind:
        case "sigmoid":
            loss = -(1.0 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
        case "robust":
            loss = -(1.0 - label_smoothing) * logsigmoid(margins) + label_smoothing * logsigmoid(-margins)
            loss = loss / (1.0 - 2.0 * label_smoothing)
        case _:
            if label_smoothing:
                raise ValueError(f"label_smoothing={label_smoothing} has no meaning for kind='hinge'; pass 0")
            loss = torch.relu(1.0 - margins)
    return _preference_loss(loss, chosen, rejected)


def ipo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
) -> PreferenceLoss:
    """Identity preference optimisation: a margin to reach, and not to pass.

        h = (log π(y_chosen) - log π_ref(y_chosen)) - (log π(y_rejected) - log π_ref(y_rejected))
        L = (h - 1 / (2β))²

    Where log π(y) is, as in TRL, the log-probability per token (`sequence_logprobs` with `average=True`),
    so that the margin to reach is one per token, whatever the lengths; the paper's own is that of whole responses. β is
    the paper's τ. Where DPO drives certain preferences ever further apart, this one stops at 1 / (2β).

    See Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), equation 17,
    https://arxiv.org/abs/2310.12036

    Args:
        chosen_logprobs: `log π` of the preferred responses, `[B]`. Gradients flow to this argument and the next.
        rejected_logprobs: `log π` of the others, `[B]`, pair by pair.
        ref_chosen_logprobs: `log π_ref` of the preferred responses, `[B]`.
        ref_rejected_logprobs: `log π_ref` of the others, `[B]`.
        beta: β, above 0, per nat.

    Returns:
        `PreferenceLoss`, per pair, in float32 (float64 for float64 input); its rewards are β (log π - log π_ref), so
        that the margin to reach reads ½.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: before the first update π = π_ref, h is 0 and the loss 1 / (4β²); no pairs give an empty loss,
    whose sum is 0; a pair with a log-probability that is not finite has a loss and a gradient of NaN.
    """
    _check_pairs(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    _check_beta(beta)
    chosen = as_float(chosen_logprobs) - as_float(ref_chosen_logprobs).detach()
    rejected = as_float(rejected_logprobs) - as_float(ref_rejected_logprobs).detach()
    loss = (_shown(chosen - rejected) - 0.5 / beta).square()
    return _preference_loss(loss, beta * chosen, beta * rejected)


def reward_model_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, margin: Tensor | None = None, center_coef: float = 0.0
) -> PreferenceLoss:
    """The loss of a reward model: the log-likelihood of preferences under the model of Bradley and Terry.

        L = -log σ(s_chosen - s_rejected - m) + c (s_chosen + s_rejected)²

    Where s is the model's score of a whole response, m how much better the chosen one was judged to be, and c the
    weight of a term that centres the scores at 0, which preferences alone leave free.

    See Ouyang et al., "Training Language Models to Follow Instructions with Human Feedback" (2022),
    https://arxiv.org/abs/2203.02155; for the margin, Touvron et al., "Llama 2" (2023), section 3.2.2,
    https://arxiv.org/abs/2307.09288; for the centring, Eisenstein et al., "Helping or Herding?" (2023),
    https://arxiv.org/abs/2312.09244

    Args:
        chosen_scores: `s` of the preferred responses, `[B]`. Gradients flow to this argument and the next.
        rejected_scores: `s` of the others, `[B]`, pair by pair.
        margin: `m`, `[B]`, at least 0, in units of the score; None: no margin.
        center_coef: c, at least 0; 0.01 is the usual choice where it is wanted.

    Returns:
        `PreferenceLoss`, per pair, in float32 (float64 for float64 input); its rewards are the scores, and its margins
        do not subtract m.

    Raises:
        ValueError: a shape, dtype or coefficient that does not fit.

    Degenerate cases: equal scores without a margin give a loss of log 2; differences of any size give finite losses; no
    pairs give an empty loss, whose sum is 0; a pair with a score that is not finite has a loss and a gradient of NaN.
    """
    margins = {} if margin is None else {"margin": margin}
    _check_pairs(chosen_scores=chosen_scores, rejected_scores=rejected_scores, **margins)
    if margin is not None:
        check_not_negative("margin", margin)
    check_coefficient("center_coef", center_coef)
    chosen, rejected = as_float(chosen_scores), as_float(rejected_scores)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - as_float(margin).detach()
    loss = -logsigmoid(_shown(difference))
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    return _preference_loss(loss, chosen, rejected)


def _shown(x: Tensor) -> Tensor:
    """`x`; NaN, in value and gradient, where it is not finite: a margin of inf would have a loss of 0."""
    return x * torch.where(x.detach().isfinite(), 1.0, torch.nan)


def _preference_loss(loss: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor) -> PreferenceLoss:
    chosen_rewards, rejected_rewards = chosen_rewards.detach(), rejected_rewards.detach()
    accurate = chosen_rewards > rejected_rewards
    return PreferenceLoss(loss, chosen_rewards, rejected_rewards, chosen_rewards - rejected_rewards, accurate)


def _check_pairs(**tensors: Tensor) -> None:
    """Require one number per pair in every tensor."""
    first_name, first = next(iter(tensors.items()))
    if first.dim() != 1:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)}; pass one number per pair, [B]")
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and {first_name} {tuple(first.shape)}; "
                "pass one number per pair, [B]"
            )
    check_finite_values(**tensors)


def _check_beta(beta: float) -> None:
    check_coefficient("beta", beta)
    if beta == 0.0:
        raise ValueError(f"beta={beta} must be above 0; at 0 the pairs say nothing")
