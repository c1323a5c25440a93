"""Each package stands alone: built as a wheel, and imported where nothing but its declared dependencies is to be found.

A fresh environment gets the wheel itself, and links to the files of the distributions that the wheel's own metadata
asks for (and to those that these ask for in turn), as the workspace's environment has them installed. Everything else
in the workspace's environment, the other libraries included, stays out of sight.
"""

import importlib.metadata as metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = sorted(path.parent for path in ROOT.glob("[ap]*s/*/pyproject.toml"))
LIBRARIES = [project for project in PROJECTS if project.parent.name == "packages"]
HEAVY = ("torch", "transformers", "vllm", "ray", "numpy")

# Run in the fresh environment: what the import brought, and what it left behind.
PROBE = """
import importlib, json, os, sys
before = dict(os.environ)
module = importlib.import_module(sys.argv[1])

def found(name):
    # What an extra brings is missing here, and says which extra that is.
    try:
        return hasattr(module, name)
    except ImportError as error:
        return "pip install" in str(error)

print(json.dumps({
    "heavy": [name for name in sys.argv[2].split() if name in sys.modules],
    "environment": sorted(set(before.items()) ^ set(os.environ.items())),
    "threads": __import__("threading").active_count(),
    "file": module.__file__,
    "exported": [name for name in module.__all__ if not found(name)],
    "process_group": "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized(),
}))
"""


def name_of(project: Path) -> str:
    return project.name


def dependencies(project: Path) -> list[Requirement]:
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in declared["dependencies"]]


@pytest.fixture(scope="module")
def wheels(uv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each project, by the name of its folder."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [uv, "build", "--quiet", "--wheel", "--all-packages", "--no-create-gitignore", "--out-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=170)
    return {path.name.split("-")[0].removeprefix("drivetrain_"): path for path in folder.glob("*.whl")}


def closure(requirements: list[Requirement]) -> list[metadata.Distribution]:
    """The installed distributions that the requirements ask for, directly or through others."""
    seen: dict[tuple[str, str], metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in seen:
                continue
            seen[key] = metadata.distribution(requirement.name)
            asked = (Requirement(text) for text in seen[key].requires or ())
            waiting += [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]
    return list({name: distribution for (name, _), distribution in seen.items()}.values())


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Makes the files of an installed distribution visible in another environment."""
    for file in distribution.files or ():
        if file.parts[0] == ".." or file.suffix == ".pth":
            continue
        place = site.joinpath(*file.parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(Path(str(distribution.locate_file(file))))


@pytest.fixture
def alone(uv: Path, tmp_path: Path) -> Path:
    """The interpreter of an empty environment."""
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True, timeout=60)
    return tmp_path / "venv" / "bin" / "python"


def test_the_workspace_is_what_its_projects_say(wheels):
    assert [name_of(project) for project in PROJECTS if name_of(project) not in wheels] == []
    assert len(LIBRARIES) == 8


@pytest.mark.parametrize("project", PROJECTS, ids=name_of)
def test_a_wheel_carries_the_package_and_nothing_else(project, wheels):
    package = f"drivetrain_{project.name}"
    source = project / "src" / package
    with zipfile.ZipFile(wheels[project.name]) as wheel:
        names = set(wheel.namelist())
    packed = {name for name in names if not name.startswith(f"{package}-")}
    ours = {f"{package}/{path.relative_to(source)}" for path in source.rglob("*") if path.is_file()}
    assert packed == {name for name in ours if "__pycache__" not in name}
    assert f"{package}/py.typed" in packed


@pytest.mark.parametrize("project", LIBRARIES, ids=name_of)
def test_a_library_has_at_most_five_hard_dependencies_none_of_them_ours(project):
    names = [canonicalize_name(requirement.name) for requirement in dependencies(project)]
    assert len(names) <= 5
    assert [name for name in names if name.startswith("drivetrain")] == []


@pytest.mark.parametrize("project", LIBRARIES, ids=name_of)
def test_a_library_is_imported_alone(project, wheels, alone, uv, tmp_path):
    declared = dependencies(project)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", alone, wheels[project.name]]
    subprocess.run(install, check=True, timeout=60)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    visible = closure(declared)
    for distribution in visible:
        link(distribution, site)

    heavy = " ".join(HEAVY)
    command = [alone, "-I", "-c", PROBE, f"drivetrain_{project.name}", heavy]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(site)
    assert found["exported"] == []
    assert found["environment"] == []
    assert found["threads"] == 1
    assert found["process_group"] is False
    allowed = {canonicalize_name(requirement.name) for requirement in declared if requirement.name == "torch"}
    assert set(found["heavy"]) <= allowed | ({"numpy"} if allowed else set())


def test_what_is_not_declared_is_out_of_sight(alone, tmp_path):
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    visible = closure([Requirement("rich")])
    for distribution in visible:
        link(distribution, site)
    names = {canonicalize_name(distribution.name) for distribution in visible}
    assert "rich" in names
    assert "msgspec" not in names
    probe = "import rich.table\ntry:\n    import msgspec\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    done = subprocess.run([alone, "-I", "-c", probe], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "msgspec\n"), done.stderr


def test_the_app_names_every_library():
    (app,) = [project for project in PROJECTS if project.parent.name == "apps"]
    named = {re.sub("^drivetrain-", "", requirement.name) for requirement in dependencies(app)}
    assert {project.name for project in LIBRARIES} <= named
