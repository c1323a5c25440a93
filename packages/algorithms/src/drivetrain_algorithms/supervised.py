"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from drivetrain_algorithms._slots import check_slots, masked


def sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """The negative log-likelihood of the labels, per token.

        Lₜ = -log π(yₜ)

    Where yₜ is the label in slot t. Summed and divided by the number of unmasked slots (`aggregate` with
    `"token_mean"`) it is the usual cross-entropy.

    See Ouyang et al., "Training Language Models to Follow Instructions with Human Feedback" (2022),
    https://arxiv.org/abs/2203.02155

    Args:
        logprobs: `log π(yₜ)`, `[B, T]`, `[N]` or any shape. Masked slots may hold anything, also NaN and inf.
        mask: bool, of the same shape; True at the tokens that enter the loss.

    Returns:
        Nats per token, of the same shape, in float32 (float64 for float64 input); 0 at masked slots.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: a masked slot has a loss and a gradient of exactly 0; an unmasked token of probability 0 has an
    infinite loss.
    """
    check_slots(mask, logprobs=logprobs)
    return -masked(logprobs, mask)
