"""The package as its users see it."""

import subprocess
import sys

import drivetrain_rollout


def test_importing_it_imports_no_engine_and_sets_nothing():
    program = (
        "import os, sys; before = dict(os.environ); import drivetrain_rollout, drivetrain_rollout.vllm, "
        "drivetrain_rollout.transformers, drivetrain_rollout.testing; assert dict(os.environ) == before; "
        "print([name for name in ('torch', 'numpy', 'vllm', 'transformers', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_what_is_exported_exists_and_is_sorted():
    assert all(hasattr(drivetrain_rollout, name) for name in drivetrain_rollout.__all__)
    assert drivetrain_rollout.__all__ == sorted(drivetrain_rollout.__all__)
