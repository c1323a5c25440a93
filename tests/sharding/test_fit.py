"""Predicted memory beside what torch's allocator hands out: on this CPU, on two ranks of gloo, and on an H200.

This file is also the program that each rank runs.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, ValueModel
from drivetrain_sharding import (
    PROCESS,
    Fit,
    Mesh,
    checkpoint_activations,
    device_mesh,
    engine_fit,
    frozen_fit,
    kv_bytes,
    shard_model,
    train_layout,
    training_fit,
    vllm_layout,
)
from gloo_ranks import be_a_rank, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import bf16_products_need_no_buffer, peak_bytes
from transformers import AutoConfig, AutoModelForCausalLM

WORLD = 2
TOKENS, LENGTH = 512, 128
LOGITS = 2**18
"""Of a chunk: as few beside these models as the learner's are beside real ones."""

QWEN2_15B = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
       "num_experts": 4}  # fmt: skip


def config_of(family: str = "qwen2", *, layers: int = 6, width: int = 128, inner: int = 512, **more: Any) -> Any:
    """Of a model in which attention's kernel on a CPU keeps what a GPU's keeps: as many key as query heads."""
    heads = width // 32
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 32}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 2048}
    return {"model_type": family, "tie_word_embeddings": True} | sizes | more


def build(config: Any, role: str, dtype: torch.dtype, autocast: torch.dtype | None) -> Any:
    rest = dict(config)
    own = AutoConfig.for_model(rest.pop("model_type"), **rest, max_position_embeddings=LENGTH)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(own, dtype=dtype)
    module: Any = (ValueModel if role == "critic" else PolicyModel)(model, autocast=autocast)
    return module.requires_grad_(role != "reference").train()


def stepper(module: Any, tokens: int, *, microbatches: int = 1, entropy: bool = True, group: Any = None) -> Any:
    """A learner, and a step of it on sequences of `LENGTH` tokens."""
    learner = Learner(module, LearnerConfig(lr=1e-6, max_tokens_per_microbatch=tokens), process_group=group)
    count = microbatches * tokens // LENGTH
    ids = torch.randint(0, 256, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1)).tolist()
    batch = PackedBatch.pack(ids, [[True] * (LENGTH + 1)] * count)

    def loss(part: PackedBatch) -> LossTerms:
        if isinstance(module, ValueModel):
            return LossTerms(loss=module(part).square().sum() / batch.num_tokens)
        out = module(part, entropy=entropy)
        total = out.logprobs.sum() + (out.entropy.sum() if entropy else 0.0)
        return LossTerms(loss=total / batch.num_tokens)

    def step() -> None:
        if learner.optimizer.param_groups[0]["params"]:
            assert learner.update(batch, loss).skipped is None
        else:
            learner.infer(batch, lambda part: module(part, entropy=entropy).logprobs)

    return learner, step


def local_bytes(tensors: Any) -> int:
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in locals_)


def measured(module: Any, step: Any, learner: Any, folder: Path) -> int:
    """The peak of a second step: what there is before it, and what it takes."""
    step()
    held = local_bytes(dict.fromkeys(module.parameters()))
    states = local_bytes(tensor for state in learner.optimizer.state.values() for tensor in state.values())
    return held + states + peak_bytes(step, folder)


TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (config_of(), {}),
    "qwen3, no entropy": (config_of("qwen3"), {"entropy": False}),
    "llama, head of its own": (config_of("llama", tie_word_embeddings=False), {}),
    "mistral, one chunk of logits": (config_of("mistral", vocab_size=256), {}),
    "gemma 3": (config_of("gemma3_text"), {}),
    "three micro-batches": (config_of(), {"microbatches": 3}),
    "checkpointed": (config_of(layers=8, width=256, inner=1024), {"checkpoint_every": 1}),
    "checkpointed, micro-batches": (config_of(layers=12, inner=256), {"checkpoint_every": 1, "microbatches": 2}),
    "every second block": (config_of(), {"checkpoint_every": 2}),
    "every fourth block": (config_of(layers=9), {"checkpoint_every": 4}),
    "critic": (config_of(), {"value_head": True}),
    "critic, head of its own": (config_of(tie_word_embeddings=False), {"value_head": True}),
    "fp32": (config_of(), {"compute": torch.float32}),
    "fp32, qwen3": (config_of("qwen3"), {"compute": torch.float32, "entropy": False}),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain_learner.logprobs._LOGITS_PER_CHUNK", LOGITS)
    monkeypatch.setattr("drivetrain_sharding._memory.LOGITS", LOGITS)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_takes_what_is_predicted(name: str, tmp_path: Path) -> None:
    config, options = TRAINED[name]
    compute = options.get("compute", torch.bfloat16)
    autocast = None if compute == torch.float32 else compute
    module = build(config, "critic" if options.get("value_head") else "actor", torch.float32, autocast)
    if every := options.get("checkpoint_every"):
        checkpoint_activations(module, every=every)
    more = {key: options[key] for key in ("microbatches", "entropy") if key in options}
    learner, step = stepper(module, TOKENS, **more)
    found = measured(module, step, learner, tmp_path)
    assert training_fit(config, tokens=TOKENS, **options).total == pytest.approx(found, rel=0.03)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["head", "feed-forward", "attention"])
def test_log_probs_take_what_is_predicted(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, tokens = {
        "head": (config_of(), 1024),
        "feed-forward": (config_of(inner=1024, layers=4), 4096),
        "attention": (config_of("qwen3", inner=64, num_attention_heads=8, num_key_value_heads=8, layers=4), 4096),
    }[name]
    if name != "attention" and not bf16_products_need_no_buffer(tmp_path):
        pytest.skip("this CPU multiplies bf16 matrices with a buffer that a GPU does not need")
    module = build(config, "reference", dtype, torch.bfloat16)
    learner, step = stepper(module, tokens, entropy=False)
    found = measured(module, step, learner, tmp_path)
    assert frozen_fit(config, tokens=tokens, dtype=dtype).total == pytest.approx(found, rel=0.05)


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp": (config_of(), {"shards": WORLD}),
    "fsdp, checkpointed": (config_of(layers=12), {"shards": WORLD, "checkpoint_every": 1}),
    "fsdp, bf16": (config_of(), {"shards": WORLD, "param_dtype": torch.bfloat16}),
    "tp": (config_of(), {"tp": WORLD}),
}


