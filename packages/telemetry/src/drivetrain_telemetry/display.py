"""A run as it goes: a live table on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from drivetrain_telemetry.records import Metric, number, stage_seconds

ROWS: Final = 10
"""Steps that the live table shows."""


@dataclass(frozen=True, slots=True)
class Column:
    """One metric of the table."""

    title: str
    metric: str
    format: str = ".3f"
    """A format specification for a float."""


COLUMNS: tuple[Column, ...] = (
    Column("reward", "reward/mean"),
    Column("kl", "policy/approx_kl", ".4f"),
    Column("clip", "policy/clip_fraction"),
    Column("entropy", "policy/entropy"),
    Column("explained", "critic/explained_variance"),
    Column("length", "rollout/length_mean", ".1f"),
    Column("samples/s", "throughput/samples_per_s", ",.0f"),
    Column("seconds", "time/step", ".2f"),
)


class RunDisplay:
    """Shows the steps of a run, its progress, and where a step's time goes.

    On a terminal, the last steps are a live table over a progress bar. Elsewhere each step is one line, so that a log
    file reads as well. A column without a number in any step so far is left out.

    Example:
        >>> with RunDisplay(title="ppo", steps=2, console=Console(force_terminal=False)) as display:
        ...     display.step(1, {"reward/mean": 0.25, "time/step": 1.5})
        step 1/2  reward 0.250  seconds 1.50
    """

    def __init__(
        self,
        *,
        title: str,
        steps: int,
        console: Console | None = None,
        columns: tuple[Column, ...] = COLUMNS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._columns = columns
        self._clock = clock
        self._console = console if console is not None else Console()
        self._records: deque[tuple[int, Mapping[str, Metric]]] = deque(maxlen=ROWS)
        self._working_on: list[str] = []
        self._spinner = Spinner("dots")
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(title, total=steps)
        self._live = Live(get_renderable=self._render, console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Shows a finished step. Steps count from 1; a resumed run begins with a later one."""
        self._records.append((step, metrics))
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.refresh()
        else:
            shown = ((column, number(metrics, column.metric)) for column in self._columns)
            cells = [f"{column.title} {value:{column.format}}" for column, value in shown if value is not None]
            self.note("  ".join([f"step {step}/{self._steps}", *cells]))

    def note(self, text: str) -> None:
        """Prints a line, above the live table where there is one."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Shows that something lengthy is under way, and afterwards how long it took."""
        began = self._clock()
        self._working_on.append(text)
        if self._live is None:
            self.note(f"{text} ...")
        outcome = "failed after"
        try:
            yield
            outcome = "done in"
        finally:
            self._working_on.remove(text)
            self.note(f"{text}: {outcome} {self._clock() - began:.1f} s")

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._records:
            parts += [self._table(), self._shares()]
        if self._working_on:
            self._spinner.update(text=Text(self._working_on[-1]))
            parts.append(self._spinner)
        parts.append(self._progress)
        return Group(*parts)

    def _table(self) -> Table:
        columns = [
            column
            for column in self._columns
            if any(number(metrics, column.metric) is not None for _, metrics in self._records)
        ]
        table = Table("step", *(column.title for column in columns))
        for column in table.columns:
            column.justify = "right"
        for step, metrics in self._records:
            values = [(column, number(metrics, column.metric)) for column in columns]
            table.add_row(
                str(step), *("-" if value is None else f"{value:{column.format}}" for column, value in values)
            )
        return table

    def _shares(self) -> Text:
        """Where the time of the last step went."""
        _, metrics = self._records[-1]
        stages = stage_seconds(metrics)
        whole = sum(stages.values()) or 1.0
        return Text("  ".join(f"{stage} {seconds / whole:.0%}" for stage, seconds in stages.items()), style="dim")
