"""docs/configuration.md, written from the classes of a run's configuration.

    python tools/config_docs.py           write it
    python tools/config_docs.py --check   exit with 1 if it is not what the classes say

The classes are parsed, not imported: a key's type, default and docstring are those of its line in the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
SOURCES = (
    ROOT / "apps" / "ppo" / "src" / "drivetrain_ppo" / "config.py",
    ROOT / "packages" / "learner" / "src" / "drivetrain_learner" / "config.py",
)
TOP = "RunConfig"

INTRODUCTION = """\
# Configuration

A run is a YAML file, and `key=value` words after it that win over the file. Every key has a default; a mistyped key or
a value of another type is refused, with the nearest name that exists, before anything is started.

```
drivetrain-ppo run my.yaml trainer.steps=50 actor.lr=1e-5
drivetrain-ppo config my.yaml          # the configuration of a run, every default filled in
```

In YAML a dot is one level: `trainer.steps` is `steps` under `trainer`. `drivetrain-ppo config quickstart` and
`drivetrain-ppo config smollm2` print the presets.

<!-- Written by tools/config_docs.py from the classes of the configuration. Change those, and run it. -->
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One field of a class."""

    name: str
    type: str
    default: ast.expr | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One class: its summary and its fields."""

    text: str
    keys: tuple[Key, ...]


def components(path: Path) -> Iterator[tuple[str, Component]]:
    """The classes of a module that have fields, by name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
            found = tuple(keys(node))
            if found:
                yield node.name, Component(text=_one_line(summary), keys=found)


def keys(node: ast.ClassDef) -> Iterator[Key]:
    """The annotated fields of a class, each with the docstring beneath it."""
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            text = _one_line(below.value.value)
        yield Key(name=field.target.id, type=ast.unparse(field.annotation), default=field.value, text=text)


def page(classes: dict[str, Component]) -> str:
    """The whole page: a table of the keys on top, then one for each component."""
    top = classes[TOP]
    nested = [key for key in top.keys if key.type in classes]
    parts = [INTRODUCTION, "## The run\n", table([key for key in top.keys if key not in nested], prefix="")]
    for key in nested:
        component = classes[key.type]
        parts += [f"## {key.name}\n", component.text + "\n", table(component.keys, f"{key.name}.", given(key))]
    return "\n".join(parts)


def given(key: Key) -> dict[str, ast.expr]:
    """The arguments of a component's own default, which win over those of its class: `LearnerConfig(lr=1e-6)`."""
    if not isinstance(key.default, ast.Call):
        return {}
    return {argument.arg: argument.value for argument in key.default.keywords if argument.arg is not None}


def table(fields: Sequence[Key], prefix: str, defaults: Mapping[str, ast.expr] = MappingProxyType({})) -> str:
    """The rows of a component's keys."""
    lines = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for key in fields:
        default = defaults.get(key.name, key.default)
        cells = (
            f"`{prefix}{key.name}`",
            f"`{_type(key.type)}`",
            "" if default is None else f"`{_value(default)}`",
            key.text,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(annotation: str) -> str:
    """A type in YAML's words; of a Literal, the choices."""
    choices = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", "").replace(", ", " | "), annotation)
    return choices.replace("None", "null")


def _value(default: ast.expr) -> str:
    """A default as YAML reads it."""
    value = ast.literal_eval(default)
    return value if isinstance(value, str) and value else json.dumps(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main(check: bool) -> int:
    written = page(dict(found for source in SOURCES for found in components(source)))
    if not check:
        PAGE.write_text(written)
    elif not PAGE.exists() or PAGE.read_text() != written:
        print(f"{PAGE.relative_to(ROOT)} is not what the classes say: run python tools/config_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the classes of the configuration.")
    parser.add_argument("--check", action="store_true", help="compare instead, and exit with 1 on a difference")
    sys.exit(main(parser.parse_args().check))
