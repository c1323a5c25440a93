"""Two controllers without clocks, threads or engines: how many requests an engine gets, how many prompts are begun."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from drivetrain_rollout.engine import EngineMetrics


class LimitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a SawtoothLimit.

    Raises:
        ValueError: a value out of range, with the range.
    """

    first: int = 1024
    """Requests that an engine may have at once, to begin with."""
    least: int = 8
    most: int = 4096
    grow: float = 0.125
    """Part of the limit that is added when the engine kept up."""
    back_off: float = 0.75
    """What the limit is multiplied by when the engine had to drop the KV cache of running responses."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.first <= self.most:
            raise ValueError(f"limits {self.least} <= {self.first} <= {self.most}: use 1 <= least <= first <= most")
        if not self.grow > 0:
            raise ValueError(f"grow {self.grow}: use a number above 0")
        if not 0 < self.back_off < 1:
            raise ValueError(f"back_off {self.back_off}: use a number between 0 and 1")


@dataclass(slots=True)
class SawtoothLimit:
    """How many requests one engine gets at once: more while none of them waits there, far fewer after a preemption.

    A preemption means that responses which had been begun did not fit into the KV cache together: their work is done
    twice. Requests that merely wait for room cost nothing, but are better kept where another engine can take them.
    """

    config: LimitConfig = field(default_factory=LimitConfig)
    value: int = 0
    """The limit now."""
    _preemptions: int = 0

    def __post_init__(self) -> None:
        self.value = self.config.first

    def observe(self, metrics: EngineMetrics, *, used: int) -> int:
        """Take in what an engine said of itself, and how many requests it had; returns the limit from now on."""
        config = self.config
        if metrics.preemptions > self._preemptions:
            fits = min(self.value, metrics.running + metrics.waiting) if metrics.running else self.value
            self.value = max(config.least, int(fits * config.back_off))
        elif used >= self.value and metrics.waiting == 0:
            self.value = min(config.most, self.value + max(1, int(self.value * config.grow)))
        self._preemptions = metrics.preemptions
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBatch:
    """How many prompts to begin next: many while the learner waits for samples, few when the buffer is nearly full.

    Raises:
        ValueError: a value out of range, with the range.
    """

    capacity: int
    """Samples that may wait for the learner, those that are being sampled included."""
    most: int
    """To begin at once, when nothing waits."""
    least: int = 1
    """To begin at once, while there is room at all."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= self.capacity:
            raise ValueError(
                f"least {self.least}, most {self.most}, capacity {self.capacity}: use 1 <= least <= most <= capacity"
            )

    def next(self, *, waiting: int, running: int) -> int:
        """Prompts to begin now.

        Args:
            waiting: samples in the buffer.
            running: samples that were begun and are not in the buffer yet.
        """
        room = self.capacity - waiting - running
        wanted = round(self.most * (1 - waiting / self.capacity))
        return max(0, min(max(wanted, self.least), room))
