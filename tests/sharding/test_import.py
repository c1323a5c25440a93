import subprocess
import sys

PROGRAM = """
import os, sys
environment = dict(os.environ)
import torch
import drivetrain_sharding
loaded = {"transformers", "safetensors", "vllm", "numpy.random", "torch.distributed.fsdp"} & set(sys.modules)
assert loaded <= BEFORE, loaded
assert dict(os.environ) == environment
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert all(hasattr(drivetrain_sharding, name) for name in drivetrain_sharding.__all__)
"""


def test_importing_loads_nothing_heavy_and_changes_nothing() -> None:
    program = PROGRAM.replace(
        "import drivetrain_sharding\n", "BEFORE = set(sys.modules)\nimport drivetrain_sharding\n", 1
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
