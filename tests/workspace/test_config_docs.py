"""docs/configuration.md says what the code says."""

import subprocess
import sys

import msgspec
from drivetrain_ppo.config import FREE_FORM, RunConfig


def test_the_page_is_up_to_date(root):
    command = [sys.executable, root / "tools" / "config_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_key_with_the_default_of_a_run(root):
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict) and prefix + key not in FREE_FORM:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    rows = [line.split(" | ") for line in (root / "docs" / "configuration.md").read_text().splitlines()]
    shown = {row[0].strip("| `"): row[-2].strip("`") for row in rows if row[0].startswith("| `")}
    expected = {
        key: value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
        for key, value in leaves(msgspec.to_builtins(RunConfig()))
    }
    assert shown.keys() == expected.keys()
    for key, value in expected.items():
        assert shown[key] == value or msgspec.json.decode(shown[key]) == msgspec.json.decode(value), key
