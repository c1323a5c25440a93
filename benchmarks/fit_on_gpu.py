"""The memory that `drivetrain_sharding.fit` predicts beside what torch's allocator saw, on one GPU; prints one table.

    python benchmarks/fit_on_gpu.py --save benchmarks/results/fit-h200.json
    python benchmarks/fit_on_gpu.py --again benchmarks/results/fit-h200.json    # predict anew beside the kept peaks

Each case builds a model with random weights in the real shape, takes two optimizer steps with `drivetrain_learner` (the
first makes the optimizer's states), and reads the peak of the second. `tuned` cases were looked at while the formulas
were written; the others are held out. Owed: within 10 % on the latter. On a CPU it only shows that the cases run, with
tiny models.
"""

import argparse
import gc
import json
import pathlib
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, ValueModel
from drivetrain_ppo.accelerator import environment
from drivetrain_sharding import frozen_fit, training_fit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN2_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN2_15B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN2_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_1B = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
            "tie_word_embeddings": True}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    config: dict[str, Any]
    tokens: int
    microbatches: int = 1
    checkpoint: bool = False
    entropy: bool = True
    role: str = "actor"
    tuned: bool = False


CASES = (
    Case(name="0.5B 16k", config=QWEN2_05B, tokens=16384, tuned=True),
    Case(name="1.5B 8k", config=QWEN2_15B, tokens=8192, tuned=True),
    Case(name="1.5B 16k checkpointed", config=QWEN2_15B, tokens=16384, checkpoint=True, tuned=True),
    Case(name="0.6B 8k checkpointed, no entropy", config=QWEN3_06B, tokens=8192, checkpoint=True, entropy=False,
         tuned=True),
    Case(name="0.5B 32k checkpointed", config=QWEN2_05B, tokens=32768, checkpoint=True),
    Case(name="1.5B 16k", config=QWEN2_15B, tokens=16384),
    Case(name="1.5B 4k x 3", config=QWEN2_15B, tokens=4096, microbatches=3),
    Case(name="0.6B 16k", config=QWEN3_06B, tokens=16384),
    Case(name="0.6B 32k checkpointed x 2", config=QWEN3_06B, tokens=32768, checkpoint=True, microbatches=2),
    Case(name="3B 8k checkpointed", config=QWEN2_3B, tokens=8192, checkpoint=True),
    Case(name="Llama 1B 8k, no entropy", config=LLAMA_1B, tokens=8192, entropy=False),
    Case(name="1.5B 8k critic", config=QWEN2_15B, tokens=8192, role="critic"),
    Case(name="3B 32k reference", config=QWEN2_3B, tokens=32768, role="reference"),
)  # fmt: skip


def predicted(case: Case) -> Any:
    if case.role == "reference":
        return frozen_fit(case.config, tokens=case.tokens)
    return training_fit(
        case.config,
        tokens=case.tokens,
        microbatches=case.microbatches,
        checkpoint_every=1 if case.checkpoint else None,
        entropy=case.entropy,
        value_head=case.role == "critic",
    )


def batch(case: Case, vocabulary: int, length: int) -> PackedBatch:
    """Sequences of `length` tokens, of which every label is trained on."""
    count = case.microbatches * case.tokens // length
    ids = torch.randint(0, vocabulary, (count, length + 1)).tolist()
    return PackedBatch.pack(ids, [[True] * (length + 1)] * count)


def measure(case: Case) -> dict[str, int]:
    """Bytes at the peak of the second step, or pass: handed out by the allocator, reserved by it, and what the process
    has taken of the device outside it. Nothing on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(case.config)
    length = 1024
    if DEVICE == "cpu":
        config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        case = Case(**{**vars(case), "tokens": 64})
        length = 32
    settings = AutoConfig.for_model(config.pop("model_type"), **config, max_position_embeddings=4096)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    if case.role == "critic":
        module: Any = ValueModel(model, autocast=torch.bfloat16)
        del model
    else:
        module = PolicyModel(model, autocast=torch.bfloat16)
    module.train()
    if case.checkpoint:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.role == "reference":
        module.requires_grad_(False)
    learner = Learner(module, LearnerConfig(lr=1e-6, max_tokens_per_microbatch=case.tokens))
    packed = batch(case, settings.vocab_size, length)

    def loss(part: PackedBatch) -> LossTerms:
        if case.role == "critic":
            return LossTerms(loss=module(part).square().sum() / packed.num_tokens)
        out = module(part, entropy=case.entropy)
        total = out.logprobs.sum() + (0.01 * out.entropy.sum() if case.entropy else 0.0)
        return LossTerms(loss=total / packed.num_tokens)

    for _ in range(2):
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if case.role == "reference":
            learner.infer(packed, lambda part: module(part).logprobs)
        else:
            learner.update(packed, loss)
    if DEVICE == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "measured": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
    }


def result(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the file, and of the table."""
    fit, peak = predicted(case), found.get("measured")
    ratio = fit.total / peak if peak else None
    sys.stdout.write(
        f"{case.name:34} {'tuned' if case.tuned else 'held out':8} predicted {fit.total / 2**30:7.2f} GiB  "
        + (f"measured {peak / 2**30:7.2f} GiB  ratio {ratio:.3f}\n" if peak else "it runs\n")
    )
    return {**vars(case), "predicted": fit.total, "parts": asdict(fit), **found, "ratio": ratio}


def again(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a file, with what is predicted now."""
    case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
    found = {name: row[name] for name in ("measured", "reserved", "outside", "seconds") if name in row}
    return row | result(case, found)


def measured_results(tuned: bool) -> list[dict[str, Any]]:
    results = []
    for case in (case for case in CASES if case.tuned or not tuned):
        start = time.perf_counter()
        found: dict[str, Any] = measure(case)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        results.append(result(case, {**found, "seconds": time.perf_counter() - start}))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--tuned", action="store_true", help="only the cases that the formulas may be tuned on")
    parser.add_argument("--again", type=pathlib.Path, help="a file of results, whose peaks and cases are taken")
    options = parser.parse_args()
    if options.again:
        content = json.loads(options.again.read_text())
        content.setdefault("predicted", "anew, beside the peaks that the command measured")
        content["results"] = [again(row) for row in content["results"]]
    else:
        content = {"environment": environment(), "command": " ".join(sys.argv), "owed": "ratios of 0.9 to 1.1"}
        content["results"] = measured_results(options.tuned)
    if target := options.save or options.again:
        target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
