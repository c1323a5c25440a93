"""uv.lock names no package index, and needs none to give the locked versions."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FULL = """\
version = 1
revision = 5

[[package]]
name = "demo"
version = "0.1.0"
source = { editable = "packages/demo" }
dependencies = [
    { name = "torch", version = "2.0", source = { registry = "https://index.example/simple" }, marker = "extra" },
]

[package.dev-dependencies]
dev = [
    { name = "ruff" },
]

[package.metadata]
requires-dist = [{ name = "torch", specifier = ">=2.0" }]

[package.metadata.requires-dev]
dev = [{ name = "ruff", specifier = ">=0.1" }]

[[package]]
name = "torch"
version = "2.0"
source = { registry = "https://index.example/simple" }
sdist = { url = "https://files.example/a/b/torch-2.0.tar.gz", hash = "sha256:00", size = 7 }
wheels = [
    { url = "https://files.example/c/torch-2.0%2Bcu1-py3-none-any.whl#sha256=11", hash = "sha256:11", size = 9 },
]

[[package]]
name = "patched"
version = "1.0"
source = { url = "https://host.example/patched-1.0.tar.gz" }
sdist = { url = "https://host.example/patched-1.0.tar.gz", hash = "sha256:22" }
"""

CLEAN = """\
version = 1
revision = 5

[[package]]
name = "demo"
version = "0.1.0"
source = { editable = "packages/demo" }
dependencies = [
    { name = "torch", version = "2.0", source = { registry = "https://index.invalid/simple" }, marker = "extra" },
]

[package.dev-dependencies]
dev = [
    { name = "ruff" },
]

[[package]]
name = "torch"
version = "2.0"
source = { registry = "https://index.invalid/simple" }
sdist = { filename = "torch-2.0.tar.gz", hash = "sha256:00", size = 7 }
wheels = [
    { filename = "torch-2.0+cu1-py3-none-any.whl", hash = "sha256:11", size = 9 },
]

[[package]]
name = "patched"
version = "1.0"
source = { url = "https://host.example/patched-1.0.tar.gz" }
sdist = { url = "https://host.example/patched-1.0.tar.gz", hash = "sha256:22" }
"""

# In pieces, so that this file names no index either.
INDEX_HOSTS = tuple(
    ".".join(pieces)
    for pieces in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
        ("proxy", "golang", "org"),
    )
)


@pytest.fixture(scope="module")
def lock_clean(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_clean", root / "tools" / "lock_clean.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(folder: Path, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "--silent", *arguments], cwd=folder, env=environment, check=True, timeout=30)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_addresses_and_metadata_go_and_the_rest_stays(lock_clean):
    assert lock_clean.clean(FULL) == CLEAN
    assert lock_clean.clean(CLEAN) == CLEAN


def test_no_project_file_names_a_package_index(project_files, lock_clean, root):
    found = []
    for path in project_files:
        text = path.read_text(errors="replace")
        if path == root / "uv.lock":
            text = lock_clean.clean(text)
        found += [(str(path.relative_to(root)), host) for host in INDEX_HOSTS if host in text]
    assert found == []


def test_the_lock_git_holds_is_the_cleaned_one(root, lock_clean):
    if not git(root, "ls-files", "uv.lock"):
        pytest.skip("uv.lock has not been staged")
    staged = git(root, "show", ":uv.lock")
    assert staged == lock_clean.clean(staged)
    assert set(re.findall(r"https?://[^\s\"]+", staged)) == {lock_clean.NO_INDEX}


def test_uv_resolves_the_cleaned_lock_to_the_locked_versions(root, lock_clean, uv):
    assert lock_clean.check(root, str(uv))[:2000] == ""


def test_a_failing_resolution_is_told_in_uvs_own_words(lock_clean, uv, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "demo"\nversion = "0.1.0"\nrequires-python = ">=3.99"\n[tool.uv.workspace]\nmembers = []\n'
    )
    with pytest.raises(RuntimeError, match=r"could not resolve uv\.lock(.|\n)*3\.99"):
        lock_clean.resolve(tmp_path, "", str(uv))


def test_git_stages_the_cleaned_lock_and_stays_clean_when_make_has_uv_fill_it_in(root, tmp_path):
    for name in ("Makefile", ".gitattributes", "tools/lock_clean.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".gitignore").write_text(".venv\n")
    (tmp_path / "uv.lock").write_text(FULL)
    fill_in = tmp_path / "tools" / "uv"
    fill_in.write_text("#!/bin/sh\nmkdir -p .venv\ncp .venv/filled-in uv.lock\n")
    fill_in.chmod(0o755)
    git(tmp_path, "init", "--quiet")
    make(tmp_path, "filter")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "lock")
    assert git(tmp_path, "show", "HEAD:uv.lock") == CLEAN
    git(tmp_path, "rm", "--quiet", "--cached", "uv.lock")
    (tmp_path / "uv.lock").unlink()
    git(tmp_path, "checkout", "--quiet", "HEAD", "uv.lock")
    assert (tmp_path / "uv.lock").read_text() == CLEAN

    (tmp_path / ".venv").mkdir()
    for filled_in, status in ((FULL, ""), (FULL.replace('"2.0"', '"2.1"'), " M uv.lock\n")):
        (tmp_path / ".venv" / "filled-in").write_text(filled_in)
        make(tmp_path, "setup", f"EXTRA=x{len(status)}")
        assert (tmp_path / "uv.lock").read_text() == filled_in
        assert git(tmp_path, "status", "--porcelain") == status


def test_the_filter_reads_standard_input(root):
    command = [sys.executable, str(root / "tools" / "lock_clean.py")]
    done = subprocess.run(command, input=FULL, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == CLEAN
