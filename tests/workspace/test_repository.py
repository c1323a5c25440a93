"""What holds for every file and every package of the repository."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = sorted(path.parent for path in ROOT.glob("[ap]*s/*/pyproject.toml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MOST_BYTES = 5 * 2**20

# The homes and work folders of machines; in pieces, so that this file names none.
MACHINE_PATH = re.compile(
    r"(?<![\w.$}>])/(?:" + "|".join(("ro" + "ot", "ho" + "me", "Us" + "ers", "wo" + "rk")) + r")/\w"
)


def project_of(path: Path) -> dict[str, object]:
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


def test_no_file_names_a_path_of_somebodys_machine(project_files):
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
        for path in project_files
        for line in path.read_text(errors="replace").splitlines()
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_the_repository_stays_small(project_files):
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in project_files}
    largest = sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:5]
    assert sum(sizes.values()) < MOST_BYTES, largest


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_package_is_complete(project):
    declared = project_of(project)
    assert declared["name"] == f"drivetrain-{project.name}"
    assert declared["version"] == PYPROJECT["project"]["version"]
    assert declared["license"] == "Apache-2.0"
    assert declared["requires-python"] == PYPROJECT["project"]["requires-python"]
    assert declared["readme"] == "README.md"
    source = project / "src" / f"drivetrain_{project.name}"
    assert [path.name for path in (project / "src").iterdir()] == [source.name]
    assert (source / "py.typed").read_text() == ""
    assert (source / "__init__.py").exists()
    assert (project / "README.md").read_text().startswith(f"# drivetrain-{project.name}\n")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_tools_are_configured_at_the_root_only(project):
    tools = set(tomllib.loads((project / "pyproject.toml").read_text()).get("tool", {}))
    assert tools <= {"hatch", "uv"}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_package_has_tests_and_a_line_in_the_changelog(project):
    assert list((ROOT / "tests" / project.name).glob("test_*.py"))
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert unreleased.startswith("[Unreleased]")
    assert f"`drivetrain-{project.name}`" in unreleased


def test_import_linter_knows_every_package():
    named = {f"drivetrain_{project.name}" for project in PROJECTS}
    linter = PYPROJECT["tool"]["importlinter"]
    assert set(linter["root_packages"]) == named
    (independent,) = [contract for contract in linter["contracts"] if contract["type"] == "independence"]
    assert set(independent["modules"]) == {f"drivetrain_{path.name}" for path in ROOT.glob("packages/*/")}


def test_tests_are_no_packages(project_files):
    assert [path for path in project_files if path.name == "__init__.py" and (ROOT / "tests") in path.parents] == []


def test_every_marker_of_the_suite_has_a_meaning():
    markers = {line.split(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert {"gpu", "multigpu", "rocm", "slow"} <= markers


def test_each_example_is_run_by_a_test(project_files):
    examples = [path for path in project_files if path.parent == ROOT / "examples" and path.suffix == ".py"]
    tests = [
        path.read_text() for path in project_files if path.parts[len(ROOT.parts)] == "tests" and path.suffix == ".py"
    ]
    assert [path.name for path in examples if not any(path.name in text for text in tests)] == []


def test_scripts_can_be_executed(project_files):
    scripts = [path for path in project_files if path.read_bytes()[:3] == b"#!/" and path.suffix != ".py"]
    assert ROOT / ".ci" / "run" in scripts
    assert ROOT / "tools" / "uv" in scripts
    assert [path for path in scripts if not path.stat().st_mode & 0o100] == []
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True, timeout=10)


def test_the_license_is_apache_2_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
