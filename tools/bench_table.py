"""One table of a pytest-benchmark result file.

    python tools/bench_table.py .benchmarks/latest.json

A benchmark of a claim records `ratio` (ours against the baseline of the same run) and `owed` (what it must reach)
in its `extra_info`. The exit status is 1 when a ratio is below what is owed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def row(benchmark: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """The cells of one benchmark: name, median time, ratio, owed, and whether the claim holds."""
    extra = benchmark["extra_info"]
    ratio, owed = extra.get("ratio"), extra.get("owed")
    held = "" if ratio is None or owed is None else "yes" if ratio >= owed else "NO"
    return (
        benchmark["fullname"].removeprefix("benchmarks/"),
        seconds(benchmark["stats"]["median"]),
        "" if ratio is None else f"{ratio:.2f}",
        "" if owed is None else f"{owed:.2f}",
        held,
    )


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def main(path: Path) -> int:
    console = Console()
    text = path.read_text() if path.exists() else ""
    rows = [row(benchmark) for benchmark in json.loads(text)["benchmarks"]] if text else []
    if not rows:
        console.print("no benchmark ran")
        return 0
    table = Table("benchmark", "median", "ratio", "owed", "held")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    return 1 if any(cells[-1] == "NO" for cells in rows) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
