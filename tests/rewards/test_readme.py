import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "rewards" / "README.md"


def test_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run([sys.executable, "-W", "error", "-c", blocks[0]], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[1.0, 0.0]\n"), done.stderr
