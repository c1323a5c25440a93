"""Files of one JSON object per line, appended to by one process and safe against its death at any moment."""

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

Record = dict[str, Any]


class JsonLines:
    """Appends objects to a file, each line written and flushed at once. Any thread may append.

    A process that dies while it writes leaves an unfinished last line. Opening the file again removes it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self._file = path.open("ab")
        self._file.truncate(_finished_length(path))

    def append(self, record: Record) -> None:
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            if self._file.closed:
                raise RuntimeError(f"{self._path} is closed; nothing more can be written to it")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(path: Path) -> list[Record]:
    """The objects of a file, in its order. An unfinished last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a finished line is not a JSON object; its number is named.
    """
    finished = path.read_bytes()[: _finished_length(path)]
    records: list[Record] = []
    for number, line in enumerate(finished.splitlines(), start=1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from None
    return records


def replace(path: Path, records: list[Record]) -> None:
    """Puts `records` in the place of what the file holds. After a crash it holds either the old or the new."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _finished_length(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
