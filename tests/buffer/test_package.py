import doctest
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[2] / "packages/buffer/README.md"


def test_importing_it_takes_msgspec_and_nothing_heavy() -> None:
    code = "import sys, drivetrain_buffer; assert not {'torch', 'numpy', 'vllm', 'ray', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_readme_blocks_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(README), "exec"), {})
    assert "issued=3, trained=2, filtered=0, stale=1, failed=0, in_flight=0" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["_ranges", "ledger", "rollout_buffer"])
def test_docstring_examples_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"drivetrain_buffer.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
