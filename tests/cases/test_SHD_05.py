"""SHD-05: names of pushed tensors that the receiver does not know are skipped, and the served weights never change.

verl-project/verl#7070 (https://github.com/verl-project/verl/pull/7070), verl-project/verl#7495, alibaba/ROLL#500,
huggingface/trl#5269: wrappers put `_orig_mod`, `_checkpoint_wrapped_module`, `base_layer` or `model.language_model`
into names, the receiver passed over all of them, and for two months 399 tensors were pushed at every step of which none
was trained. It looked like staleness.

Here a mixture of experts, whose names differ between transformers and checkpoints besides, is pushed out of such
wrappers into the transformers engine and the real vLLM, and through plans between layouts.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest
import torch
from drivetrain_rollout import RolloutEngine, WeightsRefused, WeightWrite
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_sharding import (
    LayoutMismatch,
    Mesh,
    checkpoint_activations,
    combine,
    digest,
    make_plan,
    named_tensors,
    piece_hashes,
    read_layout,
    train_layout,
    vllm_layout,
)
from engines import off, push, run, vllm_config, vllm_worker
from msgspec.structs import replace
from tiny_models import tiny_config
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM

CLOSE = 1e-4  # between log-probs of one model in fp32
# Sizes that vLLM has a kernel for on the CPU.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 32}
CONFIG = tiny_config("qwen3 moe", **SIZES, initializer_range=0.1)
DOWN = "model.layers.0.mlp.experts.3.down_proj.weight"


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def train(model: nn.Module, lr: float) -> None:
    """One optimizer step."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def hash_what_lies_there(parameters: Mapping[str, Tensor], message: bytes) -> Callable[[], str]:
    """A writer that writes nothing, and says what the engine samples with."""
    layout = train_layout(CONFIG, Mesh((("dp", 1),)), dtype=torch.float32)
    return lambda: combine(layout, {0: piece_hashes(layout, 0, parameters)}).hex


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    if request.param == "vllm":
        with vllm_worker() as peer:
            engine: RolloutEngine = RemoteEngine(peer, vllm_config(folder))
            yield engine
            run(engine.close())
        return
    config = replace(vllm_config(folder), engine="transformers", kv_cache_bytes=None)
    engine = TransformersEngine(config, digest=digest, writer=hash_what_lies_there)
    yield engine
    run(engine.close())


def is_served(engine: RolloutEngine, model: nn.Module, version: str) -> None:
    """The engine holds this model, not only by its own account."""
    assert (engine.weights.status, engine.weights.digest) == ("ready", version)
    assert off(engine, model) < CLOSE
    if engine.info.can_write:
        write = WeightWrite(policy_version=engine.weights.policy_version, digest=version, message=b"")
        assert run(engine.write_weights(write)).digest == version


def compiled(model: Any) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


def checkpointed(model: Any) -> nn.Module:
    """By torch's wrapper, which changes names, and by ours, which does not."""
    checkpoint_activations(model.model)
    layer = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda child: isinstance(child, layer))
    return cast(nn.Module, model)


