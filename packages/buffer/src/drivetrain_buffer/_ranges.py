"""A set of integers that takes little room while they are mostly consecutive."""

from __future__ import annotations

from bisect import bisect_right


class RangeSet:
    """Integers, held as half-open ranges.

    Sample ids count upwards and end in about that order, so millions of them are a few ranges: as many as there are
    gaps of samples still in flight.

    Example:
        >>> ids = RangeSet()
        >>> for sample_id in (0, 1, 3, 2):
        ...     ids.add(sample_id)
        >>> 2 in ids, 4 in ids, ids.num_ranges
        (True, False, 1)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    @property
    def num_ranges(self) -> int:
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def add(self, number: int) -> None:
        """Add a number; one that is there already changes nothing."""
        at = bisect_right(self._starts, number) - 1
        if at >= 0 and number < self._stops[at]:
            return
        extends = at >= 0 and self._stops[at] == number
        precedes = at + 1 < len(self._starts) and self._starts[at + 1] == number + 1
        if extends and precedes:
            self._stops[at] = self._stops.pop(at + 1)
            del self._starts[at + 1]
        elif extends:
            self._stops[at] = number + 1
        elif precedes:
            self._starts[at + 1] = number
        else:
            self._starts.insert(at + 1, number)
            self._stops.insert(at + 1, number + 1)
