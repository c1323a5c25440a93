"""Sampling through our engine beside vLLM's own AsyncLLM and transformers' `generate`; prints one table.

    python benchmarks/rollout_on_gpu.py --save benchmarks/results/rollout-h200.json

Three processes share the GPU and take turns, round by round: AsyncLLM with nobody in between (without log-probs, with
them, and with them in its flat form), ours with log-probs, which it always returns, also through a pool, and `generate`
in batches. Model, lengths, vLLM settings and what is drawn from are the same; weights are random. Then weights are
replaced while ours samples: what that takes is compared with the same update of an idle engine.

`--shape tiny` is a rehearsal on a CPU; `bench_rollout.py` runs the same on one with the shape of SmolLM2-135M.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QWEN: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
SHAPES = {
    "1.5b": QWEN,
    "135m": QWEN | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                    "num_key_value_heads": 3, "vocab_size": 49152},
    "tiny": QWEN | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "vocab_size": 2048},
}  # fmt: skip
"""The first is for a GPU, the others for a CPU."""
OWED = {"sampled": 1.2, "flat": 1.2, "none": 0.98, "generate": 3.2}
"""Ours over each of them."""


class Work:
    """What is sampled in a round, the same for all."""

    def __init__(self, shape: str) -> None:
        on_gpu = shape == "1.5b"
        self.device = "cuda" if on_gpu else "cpu"
        self.prompts, self.prompt_tokens, self.response_tokens, self.at_once = (
            (1024, 128, 256, 512) if on_gpu else (64, 16, 32, 32)
        )
        self.shape = SHAPES[shape]
        self.dtype = "float32" if shape == "tiny" else "bfloat16"
        self.tokens = self.prompts * self.response_tokens

    def prompt(self, index: int, count: int) -> list[int]:
        """No two have a beginning in common, in any round."""
        first = count * self.prompts + index
        return [first % 1999, first // 1999, *((7 * index + k) % 1999 for k in range(2, self.prompt_tokens))]

    def vllm_arguments(self, folder: str) -> dict[str, Any]:
        """Of both engines; those that `EngineConfig` has fields for under vLLM's own names."""
        arguments = {"max_model_len": 512, "max_num_seqs": self.at_once, "dtype": self.dtype, "load_format": "dummy"}
        if self.device == "cuda":
            arguments["gpu_memory_utilization"] = 0.42
        else:
            arguments |= {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
        return {"model": folder, **arguments}


def serve_bare(work: Work, folder: str) -> Callable[[str, int], dict[str, Any]]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}
    if work.device == "cpu":
        os.environ |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "TORCHDYNAMO_DISABLE": "1"}
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                **work.vllm_arguments(folder),
                logprobs_mode="processed_logprobs",
                skip_tokenizer_init=True,
                generation_config="vllm",
                disable_log_stats=True,
            )
        )

    engine = loop.run_until_complete(start())
    kinds: dict[str, dict[str, Any]] = {
        "none": {}, "sampled": {"logprobs": 0}, "flat": {"logprobs": 0, "flat_logprobs": True}
    }  # fmt: skip

    async def sample(kind: str, count: int) -> None:
        params = SamplingParams(
            max_tokens=work.response_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **kinds[kind],
        )

        async def one(index: int) -> None:
            prompt = tokens_input(work.prompt(index, count))
            async for output in engine.generate(prompt, params, f"{count}-{index}"):
                assert len(output.outputs[0].token_ids) == work.response_tokens
                assert (output.outputs[0].logprobs is None) == (kind == "none")

        await asyncio.gather(*map(one, range(work.prompts)))

    def answer(kind: str, count: int) -> dict[str, Any]:
        if kind == "close":
            engine.shutdown()
            return {}
        start = time.perf_counter()
        loop.run_until_complete(sample(kind, count))
        return {"seconds": time.perf_counter() - start}

    return answer


