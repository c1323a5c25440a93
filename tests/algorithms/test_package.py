import doctest
import inspect
import pathlib
import re
import subprocess
import sys

import drivetrain_algorithms
import pytest
from drivetrain_algorithms import kl

README = pathlib.Path(__file__).parents[2] / "packages/algorithms/README.md"


def test_the_public_names_are_documented() -> None:
    for name in drivetrain_algorithms.__all__:
        member = getattr(drivetrain_algorithms, name)
        if inspect.isfunction(member):
            assert member.__doc__ is not None
            assert "Raises:" in member.__doc__, name


def test_importing_it_starts_nothing() -> None:
    code = (
        "import sys, drivetrain_algorithms, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized();"
        "assert not {'transformers', 'vllm', 'ray', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_readme_blocks_run(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_docstring_examples_hold() -> None:
    result = doctest.testmod(kl)
    assert result.attempted > 0
    assert result.failed == 0
