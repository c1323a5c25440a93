import subprocess
import sys

PROGRAM = """
import os, sys
environment = dict(os.environ)
import torch
import drivetrain_learner
loaded = {"transformers", "safetensors", "vllm", "numpy.random", "torch.distributed.fsdp"} & set(sys.modules)
assert loaded <= BEFORE, loaded
assert dict(os.environ) == environment
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert all(hasattr(drivetrain_learner, name) for name in drivetrain_learner.__all__)
"""


def test_importing_loads_nothing_heavy_and_changes_nothing() -> None:
    program = PROGRAM.replace(
        "import drivetrain_learner\n", "BEFORE = set(sys.modules)\nimport drivetrain_learner\n", 1
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
