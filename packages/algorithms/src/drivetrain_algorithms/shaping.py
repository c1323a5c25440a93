"""Shaping of scores before advantages are made of them: penalties, groups left out, a running scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drivetrain_algorithms._groups import check_groups, check_not_negative, lay_out
from drivetrain_algorithms._moments import Reduce, deviations, means, squares_of
from drivetrain_algorithms._slots import as_float, check_coefficient, check_finite_values


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, penalty_factor: float) -> Tensor:
    """A score to add, for responses that come close to the limit: DAPO's soft punishment.

        P(n) = 0                                       where n ≤ L - b
        P(n) = -p (n - (L - b)) / b                    where L - b < n ≤ L
        P(n) = -p                                      where L < n

    Where n is the length of a response, L the limit, b the length of the buffer before it, and p what a response at the
    limit pays. A response cut off at the limit has n = L and pays all of it.

    See Yu et al., "DAPO" (2025), equation 13, https://arxiv.org/abs/2503.14476, where p is 1, L 20,480 and b 4,096

    Args:
        lengths: n, `[B]` int: tokens in each response.
        max_length: L, in tokens, at least 1.
        buffer: b, in tokens, from 0 to `max_length`.
        penalty_factor: p, at least 0, in units of the score.

    Returns:
        `P`, `[B]`, float32, from -p to 0.

    Raises:
        ValueError: a shape, dtype or number that does not fit; or a negative length, which on an accelerator is only
            seen under `value_checks`.

    Degenerate cases: with `buffer=0` a response of length L pays nothing, and a longer one everything; an empty
    response pays nothing, unless the buffer is the whole limit, when each token costs p / L.
    """
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} and dtype {lengths.dtype}; pass [B] int32 or int64, tokens"
        )
    if max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1 token")
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 0 and max_length={max_length}")
    check_coefficient("penalty_factor", penalty_factor)
    check_not_negative("lengths", lengths)
    exceeding = (lengths.long() - (max_length - buffer)).clamp(min=0)
    # Without a buffer there is nothing to divide by: one token too many is already all of it.
    share = (exceeding.float() / max(buffer, 1)).clamp(max=1.0)
    return 0.0 - penalty_factor * share


def filter_groups(
    scores: Tensor,
    group_ids: Tensor,
    *,
    tolerance: float = 0.0,
    low: float = -math.inf,
    high: float = math.inf,
    keep_single: bool = False,
) -> Tensor:
    """Which responses are worth training on: those of groups whose scores differ.

        kept = max s - min s > δ  and  low < mean s < high

    Where max, min and mean run over the scores of a response's group. Where all scores are the same, every advantage
    that compares siblings is 0, and the group only takes room: DAPO's dynamic sampling leaves it out, and samples other
    prompts until the batch is full again. Leave responses out of the mask, so that they are in no denominator:
    `mask & spread_over_tokens(kept, mask, cu_seqlens=cu_seqlens)`.

    The defaults are verl's `filter_groups` (but for groups of one: `keep_single`) with the scores as its metric, and
    SkyRL's `filter`. `low=0.0, high=1.0` is OpenRLHF's `dynamic_filtering_reward_range` of 0 1; with `tolerance=-1.0`
    the bounds alone decide, as they do there.

    See Yu et al., "DAPO" (2025), section 3.2, https://arxiv.org/abs/2503.14476

    Args:
        scores: `s`, `[B]`, one per response: the reward, or another metric such as whether the answer is right. Take it
            before an `overlong_penalty`, which lets scores differ that do not.
        group_ids: `[B]` int64 in [0, B), as for `group_advantages`; groups are whole.
        tolerance: δ: by how much scores have to differ, in units of the score. Below 0 also equal ones do.
        low: what a group's mean has to be above.
        high: what a group's mean has to be below.
        keep_single: whether a group of one counts as one whose scores differ, for advantages that do not compare
            siblings.

    Returns:
        bool, `[B]`, the same throughout a group.

    Raises:
        ValueError: a shape, dtype or bound that does not fit; or an id out of range, as for `group_advantages`.

    Degenerate cases: equal scores are left out, and so is a group of one, unless `keep_single`; a group with a score
    that is not finite is kept, so that it shows in the loss and is not lost in silence; no responses give none.
    """
    check_groups(group_ids, scores=scores)
    if not -math.inf < tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance} must be a finite number; 0 keeps all groups whose scores differ")
    if not low < high:
        raise ValueError(f"low={low} must be below high={high}; a group's mean has to lie between them")
    if scores.numel() == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    groups = lay_out(group_ids, scores)
    ordered = scores.detach()[groups.order].double()
    spread = ordered[groups.bounds[groups.group + 1] - 1] - ordered[groups.bounds[groups.group]]
    sizes = groups.sizes()
    mean = groups.sums(ordered) / sizes
    differing = spread > tolerance
    if keep_single:
        differing = differing | (sizes == 1)
    kept = (differing & (low < mean) & (mean < high)) | ~spread.isfinite()
    return groups.in_batch_order(kept)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardNormalizer:
    """Brings scores to a constant scale, by the mean and variance of all scores seen so far.

        ŝ = clip((s - μ) / σ, -c, c)     (without - μ for shift_mean=False)
        μ = Σ s / n,  σ² = Σ (s - μ)² / (n - 1)

    Where the sums run over all n scores that `update` was told, on all ranks. The state is three numbers. They are
    float64 scalars on the device of the scores, not Python floats, so that neither `update` nor `normalize` waits for
    it; `state_dict` does, once per checkpoint. The variance is merged batch by batch from squares about each batch's
    own mean: a large mean costs no digits, and the state does not depend on how the scores were split over ranks or
    updates.

    See Chan et al., "Algorithms for Computing the Sample Variance" (1983), https://doi.org/10.2307/2683386, for the
    merge; von Werra et al., TRL's PPO trainer (2020), https://github.com/huggingface/trl, for `shift_mean` and `clip`

    Example:
        >>> normalizer = RewardNormalizer(clip=5.0).update(torch.tensor([1.0, 2.0, 3.0]))
        >>> normalizer.normalize(torch.tensor([2.0, 4.0, 100.0]))
        tensor([0., 2., 5.])
        >>> normalizer.state_dict()
        {'count': 3.0, 'mean': 2.0, 'sum_squares': 2.0}
    """

    shift_mean: bool = True
    """Whether the mean is moved to 0; False only scales, which keeps the sign of a score."""
    clip: float = math.inf
    """c, above 0: the largest size of a normalised score."""
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """n, a scalar, float64."""
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """μ, a scalar, float64."""
    sum_squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """`Σ (s - μ)²`, a scalar, float64."""

    def __post_init__(self) -> None:
        if not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} must be above 0; pass math.inf for no clipping")

    def update(self, scores: Tensor, *, reduce: Reduce | None = None) -> RewardNormalizer:
        """Return the normaliser that has seen these scores too.

        Args:
            scores: `s`, `[B]`: all scores of this rank's share of a step, in any order; there may be none.
            reduce: sums a tensor over all ranks and returns the sum; called twice, on every rank. None: there is one
                rank.

        Raises:
            ValueError: a shape that does not fit.

        Degenerate cases: no scores on any rank leave the state as it is; a score that is not finite makes the state,
        and all that is normalised with it, NaN.
        """
        _check_scores(scores)
        rows = scores.detach().double().unsqueeze(0)
        every = torch.ones_like(scores, dtype=torch.bool)
        statistics = means(rows, every, reduce)
        squares = squares_of(deviations(rows, statistics.mean, every), reduce)
        (seen, mean, sum_squares), added = self._state(scores.device), statistics.num_slots
        total = seen + added
        shift, share = statistics.mean[0] - mean, added / total.clamp(min=1.0)
        return replace(
            self,
            count=total,
            mean=mean + shift * share,
            sum_squares=sum_squares + squares[0] + shift.square() * seen * share,
        )

    def normalize(self, scores: Tensor) -> Tensor:
        """Scores in standard deviations of all that `update` was told; tell it of these first.

        Args:
            scores: `s`, `[B]`.

        Returns:
            `ŝ`, `[B]`, in float32 (float64 for float64 input).

        Raises:
            ValueError: a shape that does not fit.

        Degenerate cases: where scores have no variance yet (fewer than two, or all equal) σ counts as 1, and where
        none was seen μ is 0.
        """
        _check_scores(scores)
        count, mean, sum_squares = self._state(scores.device)
        deviation = (sum_squares / (count - 1.0).clamp(min=1.0)).sqrt()
        # Equal numbers that are no sums of powers of two may deviate by their rounding, which is no scale. NaN stays.
        scale = torch.where(deviation <= 1e-12 * mean.abs(), 1.0, deviation)
        shifted = scores.double() - mean if self.shift_mean else scores.double()
        return (shifted / scale).clamp(-self.clip, self.clip).to(as_float(scores).dtype)

    def state_dict(self) -> dict[str, float]:
        """The state as numbers for a checkpoint, exact in JSON. Waits for the device."""
        count, mean, sum_squares = torch.stack((self.count, self.mean, self.sum_squares)).tolist()
        return {"count": count, "mean": mean, "sum_squares": sum_squares}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, float], *, shift_mean: bool = True, clip: float = math.inf
    ) -> RewardNormalizer:
        """A normaliser that goes on where the one that made `state` stands.

        Raises:
            ValueError: names are missing or unknown, or a count or a sum of squares is below 0.
        """
        if state.keys() != {"count", "mean", "sum_squares"}:
            raise ValueError(f"state has the keys {sorted(state)}; a normaliser has count, mean and sum_squares")
        for name in ("count", "sum_squares"):
            if state[name] < 0.0:
                raise ValueError(f"{name}={state[name]} must be at least 0; is this the state of a normaliser?")
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()}
        return cls(shift_mean=shift_mean, clip=clip, **tensors)

    def _state(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.count.to(device, non_blocking=True),
            self.mean.to(device, non_blocking=True),
            self.sum_squares.to(device, non_blocking=True),
        )


def _check_scores(scores: Tensor) -> None:
    if scores.dim() != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; pass one per sequence, [B]")
    check_finite_values(scores=scores)
