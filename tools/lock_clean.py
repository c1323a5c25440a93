"""`uv.lock` without addresses: the form that is committed.

uv writes the address of whichever package index it asked into the lock. The committed form names no index, so that
everyone, behind a mirror or not, gets the same versions and hashes from their own:

* each `registry` is `https://index.invalid/simple`;
* each wheel and source distribution has its `filename` where its `url` was; hash and size stay;
* the `[package.metadata]` tables of the workspace's packages are left out. Their absence makes uv resolve again: it
  keeps every version and fills in the addresses of the user's index.

    python tools/lock_clean.py < uv.lock    the git clean filter: the committed form on standard output
    python tools/lock_clean.py --check      uv resolves the committed form and must arrive at it again: the lock is
                                            current, and it is enough to give the locked versions
    python tools/lock_clean.py --update     writes a lock for which --check holds; further arguments are uv lock's own
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent
NO_INDEX: Final = "https://index.invalid/simple"
RESOLVE_DEADLINE: Final = 300.0
"""Seconds that uv may take to resolve the lock."""
UPDATE_PASSES: Final = 5
"""uv writes markers differently when it starts from a lock; two passes have always been enough to settle them."""
SHOWN_LINES: Final = 40
SHOWN_WIDTH: Final = 160

_REGISTRY = re.compile(r'\bregistry = "[^"]*"')
_FILE_URL = re.compile(r'\burl = "([^"]*)"')
_TABLE = re.compile(r"^\[+([^\]]+)\]+$")


def clean(lock: str) -> str:
    """Returns the text of a lock without addresses. A cleaned lock comes back unchanged.

    A package that comes from a URL or a git repository keeps its address: it has no index.
    """
    blocks = re.split(r"(?m)^(?=\[\[package\]\]$)", _REGISTRY.sub(f'registry = "{NO_INDEX}"', lock))
    return "".join(_clean_block(block) for block in blocks)


def _clean_block(block: str) -> str:
    from_registry = "\nsource = { registry = " in block
    kept: list[str] = []
    in_metadata = False
    for line in block.splitlines(keepends=True):
        if table := _TABLE.match(line.rstrip("\n")):
            in_metadata = table[1] == "package.metadata" or table[1].startswith("package.metadata.")
        if in_metadata:
            continue
        kept.append(_FILE_URL.sub(_name_for_url, line) if from_registry else line)
    return "".join(kept)


def _name_for_url(match: re.Match[str]) -> str:
    name = unquote(urlsplit(match[1]).path.rsplit("/", 1)[-1])
    return f'filename = "{name}"'


def members(root: Path) -> list[Path]:
    """The `pyproject.toml` of the workspace and of each of its members, in a fixed order."""
    import tomllib  # git runs the filter with any python3; tomllib is new in 3.11

    pyproject = root / "pyproject.toml"
    patterns = tomllib.loads(pyproject.read_text())["tool"]["uv"]["workspace"]["members"]
    return [pyproject, *sorted(path for pattern in patterns for path in root.glob(f"{pattern}/pyproject.toml"))]


def resolve(root: Path, lock: str, uv: str, arguments: Sequence[str] = ()) -> str:
    """Has uv resolve the workspace at `root` from `lock`, in a copy that holds nothing but the `pyproject.toml` files.

    Returns: the lock uv wrote, with the addresses it filled in.

    Raises:
        RuntimeError: uv failed, or took longer than RESOLVE_DEADLINE; its own words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-lock-") as folder:
        for pyproject in members(root):
            copy = Path(folder) / pyproject.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pyproject, copy)
        lock_file = Path(folder) / "uv.lock"
        if lock:
            lock_file.write_text(lock)
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        command = [uv, "lock", "--quiet", "--directory", folder, *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RESOLVE_DEADLINE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"uv did not resolve uv.lock within {RESOLVE_DEADLINE:.0f} s") from None
        if done.returncode != 0:
            raise RuntimeError(f"uv could not resolve uv.lock:\n{done.stderr.strip()}")
        return lock_file.read_text()


def difference(committed: str, resolved: str) -> str:
    """The lines that differ between two cleaned locks, as a unified diff; empty when they are the same."""
    lines = difflib.unified_diff(committed.splitlines(), resolved.splitlines(), "uv.lock", "resolved", "", "", 2, "")
    return "\n".join(lines)


def check(root: Path, uv: str) -> str:
    """What uv would change in the committed form of the workspace's lock; empty when the lock is current."""
    committed = clean((root / "uv.lock").read_text())
    return difference(committed, clean(resolve(root, committed, uv)))


def update(root: Path, uv: str, arguments: Sequence[str]) -> None:
    """Resolves the workspace's lock until its committed form stays as it is, and writes it."""
    lock_file = root / "uv.lock"
    lock = lock_file.read_text() if lock_file.exists() else ""
    for number in range(UPDATE_PASSES):
        resolved = resolve(root, clean(lock), uv, arguments if number == 0 else ())
        settled = number > 0 and clean(resolved) == clean(lock)
        lock = resolved
        if settled:
            break
    else:
        raise RuntimeError(f"uv.lock did not settle in {UPDATE_PASSES} passes of uv lock")
    lock_file.write_text(lock)


def main() -> int:
    parser = argparse.ArgumentParser(description="uv.lock without addresses: the form that is committed")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="check that uv resolves the committed form to itself")
    action.add_argument("--update", action="store_true", help="write a lock for which --check holds")
    parser.add_argument("--uv", default="uv", help="the uv to use")
    options, arguments = parser.parse_known_args()
    if arguments and not options.update:
        parser.error(f"unknown arguments: {' '.join(arguments)}")
    if options.update:
        update(ROOT, options.uv, arguments)
    elif options.check:
        if changed := check(ROOT, options.uv):
            lines = changed.splitlines()
            shown = [line[:SHOWN_WIDTH] for line in lines[:SHOWN_LINES]]
            print("\n".join([*shown, f"({len(lines)} lines differ)"]), file=sys.stderr)
            print("uv.lock does not fit the pyproject.toml files: run `make lock`", file=sys.stderr)
            return 1
        print("uv.lock is current, and without addresses it gives the same versions")
    else:
        sys.stdout.write(clean(sys.stdin.read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
