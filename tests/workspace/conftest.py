"""The workspace as its tests see it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the workspace."""
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[Path]:
    """Every file of the project: what git tracks, and what it would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30).stdout
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sorted(path for path in set(paths) if path.is_file())


@pytest.fixture(scope="session")
def uv() -> Path:
    """The uv of this workspace; `make` has installed it where it was missing."""
    return ROOT / "tools" / "uv"
