"""What the READMEs show runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("[ap]*s/*/README.md"))) if path.exists()]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE = 120.0
"""Seconds a block may take; one is meant to take about one."""


def blocks() -> list[tuple[str, str]]:
    """A name and the code of each python block."""
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for path in READMES
        for text in [path.read_text()]
        for match in PYTHON.finditer(text)
    ]


BLOCKS = blocks()


@pytest.mark.parametrize("code", [code for _, code in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_a_python_block_runs(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("project", sorted(ROOT.glob("packages/*/")), ids=lambda path: path.name)
def test_a_library_shows_itself_in_a_python_block(project):
    assert PYTHON.search((project / "README.md").read_text())


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(readme):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", readme.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (readme.parent / link).exists()] == []
