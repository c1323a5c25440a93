"""vLLM on a GPU: the contract with sleep, log-probs and updates, with CUDA graphs and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).with_name("vllm_on_gpu.py")


@pytest.mark.parametrize(
    ("dtype", "mode", "mean"), [("float32", "eager", 5e-3), ("bfloat16", "graphs", 0.15)], ids=["fp32", "bf16"]
)
def test_on_a_gpu(tmp_path, dtype: str, mode: str, mean: float):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path, dtype, mode], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["contract_failures"] == {}
    for difference in [*facts["temperatures"].values(), *facts["updates"]]:
        assert difference["mean"] < mean, facts
    assert facts["free_while_asleep"] > 0.9
