"""vLLM's own models, filled by its own `load_weights`. This file is also the program that makes them."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_sharding import vllm_layout
from layouts import wrong_pieces
from programs import environment
from tiny_models import MODELS, save, tiny_config

pytestmark = pytest.mark.slow

# Sizes that four ranks divide, and experts that vLLM has a CPU kernel for; of four ranks, two hold the same of the two
# key-value heads.
SIZES = {"hidden_size": 64, "intermediate_size": 88, "moe_intermediate_size": 128, "num_experts": 4}
# Tensor-parallel size, and whether experts are shared out whole.
ENGINES = ((1, False), (2, False), (4, False), (2, True))
CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
PADDED = ("model.embed_tokens.weight", "lm_head.weight")


def engines_of(name: str) -> list[tuple[int, bool]]:
    return [(tp, parallel) for tp, parallel in ENGINES if not parallel or "moe" in name]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("vllm")
    for name in MODELS:
        # Heads of another size than hidden size over heads, which vLLM's qwen2 does not know.
        save(tiny_config(name, **SIZES, head_dim=16 if "qwen2" in name else 32), Path(folder, name))
    settings = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(folder)], env=environment() | settings, check=True, timeout=300)
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_values_are_vllms(found: dict[str, Any], name: str) -> None:
    for tp, parallel in engines_of(name):
        for rank in range(tp):
            assert found[f"{name}, tp {tp}, {parallel}, {rank}"] == {"shapes": [], "wrong": []}, (tp, parallel, rank)


def as_ranks_of(size: int, rank: int) -> None:
    """Makes this process stand in for one of `size` ranks: building and filling a model talks to no other rank."""
    from vllm.distributed import parallel_state

    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:
            group.world_size, group.rank_in_group = size, rank


def look(folder: Path, name: str, tp: int, parallel: bool) -> dict[str, Any]:
    from safetensors.torch import load_file
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    settings = EngineArgs(
        model=str(folder / name),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_expert_parallel=parallel,
    ).create_engine_config()
    whole = load_file(folder / name / "model.safetensors")
    layout = vllm_layout(
        AutoConfig.from_pretrained(folder / name), tp=tp, dtype=torch.float32, expert_parallel=parallel
    )
    found: dict[str, Any] = {}
    with set_current_vllm_config(settings):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
        settings.parallel_config.tensor_parallel_size = tp
        for rank in range(tp):
            settings.compilation_config.static_forward_context.clear()
            as_ranks_of(tp, rank)
            model = initialize_model(settings)
            model.load_weights(iter(whole.items()))
            as_ranks_of(1, 0)
            held = {key: value.detach() for key, value in model.named_parameters()}
            expected = layout.parameter_shapes(rank)
            shapes = {key: tuple(value.shape) for key, value in held.items()}
            found[f"{name}, tp {tp}, {parallel}, {rank}"] = {
                "shapes": [key for key in shapes.keys() | expected if expected.get(key) != shapes.get(key)],
                "wrong": wrong_pieces(layout, rank, held, whole, padded=PADDED) if shapes == expected else ["shapes"],
            }
    return found


def main(folder: Path) -> None:
    from vllm import ModelRegistry
    from vllm.distributed import parallel_state

    # vLLM would look at each class in a process of its own.
    for module, name in CLASSES.items():
        ModelRegistry.register_model(name, getattr(import_module(f"vllm.model_executor.models.{module}"), name))
    found: dict[str, Any] = {}
    for name in MODELS:
        for tp, parallel in engines_of(name):
            found |= look(folder, name, tp, parallel)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
