"""How long each stage of a step takes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STAGE = re.compile(r"[a-z][a-z0-9_]*")


def _nothing() -> None:
    pass


class StageTimer:
    """Seconds of each stage of a step, as the `time/` metrics.

    Stages follow one another and do not nest, so that they add up to no more than the step. A stage that is entered
    several times in a step is the sum of its times.

    Example:
        >>> timer = StageTimer()
        >>> with timer.step():
        ...     with timer.stage("rollout"):
        ...         pass
        >>> sorted(timer.metrics())
        ['time/rollout', 'time/step']
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], object] = _nothing
    ) -> None:
        """
        Args:
            clock: seconds from any origin.
            synchronize: waits for the work a device still has queued, such as `torch.cuda.synchronize`. It is called
                where stages begin and end: without it, the time of queued kernels shows up in a later stage.
        """
        self._clock = clock
        self._synchronize = synchronize
        self._in_step = False
        self._in_stage: str | None = None
        self._seconds: dict[str, float] = {}
        self._finished: dict[str, float] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times one step. A step that raises leaves the metrics of the one before.

        Raises:
            RuntimeError: a step is being timed already.
        """
        if self._in_step:
            raise RuntimeError("step() inside step(): steps follow one another")
        self._in_step, self._seconds = True, {}
        began = self._now()
        try:
            yield
            self._seconds["step"] = self._now() - began
            self._finished = self._seconds
        finally:
            self._in_step = False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage of the step.

        Raises:
            ValueError: `name` is not a lower-case word, or is `step` or `other`.
            RuntimeError: outside a step, or inside another stage.
        """
        if not _STAGE.fullmatch(name) or name in ("step", "other"):
            raise ValueError(
                f"stage {name!r}: take a lower-case word, such as update_actor, but neither step nor other"
            )
        if not self._in_step:
            raise RuntimeError(f"stage {name!r} outside a step: enter step() first")
        if self._in_stage is not None:
            raise RuntimeError(f"stage {name!r} inside stage {self._in_stage!r}: stages follow one another")
        self._in_stage = name
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began
            self._in_stage = None

    def metrics(self) -> dict[str, float]:
        """`time/step` and a `time/<stage>` for each stage of the last finished step, in seconds.

        Raises:
            RuntimeError: no step has been finished.
        """
        if self._finished is None:
            raise RuntimeError("no step has been timed yet: run one inside step()")
        return {f"time/{name}": seconds for name, seconds in self._finished.items()}

    def _now(self) -> float:
        self._synchronize()
        return self._clock()