def serve_ours(work: Work, folder: str) -> Callable[[str, int], dict[str, Any]]:
    from drivetrain_rollout import (
        EngineConfig,
        EnginePool,
        GenerateRequest,
        RolloutEngine,
        SamplingParams,
        WeightWrite,
    )
    from drivetrain_rollout.vllm import VLLMEngine

    given = work.vllm_arguments(folder)
    engine = VLLMEngine(
        EngineConfig(
            engine="vllm",
            model=folder,
            dtype=given["dtype"],
            device=work.device,
            max_model_len=given["max_model_len"],
            max_num_seqs=given["max_num_seqs"],
            memory_fraction=given.get("gpu_memory_utilization", 0.9),
            kv_cache_bytes=given.get("kv_cache_memory_bytes"),
            engine_args={"load_format": "dummy"},
        ),
        writer=Nudge(),
    )
    pool = EnginePool([engine])
    engines: dict[str, RolloutEngine] = {"ours": engine, "pool": pool}
    loop = asyncio.new_event_loop()
    sampling = SamplingParams(max_tokens=work.response_tokens)

    async def sample(through: RolloutEngine, count: int) -> None:
        async def one(index: int) -> None:
            request = GenerateRequest(
                request_id=f"{count}-{index}",
                prompt_token_ids=tuple(work.prompt(index, count)),
                sampling=sampling,
            )
            completion = await through.generate(request)
            assert len(completion.rollout_logprobs) == work.response_tokens

        await asyncio.gather(*map(one, range(work.prompts)))

    async def write() -> float:
        start = time.perf_counter()
        version = engine.weights.policy_version + 1
        await engine.write_weights(WeightWrite(policy_version=version, digest="nudged", message=b""))
        return time.perf_counter() - start

    async def update(count: int) -> dict[str, Any]:
        await write()
        idle = statistics.median([await write() for _ in range(5)])
        sampling = asyncio.ensure_future(sample(engine, count))
        stalls, pauses = [], []
        for _ in range(3):
            await asyncio.sleep(1)
            asked = time.perf_counter()
            await engine.pause("keep")
            stopped = time.perf_counter()
            await write()
            await engine.resume()
            stalls.append(time.perf_counter() - stopped)
            pauses.append(stopped - asked)
        await sampling
        return {
            "idle_ms": idle * 1e3,
            "stall_ms": statistics.median(stalls) * 1e3,
            "last_steps_ms": statistics.median(pauses) * 1e3,
        }

    def answer(kind: str, count: int) -> dict[str, Any]:
        if kind == "close":
            loop.run_until_complete(pool.close())
            return {}
        if kind == "update":
            return loop.run_until_complete(update(count))
        start = time.perf_counter()
        loop.run_until_complete(sample(engines[kind], count))
        return {"seconds": time.perf_counter() - start}

    return answer


class Nudge:
    """A writer that puts slightly other values in place, from copies on the same GPU."""

    def __init__(self) -> None:
        self.copies: dict[str, Any] = {}

    def __call__(self, parameters: Any, _message: bytes) -> Callable[[], str]:
        if not self.copies:
            self.copies = {name: tensor * 1.001 for name, tensor in parameters.items()}

        def act() -> str:
            for name, tensor in parameters.items():
                tensor.copy_(self.copies[name])
            return "nudged"

        return act


def serve_generate(work: Work, folder: str) -> Callable[[str, int], dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(work.device):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, work.dtype)).eval()
    batch = work.prompts // 4
    done = work.prompts if work.device == "cpu" else batch  # on a GPU the others follow from the first batch

    def answer(kind: str, count: int) -> dict[str, Any]:
        if kind == "close":
            return {}
        tokens = work.response_tokens if count else 4  # the first round warms up
        start = time.perf_counter()
        for first in range(0, done, batch):
            prompts = [work.prompt(index, count) for index in range(first, first + batch)]
            ids = torch.tensor(prompts, device=work.device)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            ).cpu()
            assert found.shape == (batch, work.prompt_tokens + tokens)
        return {"seconds": (time.perf_counter() - start) * work.prompts / done}

    return answer


