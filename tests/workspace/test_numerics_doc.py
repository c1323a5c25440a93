"""docs/numerics.md prints what it shows."""

import contextlib
import io
import re

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
"""Code, and the output shown right under it."""


def test_each_block_prints_what_stands_under_it(root):
    page = (root / "docs" / "numerics.md").read_text()
    namespace: dict[str, object] = {}
    shown, printed = {}, {}
    for block in BLOCK.finditer(page):
        line = page[: block.start()].count("\n") + 1
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * line + block[1], "docs/numerics.md", "exec"), namespace)
        shown[f"line {line}"], printed[f"line {line}"] = block[2] or "", output.getvalue()
    assert len(shown) == page.count("```python") == page.count("```text") + 1, "one block sets up, the others print"
    assert printed == shown


def test_links_lead_somewhere(root):
    page = root / "docs" / "numerics.md"
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
