"""Sampling on a CPU through our engine and a pool, beside vLLM's own AsyncLLM and transformers' `generate`.

The same as `rollout_on_gpu.py`, with the shape of SmolLM2-135M in bf16; ours returns log-probs, also beside an AsyncLLM
that does not.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

COUNTS = itertools.count()


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_on_gpu", Path(__file__).with_name("rollout_on_gpu.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    pytest.importorskip("vllm")
    folder = str(tmp_path_factory.mktemp("model"))
    script.write_config(script.Work("135m"), folder)
    found: dict = {}
    try:
        for role in script.ROLES:
            found[role] = script.Child(role, folder, "135m")
            found[role].hear()
        yield found
        for child in found.values():
            child.ask("close", 0)
            child.process.wait(120)
    finally:
        for child in found.values():
            child.process.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("baseline", "owed"), [("sampled", 0.95), ("flat", 0.95), ("none", 0.95), ("generate", 1.0)])
@pytest.mark.parametrize("ours", ["ours", "pool"])
def test_sampling(against, benchmark, children, ours, baseline, owed):
    against(
        lambda: children["ours"].ask(ours, next(COUNTS) + 1),
        lambda: children[script.KINDS[baseline]].ask(baseline, next(COUNTS) + 1),
        owed=owed,
        rounds=5,
    )
    benchmark.extra_info["tokens_per_s"] = script.Work("135m").tokens / benchmark.stats.stats.median
