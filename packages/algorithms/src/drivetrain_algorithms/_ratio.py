"""The exponential of a log-ratio, where ratios may be beyond what a float holds."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A ratio above e²⁰ (4.9e8) counts as this, as a constant. It keeps `0 * exp(1000)` a number, in the gradient too."""


def bounded(log_ratio: Tensor) -> Tensor:
    """`min(log_ratio, 20)`, without gradient beyond; NaN, in value and gradient, where it is not finite."""
    # The clamp alone would turn an infinite log-ratio, which is an error, into a harmless number.
    return log_ratio.clamp(max=MAX_LOG_RATIO) + 0.0 * log_ratio
