"""Predicted memory: against a measured run, against models that are made, and by identities."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from drivetrain_sharding import Fit, Mesh, engine_fit, frozen_fit, kv_bytes, train_layout, training_fit, vllm_layout

ROOT = Path(__file__).parents[2]
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
UNTIED = QWEN | {"tie_word_embeddings": False}  # fmt: skip


def measured() -> list[dict]:
    return json.loads((ROOT / "benchmarks/results/fit-h200.json").read_text())["results"]


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_on_gpu", ROOT / "benchmarks/fit_on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_on_gpu"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("result", measured(), ids=lambda result: result["case"])
def test_what_a_gpu_measured_is_predicted(cases: ModuleType, result: dict):
    """Within 10 %, on cases that the formulas were not tuned on as well."""
    [case] = [case for case in cases.CASES if case.name == result["case"]]
    assert cases.predicted(case).total / result["measured"] == pytest.approx(1, abs=0.1)


def test_six_of_the_measured_cases_were_held_out():
    assert sum(not result["tuned"] for result in measured()) >= 6


@pytest.mark.parametrize("config", [QWEN, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_are_those_of_the_layouts(config: dict, tp: int):
    served = vllm_layout(config, tp=tp, dtype=torch.bfloat16)
    held = sum(math.prod(shape) for shape in served.parameter_shapes(0).values())
    assert engine_fit(config, kv_tokens=0, tp=tp).total == 2 * held
    if tp == 1:
        trained = train_layout(config, Mesh((("dp", 1),)), dtype=torch.float32)
        count = sum(math.prod(shape) for shape in trained.parameter_shapes(0).values())
        fit = training_fit(config, tokens=1)
        assert (fit.parameters, fit.gradients, fit.optimizer) == (4 * count, 4 * count, 8 * count)


def test_the_cache_of_a_token_by_hand():
    # 28 layers, 2 heads of 128, keys and values, 2 bytes
    assert kv_bytes(QWEN) == 28 * 2 * 128 * 2 * 2 == 28_672
    assert kv_bytes(QWEN, tp=2) == 14_336
    assert kv_bytes(QWEN, tp=4) == 14_336  # a head each at least
    assert engine_fit(QWEN, kv_tokens=1000).kv_cache == 28_672_000


def test_more_takes_more_and_sharing_takes_less():
    base = training_fit(QWEN, tokens=8192)
    assert base.total < training_fit(QWEN, tokens=16384).total
    assert base.total < training_fit(QWEN, tokens=8192, microbatches=2).total
    assert base.total > training_fit(QWEN, tokens=8192, checkpoint_every=1).total
    assert base.total > training_fit(QWEN, tokens=8192, value_head=True).total
    assert base.total > training_fit(QWEN, tokens=8192, entropy=False).total
    assert base.total > training_fit(QWEN, tokens=8192, shards=2).total
    assert base.total > training_fit(QWEN, tokens=8192, offload_optimizer=True).total
    small = training_fit(QWEN, tokens=1024, checkpoint_every=1)
    assert small.total > training_fit(QWEN, tokens=1024, checkpoint_every=1, offload_parameters=True).total
    every = [training_fit(QWEN, tokens=32768, checkpoint_every=n).total for n in (1, 2, 28)]
    assert every[2] > every[1]


def test_a_frozen_role_takes_its_parameters_and_a_forward_pass():
    fit = frozen_fit(QWEN, tokens=1024, dtype=torch.bfloat16)
    assert (fit.gradients, fit.optimizer) == (0, 0)
    assert fit.parameters == engine_fit(QWEN, kv_tokens=0).parameters
    assert 0 < fit.total - fit.parameters < 2 << 30


def test_roles_add_up_and_are_described():
    together = Fit(parameters=2**30, logits=2**29) + Fit(parameters=2**30, kv_cache=3 * 2**30)
    assert together == Fit(parameters=2**31, logits=2**29, kv_cache=3 * 2**30)
    assert together.total == 11 * 2**29
    lines = together.describe().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["parameters", "2.00"], ["logits", "0.50"], ["kv_cache", "3.00"], ["total", "5.50"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 1, "shards": 0}, "shards=0"),
        ({"tokens": 1, "microbatches": 0}, "use 1"),
    ],
)
def test_numbers_out_of_range(settings: dict, match: str):
    with pytest.raises(ValueError, match=match):
        training_fit(QWEN, **settings)


def test_models_that_are_not_predicted():
    moe = QWEN | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64}
    with pytest.raises(ValueError, match="mixture of experts"):
        training_fit(moe, tokens=1)
    with pytest.raises(ValueError, match="model type 'gpt2'"):
        training_fit({"model_type": "gpt2"}, tokens=1)