ROLES = {"bare": serve_bare, "ours": serve_ours, "generate": serve_generate}
KINDS = {"none": "bare", "sampled": "bare", "flat": "bare", "ours": "ours", "pool": "ours", "generate": "generate"}
"""Who samples what."""


class Child:
    """One of the processes; it answers a line with a line."""

    def __init__(self, role: str, folder: str, shape: str) -> None:
        command = [sys.executable, __file__, "--role", role, "--folder", folder, "--shape", shape]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, kind: str, count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {count}\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise RuntimeError("a process of this benchmark has ended early; its error is above")


def be(role: str, folder: str, shape: str) -> None:
    answer = ROLES[role](Work(shape), folder)
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        print("ANSWER " + json.dumps(answer(kind, int(count))), flush=True)
        if kind == "close":
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        be(arguments.role, arguments.folder, arguments.shape)
        return
    work = Work(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        measure(work, folder, arguments)


def write_config(work: Work, folder: str) -> None:
    """All that the engines need, since their weights are random."""
    from transformers import Qwen2Config

    Qwen2Config(architectures=["Qwen2ForCausalLM"], **work.shape).save_pretrained(folder)


def measure(work: Work, folder: str, arguments: argparse.Namespace) -> None:
    write_config(work, folder)
    children: dict[str, Child] = {}
    start = time.perf_counter()
    try:
        for role in ROLES:
            children[role] = Child(role, folder, arguments.shape)
            children[role].hear()
            print(f"{role} is up, {time.perf_counter() - start:.0f} s", flush=True)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for count in range(arguments.rounds + 1):
            for kind, role in KINDS.items():
                if kind != "generate" or count < 2:
                    seconds[kind].append(children[role].ask(kind, count)["seconds"])
            print(
                f"round {count}: " + ", ".join(f"{kind} {took[-1]:.2f} s" for kind, took in seconds.items()), flush=True
            )
        update = children["ours"].ask("update", arguments.rounds + 1) if work.device == "cuda" else {}
        for child in children.values():
            child.ask("close", 0)
            child.process.wait(120)
    finally:
        for child in children.values():
            child.process.kill()
    tell(work, {kind: took[1:] for kind, took in seconds.items()}, update, arguments)


def tell(work: Work, seconds: dict[str, list[float]], update: dict[str, Any], arguments: argparse.Namespace) -> None:
    rate = {kind: work.tokens / statistics.median(took) for kind, took in seconds.items()}
    print(f"\n{'':10} {'tokens/s':>10} {'ours over it':>13} {'pool over it':>13} {'owed':>5}")
    for kind, value in rate.items():
        owed = OWED.get(kind, "")
        print(f"{kind:10} {value:10.0f} {rate['ours'] / value:13.3f} {rate['pool'] / value:13.3f} {owed!s:>5}")
    if update:
        ratio = update["stall_ms"] / update["idle_ms"]
        print(f"an update in flight: {update}, {ratio:.2f} of an idle engine's (owed 1.5)")
    if arguments.save:
        import importlib.metadata
        import platform

        import torch

        result = {
            "date": time.strftime("%Y-%m-%d"),
            "environment": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "vllm")},
                "devices": torch.cuda.get_device_name() if work.device == "cuda" else platform.processor(),
            },
            "command": " ".join(["python", *sys.argv]),
            "work": f"{work.prompts} x ({work.prompt_tokens} in + {work.response_tokens} out), {work.at_once} at once",
            "seconds": seconds,
            "tokens_per_s": rate,
            "ours_over": {kind: rate["ours"] / value for kind, value in rate.items()},
            "pool_over": {kind: rate["pool"] / value for kind, value in rate.items()},
            "owed": OWED,
            "update": update,
        }
        arguments.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
