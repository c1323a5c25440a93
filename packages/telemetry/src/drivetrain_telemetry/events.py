"""`events.jsonl`: what happened in a run, when."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain_telemetry import _jsonl


class EventLog:
    """Appends events to a file, each on disk before `write` returns. Any thread may write.

    A resumed run goes on with the file of the run it resumes: events are history, nothing is taken back.

    Example:
        >>> with EventLog("run/events.jsonl") as events:
        ...     events.write("worker_lost", worker="rollout-1", requests=3)
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._lines = _jsonl.JsonLines(Path(path))
        self._clock = clock

    def write(self, event: str, /, **fields: Any) -> None:
        """Writes `{"time": seconds since 1970, "event": event, **fields}`. Non-finite numbers become null.

        Raises:
            ValueError: a field is called `time` or `event`.
            TypeError: a field is nothing that JSON can hold.
            RuntimeError: the log is closed.
        """
        if taken := {"time", "event"} & fields.keys():
            raise ValueError(f"event {event!r}: the field {taken.pop()!r} is the log's own; give it another name")
        self._lines.append({"time": self._clock(), "event": event, **fields})

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file, in the order they were written. An unfinished last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object; its number is named.
    """
    return _jsonl.read(Path(path))
