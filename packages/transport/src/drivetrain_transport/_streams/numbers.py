"""Which numbers of a stream are done: a prefix, and what lies above its first gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drivetrain_transport._errors import FrameError

Ranges = tuple[tuple[int, int], ...]
"""(first, one past the last) of each run of numbers, ascending."""


class Numbers:
    """A set of numbers from 0 that stays small while its gaps close: everything under `below`, and some above it.

    Its memory is that of the numbers above the first gap, however many there are below.
    """

    __slots__ = ("_above", "below")

    def __init__(self, below: int = 0, ranges: Ranges = ()) -> None:
        self.below = below
        """The first number that is not in the set."""
        self._above: set[int] = set()
        self.merge(below, ranges)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above

    def __len__(self) -> int:
        return self.below + len(self._above)

    def __repr__(self) -> str:
        return f"Numbers({self.below}, {self.ranges()})"

    @property
    def top(self) -> int:
        """One past the largest number."""
        return max(self._above, default=self.below - 1) + 1

    def add(self, number: int) -> None:
        if number == self.below:
            self.below += 1
            self._close()
        elif number > self.below:
            self._above.add(number)

    def raise_to(self, below: int) -> None:
        """Add everything under `below`."""
        if below <= self.below:
            return
        if below - self.below < len(self._above):
            self._above.difference_update(range(self.below, below))
        else:
            self._above = {number for number in self._above if number >= below}
        self.below = below
        self._close()

    def merge(self, below: int, ranges: Ranges) -> None:
        """Add everything under `below`, and the ranges."""
        self.raise_to(below)
        for start, stop in ranges:
            self._above.update(range(max(start, self.below), stop))
        self._close()

    def ranges(self) -> Ranges:
        """What lies above the first gap."""
        return to_ranges(self._above)

    def missing(self, stop: int) -> Ranges:
        """The numbers under `stop` that are not in the set."""
        gaps = []
        start = self.below
        for first, past in self.ranges():
            if start < min(first, stop):
                gaps.append((start, min(first, stop)))
            start = past
        if start < stop:
            gaps.append((start, stop))
        return tuple(gaps)

    def _close(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """The runs of consecutive numbers in some that are all different."""
    ranges: list[tuple[int, int]] = []
    start = stop = -1
    for number in sorted(numbers):
        if number != stop:
            if stop > start:
                ranges.append((start, stop))
            start = number
        stop = number + 1
    if stop > start:
        ranges.append((start, stop))
    return tuple(ranges)


def each(ranges: Ranges) -> Iterator[int]:
    """The numbers in ranges, one by one."""
    for start, stop in ranges:
        yield from range(start, stop)


def check(*several: Ranges, limit: int) -> None:
    """FrameError for ranges that are none, or hold more than `limit` numbers together."""
    count = 0
    for start, stop in (pair for ranges in several for pair in ranges):
        if not 0 <= start < stop:
            raise FrameError(f"no range of numbers begins at {start} and ends before {stop}")
        count += stop - start
    if count > limit:
        raise FrameError(f"ranges of {count} numbers, at most {limit} can be on their way")
