"""How much memory there is to be had. Linux gives what it has not got, and kills a process when it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of a control group, of version 2 and of version 1."""

_CACHES = (("inactive_file", "active_file"), ("total_inactive_file", "total_active_file"))
"""What of its use is only cache, of the group and those below it, in the same order."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can take before the kernel kills one: of the machine, and of its control groups.

    The machine's swap counts as free, and so does memory that caches files. What the system does not tell is no limit.
    """
    free = [1 << 62, *_of_machine(root)]
    for folder in _groups(root):
        for files, caches in zip(_FILES, _CACHES, strict=True):
            with contextlib.suppress(OSError, ValueError):  # it is of the other version, or says "max"
                limit, used = (int((folder / file).read_text()) for file in files)
                counts = _counts(folder / "memory.stat")
                free.append(limit - used + sum(counts.get(cache, 0) for cache in caches))
    return max(min(free), 0)


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        counts = _counts(root / "proc/meminfo")
        if "MemAvailable:" in counts:
            yield 1024 * (counts["MemAvailable:"] + counts.get("SwapFree:", 0))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, and of those above them, as far as they can be seen here."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                mount = root / "sys/fs/cgroup" / controllers
                group = mount / path.lstrip("/")
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _counts(file: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}
