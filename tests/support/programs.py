"""Test files that are also the program of processes which their tests start."""

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """For `python THIS_FILE ...`: one thread for each process, and the modules of this folder."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
