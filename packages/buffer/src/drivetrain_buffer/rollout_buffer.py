"""What waits between sampling and training: bounded, and no staler than it may be."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class BufferClosed(RuntimeError):
    """The buffer was closed: nothing can be added, and there are too few items left to take."""


class BufferCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What went through a buffer: `added` is the sum of all the others."""

    added: int
    taken: int
    """Handed out, by `take` and `drain`."""
    stale: int
    """Dropped by `take` as too old to train on."""
    waiting: int
    """In the buffer now."""


class RolloutBuffer(Generic[T]):
    """A bounded buffer that hands out the oldest items first and drops those too stale to train on.

    *Consumes* items from any number of producers, through `add` and `try_add`.
    *Waits for* room in `add`, and in `take` for as many fresh items as were asked for, each under a deadline.
    *Is unblocked by* `take` and `drain`, which make room, by `add`, and by `close`, which ends every wait.
    *Produces* items by age: of the lowest policy version first, and of equal ones that which came first. An item is
    handed out once, as it was put in; the buffer keeps no reference to it.

    The staleness of an item is the learner's version minus the item's. An item staler than `max_staleness` is reported
    to `on_stale` and then dropped, when `take` comes upon it. Oldest first means that it comes upon those before any
    other, and that an item which took long to sample is trained on before it is too old, rather than after those that
    did not.

    Putting in and taking out costs O(log n) in the number of items that wait. All methods may be called from any
    thread.

    Example:
        >>> buffer = RolloutBuffer(8, policy_version=lambda item: item[0], max_staleness=1, on_stale=print)
        >>> for item in [(3, "c"), (1, "a"), (2, "b")]:
        ...     buffer.add(item, timeout=1.0)
        >>> buffer.take(2, learner_version=3, timeout=1.0)
        (1, 'a')
        [(2, 'b'), (3, 'c')]
    """

    def __init__(
        self,
        capacity: int,
        *,
        policy_version: Callable[[T], int],
        max_staleness: int | None,
        on_stale: Callable[[T], None] | None = None,
    ) -> None:
        """
        Args:
            capacity: how many items may wait, at least 1.
            policy_version: the version an item was sampled with; of several, the oldest.
            max_staleness: the highest staleness that is trained on, at least 0; None drops nothing.
            on_stale: is told of each item before it is dropped, with the buffer locked, so that it must not wait; such
                as `lambda item: ledger.end(item.sample_id, "stale")`. If it raises, the item stays and `take` raises
                the same. Needed unless `max_staleness` is None.

        Raises:
            ValueError: a number out of range, or items would be dropped with nobody told.
        """
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1 item")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be at least 0; pass None to drop nothing")
        if max_staleness is not None and on_stale is None:
            raise ValueError(
                f"max_staleness={max_staleness} drops items; pass on_stale to account for them, "
                "for instance lambda item: ledger.end(item.sample_id, 'stale')"
            )
        self.capacity = capacity
        self._policy_version = policy_version
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._heap: list[tuple[int, int, T]] = []  # (policy version, arrival, item); no two arrivals are equal
        self._arrivals = itertools.count()
        self._added = self._taken = self._stale = 0
        self._wanted: list[int] = []  # how many items each waiting take needs
        self._closed = False
        lock = threading.RLock()
        self._room = threading.Condition(lock)
        self._items = threading.Condition(lock)

    def add(self, item: T, *, timeout: float) -> None:
        """Put an item in, waiting for room.

        Args:
            item: handed out as it is; change it no more.
            timeout: seconds, at least 0.

        Raises:
            TimeoutError: the buffer was full all the time.
            BufferClosed: it is closed, or was closed meanwhile.
        """
        version = self._policy_version(item)
        deadline = _deadline(timeout)
        with self._room:
            while not self._closed and len(self._heap) >= self.capacity:
                if not self._room.wait(deadline - time.monotonic()) and len(self._heap) >= self.capacity:
                    raise TimeoutError(
                        f"add waited {timeout:g} s for room: all {self.capacity} places are taken, the oldest "
                        f"by policy version {self._heap[0][0]}"
                    )
            self._put(item, version)

    def try_add(self, item: T) -> bool:
        """Put an item in if there is room now, and say whether there was.

        Raises:
            BufferClosed: the buffer is closed.
        """
        version = self._policy_version(item)
        with self._room:
            if not self._closed and len(self._heap) >= self.capacity:
                return False
            self._put(item, version)
            return True

    def take(self, n: int, *, learner_version: int, timeout: float) -> list[T]:
        """Take the n oldest items that are fresh enough, waiting until there are so many; all or none.

        Args:
            n: at least 1, at most the capacity.
            learner_version: the version the items are to be trained into, from which their staleness counts.
            timeout: seconds, at least 0.

        Raises:
            TimeoutError: there were never n at a time; what was there waits on.
            BufferClosed: it is closed and fewer than n are left, which `drain` gives.
            ValueError: n is out of range.
        """
        if not 1 <= n <= self.capacity:
            raise ValueError(f"n={n} must lie between 1 and the capacity, {self.capacity}: more can never be there")
        deadline = _deadline(timeout)
        with self._items:
            self._drop_stale(learner_version)
            while len(self._heap) < n:
                if self._closed:
                    raise BufferClosed(f"the buffer is closed and {len(self._heap)} items are left, fewer than {n}")
                self._wanted.append(n)
                try:
                    in_time = self._items.wait(deadline - time.monotonic())
                finally:
                    self._wanted.remove(n)
                self._drop_stale(learner_version)
                if not in_time and not self._closed and len(self._heap) < n:
                    raise TimeoutError(
                        f"take waited {timeout:g} s for {n} items: {len(self._heap)} are there that version "
                        f"{learner_version} may train on ({self._added} were added and {self._stale} stale, in all)"
                    )
            items = [heapq.heappop(self._heap)[2] for _ in range(n)]
            self._taken += n
            self._room.notify(n)
            return items

    def take_fresh(self, *, learner_version: int) -> list[T]:
        """Take all items that are fresh enough, oldest first, without waiting; there may be none.

        Args:
            learner_version: as for `take`.
        """
        with self._items:
            self._drop_stale(learner_version)
            return self.drain()

    def drain(self) -> list[T]:
        """Take all items that wait, oldest first, stale or not, without waiting; also from a closed buffer."""
        with self._items:
            items = [item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2])]
            self._heap.clear()
            self._taken += len(items)
            self._room.notify_all()
            return items

    def counts(self) -> BufferCounts:
        """Count what went through."""
        with self._items:
            return BufferCounts(added=self._added, taken=self._taken, stale=self._stale, waiting=len(self._heap))

    def close(self) -> None:
        """Take nothing in any more, and end every wait; closing twice is no error."""
        with self._items:
            self._closed = True
            self._room.notify_all()
            self._items.notify_all()

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._heap)

    def _put(self, item: T, version: int) -> None:
        if self._closed:
            raise BufferClosed("the buffer is closed; the item was not added")
        heapq.heappush(self._heap, (version, next(self._arrivals), item))
        self._added += 1
        if self._wanted and len(self._heap) >= min(self._wanted):
            self._items.notify_all()

    def _drop_stale(self, learner_version: int) -> None:
        if self._max_staleness is None or self._on_stale is None:
            return
        while self._heap and learner_version - self._heap[0][0] > self._max_staleness:
            self._on_stale(self._heap[0][2])
            heapq.heappop(self._heap)
            self._stale += 1
            self._room.notify()


def _deadline(timeout: float) -> float:
    if not 0.0 <= timeout <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout={timeout} must be a finite number of seconds, at least 0")
    return time.monotonic() + timeout