WRAPPERS = {
    "compiled": compiled,
    "checkpointed": checkpointed,
    "both": lambda model: compiled(checkpointed(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_no_names_and_each_step_arrives(engine: RolloutEngine, wrapper: str) -> None:
    model = make_model()
    layout = read_layout(model)
    wrapped = WRAPPERS[wrapper](model)
    assert any("_orig_mod" in name or "_wrapped" in name for name, _ in wrapped.named_parameters())
    before = push(engine, named_tensors(wrapped))
    is_served(engine, model, before)
    train(model, lr=0.0)
    assert push(engine, named_tensors(wrapped)) == before
    is_served(engine, model, before)
    train(model, lr=1.0)
    assert off(engine, model) > 100 * CLOSE
    after = push(engine, named_tensors(wrapped))
    assert after == digest(named_tensors(wrapped)) != before
    is_served(engine, model, after)
    assert [name for name, _ in named_tensors(wrapped)] == [spec.name for spec in layout.tensors]
    assert read_layout(wrapped).tensors == layout.tensors
    make_plan(read_layout(wrapped), vllm_layout(CONFIG, dtype=torch.float32))


def refusal(engine: RolloutEngine, tensors: Mapping[str, Tensor]) -> str:
    """What the engine says to an update, after which it must serve what it served before."""
    state = engine.weights
    with pytest.raises(WeightsRefused) as error:
        push(engine, tensors.items())
    assert engine.weights == state
    return str(error.value)


def test_extra_missing_and_misshaped_names_are_one_error_with_all_of_them(engine: RolloutEngine) -> None:
    model = make_model()
    before = push(engine, named_tensors(model))
    train(model, lr=1.0)
    tensors = dict(named_tensors(model))
    query, key = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    tensors[stack] = torch.zeros(4, 128, 64)
    tensors[query] = tensors[query].T
    tensors[DOWN] = tensors[DOWN][:, :-1]
    del tensors[key]
    text = refusal(engine, tensors)
    for problem in (
        "5 tensors of the update do not fit the model",
        "model.language_model.norm.weight (unknown to the model)",
        f"{stack} (unknown to the model)",
        f"{query} (shape [64, 128], the model has [128, 64])",
        f"{DOWN} (shape [64, 63], the model has [64, 64])",
        f"{key} (missing)",
    ):
        assert problem in text
    is_served(engine, make_model(), before)


def test_a_model_within_a_module_is_not_pushed_under_other_names(engine: RolloutEngine) -> None:
    model = make_model()
    before = push(engine, named_tensors(model))
    train(model, lr=1.0)
    text = refusal(engine, dict(named_tensors(nn.ModuleDict({"language_model": model}))))
    names = [name for name, _ in named_tensors(model)]
    assert f"{2 * len(names)} tensors of the update do not fit the model" in text
    for name in names:
        assert f"language_model.{name} (unknown to the model)" in text
        assert f"{name} (missing)" in text
    is_served(engine, make_model(), before)


class LoRA(nn.Module):
    """A linear layer with an adapter, with the names that peft gives them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.base_layer(hidden) + self.lora_B["default"](self.lora_A["default"](hidden)))

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base_layer.weight += self.lora_B["default"].weight @ self.lora_A["default"].weight  # type: ignore[operator]
        return self.base_layer


def adapted() -> tuple[Any, Callable[[], Any]]:
    """A model with adapters, and what merges them into it."""
    model = make_model().requires_grad_(False)
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.q_proj = LoRA(attention.q_proj)

    def merge() -> Any:
        for attention in attentions:
            attention.q_proj = attention.q_proj.merged()
        return model

    return model, merge


def adapted_by_peft() -> tuple[Any, Callable[[], Any]]:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model, model.merge_and_unload


@pytest.mark.parametrize("make", [adapted, adapted_by_peft])
def test_adapters_are_refused_with_the_list_until_they_are_merged(
    engine: RolloutEngine, make: Callable[[], tuple[Any, Callable[[], Any]]]
) -> None:
    model, merge = make()
    before = push(engine, named_tensors(make_model()))
    train(model, lr=1.0)
    tensors = dict(named_tensors(model))
    hidden = [name for name in tensors if "base_layer" in name]
    assert len(hidden) == 2
    assert len([name for name in tensors if "lora_" in name]) == 4
    text = refusal(engine, tensors)
    plain = dict(named_tensors(make_model()))
    for name in tensors:
        assert (f"{name} (unknown to the model)" in text) == (name not in plain)
    for name in plain:
        assert (f"{name} (missing)" in text) == (name not in tensors)
    is_served(engine, make_model(), before)
    with pytest.raises(LayoutMismatch) as error:
        make_plan(read_layout(model), vllm_layout(CONFIG, dtype=torch.float32))
    for name in tensors.keys() ^ plain.keys():
        assert name in str(error.value)
    merged = merge()
    after = push(engine, named_tensors(merged))
    assert after != before
    is_served(engine, merged, after)
    make_plan(read_layout(merged), vllm_layout(CONFIG, dtype=torch.float32))


def test_plans_name_all_that_does_not_fit() -> None:
    """What moves by plan, and not as named tensors, is checked as a whole as well, before anything moves."""
    model = make_model()
    model.model.norm.extra = nn.Parameter(torch.zeros(1))
    del model.model.layers[1].self_attn.q_norm
    model.model.layers[1].self_attn.k_norm = nn.LayerNorm(7, bias=False)
    with pytest.raises(LayoutMismatch) as error:
        make_plan(read_layout(model), vllm_layout(CONFIG, dtype=torch.float32))
    attention = re.escape("model.layers.1.self_attn.")
    for problem in (r"model\.norm\.extra", rf"{attention}q_norm\.weight", rf"{attention}k_norm\.weight.*7"):
        assert re.search(problem, str(error.value))
