"""Mixtures of experts, which transformers stacks, checkpoints hold one by one, and vLLM's CPU kernels pack."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_rollout import EngineConfig, WeightsRefused
from drivetrain_rollout._manifest import checkpoint_tensors, manifest_of, read_manifest
from drivetrain_rollout.testing import load_tensors
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_sharding import digest
from engines import off, push, run
from programs import environment
from safetensors.torch import load_file
from tiny_models import SIZES, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

# vLLM pads the experts' 48 rows for its kernel.
QWEN = tiny_config(
    "qwen3 moe", hidden_size=64, head_dim=32, num_experts=4, moe_intermediate_size=48, initializer_range=0.1
)
STACK = "model.layers.0.mlp.experts.gate_up_proj"
FIRST = "model.layers.0.mlp.experts.0.gate_proj.weight"
OTHERS = {
    "olmoe": {"num_experts": 4, "pad_token_id": 0, "eos_token_id": 1},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 10},
}


def make_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", *OTHERS])
def test_the_manifest_is_what_a_checkpoint_holds(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **SIZES, **OTHERS[family]) if family in OTHERS else QWEN
    make_model(config).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    manifest = read_manifest(config)
    assert manifest.shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert FIRST in manifest.shapes
    loaded = dict(load_tensors(tmp_path))
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_tensors_share_the_models_memory() -> None:
    model = make_model(QWEN)
    tensors = checkpoint_tensors(model)
    tensors[FIRST].fill_(3.0)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"].fill_(5.0)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert (stack == 3.0).sum() == (stack == 5.0).sum() == 48 * 64
    assert (stack[0, :48] == 3.0).all()
    assert (stack[3, 48:] == 5.0).all()


def test_a_family_whose_checkpoints_name_them_otherwise_keeps_the_modules_names() -> None:
    model = make_model(AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2))
    assert STACK in manifest_of(model).shapes


def test_the_transformers_engine_takes_them_one_by_one(tmp_path: Path) -> None:
    model, other = (make_model(QWEN, seed) for seed in (0, 1))
    model.save_pretrained(tmp_path / "0")
    other.save_pretrained(tmp_path / "1")
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    engine = TransformersEngine(EngineConfig(engine="transformers", model=str(tmp_path / "0")), digest=digest)
    assert off(engine, model) < 1e-4 < off(engine, other)
    push(engine, tensors.items())
    assert off(engine, other) < 1e-4 < off(engine, model)
    del tensors[FIRST]
    with pytest.raises(
        WeightsRefused, match=r"2 tensors .*gate_up_proj \(unknown to the model\); .*0\.gate_proj.*missing"
    ):
        push(engine, [*tensors.items(), (STACK, torch.zeros(4, 96, 64))])
    assert off(engine, other) < 1e-4
    run(engine.close())


IN_PROCESS = """
import json, sys
from drivetrain_rollout import WeightsRefused
from drivetrain_rollout.vllm import VLLMEngine
from drivetrain_sharding import digest
from engines import off, push, run, vllm_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

folders = sys.argv[1:]
engine = VLLMEngine(vllm_config(folders[0]))
models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
tensors = [load_file(f"{folder}/model.safetensors") for folder in folders]
found = [off(engine, models[0])]
for version in (1, 0, 1):
    push(engine, tensors[version].items())
    found.append(off(engine, models[version]))
cut = "model.layers.0.mlp.experts.2.up_proj.weight"  # its layer has others by then
update = {name: tensor.to("meta") if name == cut else tensor for name, tensor in tensors[0].items()}
from drivetrain_rollout import WeightUpdate
try:
    run(engine.update_weights(WeightUpdate(policy_version=9, digest="9", tensors=update.items())))
    broken = "it was taken"
except WeightsRefused as error:
    broken = str(error)
status = engine.weights.status
push(engine, tensors[0].items())
found.append(off(engine, models[0]))
print(json.dumps({"off": found, "apart": off(engine, models[1]), "broken": broken, "status": status}))
run(engine.close())
"""


def test_vllm_serves_each_update_of_them(tmp_path: Path) -> None:
    """Its CPU kernel computes with packed weights, which a reload would leave plain; also after one that broke off."""
    pytest.importorskip("vllm")
    for seed in (0, 1):
        make_model(QWEN, seed).save_pretrained(tmp_path / str(seed))
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, *(str(tmp_path / str(seed)) for seed in (0, 1))],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["off"]) < 1e-4 < found["apart"]
    assert "loading broke off" in found["broken"]
    assert found["status"] == "refused"
