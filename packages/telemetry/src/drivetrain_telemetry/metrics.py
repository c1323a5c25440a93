"""`metrics.jsonl`: one object per step, its keys `area/name`."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain_telemetry import _jsonl
from drivetrain_telemetry.records import Metric

_KEY = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")


class MetricsWriter:
    """Writes the metrics of a run, one line per step, each on disk before `write` returns.

    Steps increase from line to line: a value belongs to the step it is written with, never to an implicit counter.

    Example:
        >>> with MetricsWriter("run/metrics.jsonl") as metrics:
        ...     metrics.write(1, {"reward/mean": 0.25, "time/step": 1.4})
    """

    def __init__(self, path: str | Path) -> None:
        """Starts the metrics of a new run.

        Raises:
            ValueError: the file holds metrics already: `MetricsWriter.resume` goes on with them.
        """
        path = Path(path)
        if path.exists() and path.stat().st_size:
            raise ValueError(f"{path} holds a run's metrics already; continue it with MetricsWriter.resume(path, step)")
        self._open(path, last_step=-1)

    @classmethod
    def resume(cls, path: str | Path, step: int) -> Self:
        """Continues a run from the checkpoint of `step`: what was written for later steps is dropped, in one atomic
        replacement of the file. A run without metrics so far may be resumed as well."""
        path = Path(path)
        if path.exists():
            _jsonl.replace(path, [record for record in read_metrics(path) if record["step"] <= step])
        writer = cls.__new__(cls)
        writer._open(path, last_step=step)
        return writer

    def _open(self, path: Path, *, last_step: int) -> None:
        self._lines = _jsonl.JsonLines(path)
        self._last_step = last_step

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Writes one step. NaN and infinities become null, and `telemetry/non_finite` counts them.

        Raises:
            ValueError: a name is not `area/name`, or a value is neither a number, a text nor None.
            RuntimeError: `step` is not above the last one written, or the writer is closed.
        """
        record: dict[str, Metric] = {key: _checked(key, value) for key, value in metrics.items()}
        non_finite = sum(record[key] is None and value is not None for key, value in metrics.items())
        if step <= self._last_step:
            raise RuntimeError(f"step {step} after step {self._last_step}: each step is written once, in order")
        if non_finite:
            record["telemetry/non_finite"] = non_finite
        self._lines.append({"step": step, **record})
        self._last_step = step

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _checked(key: str, value: object) -> Metric:
    if not _KEY.fullmatch(key):
        raise ValueError(f"metric {key!r}: names are area/name in lower case, such as policy/loss")
    if isinstance(value, bool) or not isinstance(value, float | int | str | None):
        raise ValueError(f"metric {key!r} is a {type(value).__name__}; pass a float, an int, a text or None")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: `{"step": 1, "reward/mean": 0.25, ...}`. An unfinished last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not the record of a step; its number is named.
    """
    records = _jsonl.read(Path(path))
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{path}, line {number}: a record of metrics has a whole number as its `step`")
    return records
