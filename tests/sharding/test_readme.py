import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "sharding" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_is_an_example() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})