def look(folder: Path) -> dict[str, Any]:
    import drivetrain_learner.logprobs as logprobs
    import drivetrain_sharding._memory as memory

    logprobs._LOGITS_PER_CHUNK = memory.LOGITS = LOGITS  # type: ignore[assignment]
    found = {}
    for number, (name, (config, options)) in enumerate(LAYOUTS.items()):
        tp, param_dtype = options.get("tp", 1), options.get("param_dtype")
        span = Mesh((("dp", WORLD // tp), ("tp", tp)))
        mesh = device_mesh(span, "cpu")
        module = build(config, "actor", torch.float32, None if param_dtype else torch.bfloat16)
        if every := options.get("checkpoint_every"):
            checkpoint_activations(module, every=every)
        layout = train_layout(config, span, dtype=torch.float32, fsdp="dp", tp="tp")
        shard_model(module, mesh, layout, param_dtype=param_dtype)
        learner, step = stepper(module, TOKENS, group=mesh.get_group("dp"))
        own = folder / f"{number} {torch.distributed.get_rank()}"
        own.mkdir()
        found[name] = [training_fit(config, tokens=TOKENS, **options).total, measured(module, step, learner, own)]
    return found


def test_a_sharded_step_takes_what_is_predicted(tmp_path: Path) -> None:
    first, _ = run_ranks(__file__, tmp_path, world=WORLD)
    ratios = {name: predicted / found for name, (predicted, found) in first.items()}
    assert ratios == {name: pytest.approx(1, abs=0.05) for name in LAYOUTS}


def kept_results() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "fit-h200.json"
    return json.loads(file.read_text())["results"]


@pytest.mark.parametrize("row", kept_results(), ids=lambda row: row["name"])
def test_what_an_h200_took_is_predicted(row: Any) -> None:
    if row["role"] == "reference":
        fit = frozen_fit(row["config"], tokens=row["tokens"])
    else:
        fit = training_fit(
            row["config"],
            tokens=row["tokens"],
            microbatches=row["microbatches"],
            checkpoint_every=1 if row["checkpoint"] else None,
            entropy=row["entropy"],
            value_head=row["role"] == "critic",
        )
    assert fit.total == pytest.approx(row["measured"], rel=0.1)
    assert fit.total == row["predicted"], "python benchmarks/fit_on_gpu.py --again benchmarks/results/fit-h200.json"


def test_at_least_six_results_of_an_h200_are_held_out() -> None:
    assert sum(not row["tuned"] for row in kept_results()) >= 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_training_step_on_a_gpu_takes_what_is_predicted() -> None:
    config = config_of("qwen3", layers=8, width=512, inner=2048, vocab_size=32768, num_key_value_heads=4)
    with torch.device("cuda"):
        module = build(config, "actor", torch.float32, torch.bfloat16)
    _, step = stepper(module, 16384)
    step()
    there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    static = local_bytes(dict.fromkeys(module.parameters()))
    found = torch.cuda.max_memory_allocated() - there + 3 * static
    assert training_fit(config, tokens=16384).total == pytest.approx(found, rel=0.1)


def test_the_chunk_is_the_learners() -> None:
    from drivetrain_learner.logprobs import _LOGITS_PER_CHUNK
    from drivetrain_sharding._memory import LOGITS as ASSUMED

    assert ASSUMED == _LOGITS_PER_CHUNK


def test_parameters_gradients_and_states_are_counted_whole() -> None:
    count = 1_543_714_304  # of Qwen2-1.5B, as its model card and transformers have it
    fit = training_fit(QWEN2_15B, tokens=1, checkpoint_every=1)
    assert (fit.parameters, fit.optimizer) == (4 * count, 8 * count)
    assert training_fit(QWEN2_15B, tokens=1, states=0).optimizer == 0
    assert frozen_fit(QWEN2_15B, tokens=1, dtype=torch.bfloat16).parameters == 2 * count
    assert engine_fit(QWEN2_15B, kv_tokens=0) == Fit(parameters=2 * count)


def test_a_critic_has_no_head_over_the_vocabulary() -> None:
    untied = QWEN2_15B | {"tie_word_embeddings": False}
    table = 151936 * 1536
    actor, critic = (training_fit(untied, tokens=64, value_head=critic) for critic in (False, True))
    assert actor.parameters - critic.parameters == 4 * table
    assert critic.logits == 0


def test_shards_and_tensor_parallel_ranks_share() -> None:
    alone = training_fit(QWEN2_15B, tokens=4096, checkpoint_every=1)
    sharded = training_fit(QWEN2_15B, tokens=4096, checkpoint_every=1, shards=8)
    cut = training_fit(QWEN2_15B, tokens=4096, checkpoint_every=1, tp=2)
    assert sharded.parameters == pytest.approx(alone.parameters / 8, rel=0.01)
    assert sharded.optimizer == pytest.approx(alone.optimizer / 8, rel=0.01)
    assert sharded.gathered > alone.gathered
    assert cut.parameters == pytest.approx(alone.parameters / 2, rel=0.01)
    # Of an uneven table the first rank holds a row more than half.
    even, odd = (training_fit(config_of(vocab_size=rows), tokens=1, shards=2).parameters for rows in (2048, 2049))
    assert odd - even == 4 * 128


def test_what_is_offloaded_takes_nothing() -> None:
    plain = training_fit(QWEN2_15B, tokens=16384)
    states = training_fit(QWEN2_15B, tokens=16384, offload_optimizer=True)
    assert plain.total - states.total == plain.optimizer
    everything = training_fit(QWEN2_15B, tokens=16384, offload_parameters=True)
    assert everything.parameters == everything.optimizer == 0
    assert everything.gathered > plain.gathered
    # The states come back for the step, which is then the peak of a small batch.
    step = training_fit(QWEN2_15B, tokens=1, checkpoint_every=1, offload_optimizer=True)
    assert step.total == 16 * 1_543_714_304


def test_an_engine_holds_what_vllms_layout_says() -> None:
    for tp in (1, 2, 4):  # two key-value heads: four ranks hold each twice
        shapes = vllm_layout(QWEN2_15B, tp=tp, dtype=torch.bfloat16).parameter_shapes(0)
        elements = sum(torch.Size(shape).numel() for shape in shapes.values())
        heads = max(2 // tp, 1)
        assert engine_fit(QWEN2_15B, kv_tokens=1000, tp=tp, buckets=7) == Fit(
            parameters=2 * elements, kv_cache=1000 * 2 * 28 * heads * 128 * 2, buckets=7
        )
    assert kv_bytes(QWEN2_15B) == 28_672
    assert kv_bytes(QWEN2_15B, dtype=torch.float32, tp=8) == 28_672
    assert kv_bytes(MOE) == 2 * 2 * 2 * 16 * 2
    assert engine_fit(MOE, kv_tokens=1).kv_cache == kv_bytes(MOE)


def test_fits_add_up_and_rest() -> None:
    actor, engine = training_fit(QWEN2_15B, tokens=8192), engine_fit(QWEN2_15B, kv_tokens=10_000)
    both = actor + engine + PROCESS
    assert both.total == actor.total + engine.total + PROCESS.overhead
    assert both.kv_cache == engine.kv_cache
    assert actor.at_rest() == Fit(parameters=actor.parameters, optimizer=actor.optimizer)
    assert actor.at_rest(optimizer=False) == Fit(parameters=actor.parameters)
    assert engine.at_rest() == engine


def test_a_description_names_every_part() -> None:
    text = (Fit(parameters=3 << 30, kv_cache=1 << 29) + PROCESS).describe()
    assert [line.split() for line in text.splitlines()] == [
        ["parameters", "3.00", "GiB"],
        ["kv_cache", "0.50", "GiB"],
        ["overhead", "1.00", "GiB"],
        ["total", "4.50", "GiB"],
    ]


def test_transformers_configs_and_published_files_are_read() -> None:
    rest = dict(QWEN2_15B)
    config = AutoConfig.for_model(rest.pop("model_type"), **rest)
    assert training_fit(config, tokens=512) == training_fit(QWEN2_15B, tokens=512)
    duck = SimpleNamespace(to_dict=lambda: dict(QWEN2_15B))
    assert kv_bytes(duck) == kv_bytes(QWEN2_15B)


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    tokens=st.integers(1, 65536),
    more=st.integers(1, 65536),
    every=st.sampled_from([None, 1, 2, 28]),
    shards=st.sampled_from([1, 2, 7]),
    microbatches=st.integers(1, 2),
    entropy=st.booleans(),
)
def test_more_tokens_never_take_less(
    tokens: int, more: int, every: int | None, shards: int, microbatches: int, entropy: bool
) -> None:
    options: Any = {"checkpoint_every": every, "shards": shards, "microbatches": microbatches, "entropy": entropy}
    fewer = training_fit(QWEN2_15B, tokens=tokens, **options)
    assert 0 < fewer.total <= training_fit(QWEN2_15B, tokens=tokens + more, **options).total
    # Checkpointing all blocks never takes more than none.
    whole = training_fit(QWEN2_15B, tokens=tokens, **options | {"checkpoint_every": None})
    ours = training_fit(QWEN2_15B, tokens=tokens, **options | {"checkpoint_every": 1})
    assert ours.total <= whole.total * 1.05


def test_numbers_out_of_range_are_errors() -> None:
    with pytest.raises(ValueError, match=r"tokens=0, shards=-1: use 1 or more"):
        training_fit(QWEN2_15B, tokens=0, shards=-1)
    with pytest.raises(ValueError, match=r"checkpoint_every=29, and there are 28 blocks"):
        training_fit(QWEN2_15B, tokens=1, checkpoint_every=29)
    with pytest.raises(ValueError, match="tp=0"):
        engine_fit(QWEN2_15B, kv_tokens=1, tp=0)
    with pytest.raises(ValueError, match="mixture of experts"):
        training_fit(MOE, tokens=1)
    with pytest.raises(ValueError, match=r"model type 'mamba'.*read_layout"):
        frozen_fit({"model_type": "mamba"}, tokens=1)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        training_fit(QWEN2_15B, tokens=1, tp=3)


if __name__ == "__main__":
    be_a_rank(sys.argv[1], sys.argv[2], lambda: look(Path(sys.argv[2])), world=WORLD)
