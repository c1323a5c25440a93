"""Whitening: a tensor brought to mean 0 and variance 1, over all ranks."""

from __future__ import annotations

from torch import Tensor

from drivetrain_algorithms._moments import Reduce, deviations, means, squares_of
from drivetrain_algorithms._slots import check_slots, masked

_EPSILON = 1e-8


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, reduce: Reduce | None = None) -> Tensor:
    """Scale to unit variance, and shift to mean 0, over the unmasked slots.

        x̂ = (x - μ) / √(σ² + 10⁻⁸)     and + μ again with shift_mean=False
        μ = Σ x / n,  σ² = Σ (x - μ)² / (n - 1)

    Where the sums run over the n unmasked slots of all ranks. The unit is the slot. Of a number per token that is the
    token, so that a long response weighs more than a short one; of a number per response, `[B]` with a mask `[B]`, it
    is the response (then `spread_over_tokens` gives it to the tokens).

    Applied to the advantages of `gae`, per token, it is what PPO implementations do before the policy loss. Nothing in
    this library whitens unasked, but for the REINFORCE++ functions, whose last step it is by definition: do not whiten
    theirs again. Advantages that `group_advantages` made are normalised within their groups already; whitening them is
    a further step (GDPO's last one), which trades the scale that each group has for one of the batch. The call takes
    everything that the rank brings to the optimizer step, before that is split into micro-batches.

    See Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022), detail 7,
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/

    Args:
        x: `[B, T]`, `[N]`, `[B]` or any shape. Masked slots may hold anything, also NaN.
        mask: bool, of the same shape.
        shift_mean: move the mean to 0; False keeps it where it is.
        reduce: sums a tensor over all ranks and returns the sum; called twice, on every rank, also on one without an
            unmasked slot. All ranks then share one μ and σ, those of a single process that holds everything. None:
            there is one rank.

    Returns:
        `x̂`, of the same shape, in float32 (float64 for float64 input); 0 at masked slots. Differentiable on one rank.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Degenerate cases: equal numbers, and a single unmasked slot, give 0 (μ with `shift_mean=False`); no unmasked slot
    gives zeros. Whitening twice changes nothing but for the 10⁻⁸.
    """
    check_slots(mask, x=x)
    x = masked(x, mask)
    statistics = means(x.unsqueeze(0), mask, reduce)
    deviation = deviations(x.unsqueeze(0), statistics.mean, mask)
    variance = squares_of(deviation, reduce) / (statistics.num_slots - 1.0).clamp(min=1.0)
    whitened = deviation[0] * (variance + _EPSILON).rsqrt()
    return masked((whitened if shift_mean else whitened + statistics.mean).to(x.dtype), mask)
