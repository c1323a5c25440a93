import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from types import ModuleType

import drivetrain_algorithms
import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "packages/algorithms"
README = PACKAGE / "README.md"
SOURCES = sorted((PACKAGE / "src/drivetrain_algorithms").glob("*.py"))
FUNCTIONS = [name for name in drivetrain_algorithms.__all__ if inspect.isfunction(getattr(drivetrain_algorithms, name))]
CLASSES = [name for name in drivetrain_algorithms.__all__ if inspect.isclass(getattr(drivetrain_algorithms, name))]

CHECKS = {"check_finite", "value_checks"}
"""They compute nothing."""
COUNTS = {"loss_denominator", "spread_over_tokens"}
"""They count and copy; there is no equation to write down."""
TEXTBOOK = {"explained_variance", "sequence_logprobs", "token_entropy", "token_logprobs"}
"""Their equation needs no source."""


def documentation(name: str) -> str:
    return inspect.cleandoc(getattr(drivetrain_algorithms, name).__doc__ or "")


def equation(text: str) -> bool:
    """Whether a block of the summary, before the arguments, is indented and defines something."""
    return re.search(r"^    \S.*=", text.split("\nArgs:")[0], re.MULTILINE) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_computes_and_when_that_degenerates(name: str) -> None:
    text = documentation(name)
    assert re.match(r"[^\n]+[.]\n", text), "a summary of one line"
    assert "\nRaises:\n" in text
    assert name in CHECKS or "\nDegenerate cases: " in text
    assert name in CHECKS | COUNTS or equation(text)
    assert name in CHECKS | COUNTS | TEXTBOOK or re.search(r"https?://\S+", text), "where it comes from"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described_and_settings_have_names(name: str) -> None:
    signature = inspect.signature(getattr(drivetrain_algorithms, name))
    text = documentation(name)
    described = re.findall(r"^    (\w+): ", text.partition("\nArgs:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert described == list(signature.parameters)
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    others = [p.name for p in positional if str(p.annotation) not in ("Tensor", "Tensor | None")]
    assert others == (["name"] if name == "check_finite" else [])
    assert "cu_seqlens" not in [p.name for p in positional]


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_a_result_is_described(name: str) -> None:
    """A docstring follows each field, as the sources have it: no object carries them at run time."""
    (definition,) = (
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    assert ast.get_docstring(definition)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    following = [definition.body[definition.body.index(field) + 1 :][:1] for field in fields]
    described = [
        bool(after) and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant)
        for after in following
    ]
    assert all(described), [field for field, found in zip(fields, described, strict=True) if not found]


def test_the_public_names_are_sorted_and_exist() -> None:
    names = drivetrain_algorithms.__all__
    assert names == sorted(names, key=lambda name: (name[0].islower(), name))
    imported = {
        name.asname or name.name
        for node in ast.parse(inspect.getsource(drivetrain_algorithms)).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert imported == set(names)


def test_it_needs_torch_and_nothing_else() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]] == ["torch"]  # type: ignore[index]
    assert "optional-dependencies" not in project
    reached = {
        (node.module if isinstance(node, ast.ImportFrom) else name.name).partition(".")[0]  # type: ignore[union-attr]
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert reached - set(sys.stdlib_module_names) == {"drivetrain_algorithms", "torch"}


def test_importing_it_starts_nothing() -> None:
    code = (
        "import sys, drivetrain_algorithms, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized();"
        "assert not {'transformers', 'vllm', 'ray', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_it_takes_less_than_50_ms_beyond_torch() -> None:
    """In processor time, which a busy machine does not lengthen; the best of three."""
    code = (
        "import time, torch; start = time.process_time();"
        "import drivetrain_algorithms; print(time.process_time() - start)"
    )
    command = [sys.executable, "-c", code]
    spent = [float(subprocess.run(command, check=True, timeout=120, capture_output=True).stdout) for _ in range(3)]
    assert 0.0 < min(spent) < 0.05


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_readme_blocks_run(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_the_readme_names_every_function() -> None:
    named = set(re.findall(r"`(\w+)`", README.read_text().partition("## What is in it")[2].partition("\n## ")[0]))
    tools = {name for name in CLASSES if hasattr(getattr(drivetrain_algorithms, name), "update")}
    assert named == {*FUNCTIONS, *tools}


def modules() -> list[ModuleType]:
    found = [module.name for module in pkgutil.iter_modules(drivetrain_algorithms.__path__)]
    return [importlib.import_module(f"drivetrain_algorithms.{name}") for name in found]


def test_docstring_examples_hold() -> None:
    results = {module.__name__: doctest.testmod(module) for module in modules()}
    assert len(results) == len(SOURCES) - 1
    assert [name for name, result in results.items() if result.failed] == []
    with_examples = {name.partition(".")[2] for name, result in results.items() if result.attempted}
    assert {"checks", "kl", "shaping"} <= with_examples
