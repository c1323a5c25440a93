"""Weight sync between a learner and a vLLM engine that share one GPU, beside two usual ways; prints one table.

    python benchmarks/sync_on_gpu.py --shape 1.5b --save benchmarks/results/sync-h200.json

Ours: the engine reads the learner's parameters through CUDA IPC, casts and cuts them into its own in place, and proves
by the digest what it holds: one call for an update. Beside it, in the same run and with the same engine type:

* file: the whole state dict in the engine's type, saved with safetensors to memory-backed disk, loaded by the engine;
* parameters: one call for each parameter with its IPC handle, loaded by vLLM's own `load_weights`.

Neither of them proves anything. A step between two syncs changes the parameters; after it, log-probs that the engine
reports are compared with the learner's.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from drivetrain_ppo.accelerator import environment
from drivetrain_ppo.weights import SharedWeights
from drivetrain_ppo.worker import build_engine
from drivetrain_rollout import EngineConfig, GenerateRequest, SamplingParams
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine, serve
from drivetrain_transport import Endpoint, Protocol
from drivetrain_transport.device import TensorExports, TensorHandle, import_tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU only ours is run, with the transformers engine: to try this script out."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


class LoadFile(msgspec.Struct, frozen=True, tag=True):
    path: str


class LoadOne(msgspec.Struct, frozen=True, tag=True):
    name: str
    handle: TensorHandle


class Loaded(msgspec.Struct, frozen=True, tag=True):
    pass


USUAL = Protocol(requests=LoadFile | LoadOne, replies=Loaded, version="usual/1")


def engine_config(folder: str, *, eager: bool) -> EngineConfig:
    on_gpu = DEVICE == "cuda"
    return EngineConfig(
        engine="vllm" if on_gpu else "transformers",
        model=folder,
        dtype="bfloat16",
        device=DEVICE,
        max_model_len=512,
        max_num_seqs=64,
        memory_fraction=0.35,
        enforce_eager=eager,
        engine_args={"load_format": "dummy"} if on_gpu else {},
        start_timeout=300,
    )


def serve_ours(address: str) -> None:
    serve(address, factory=build_engine, name="engine")


def serve_usual(address: str, folder: str) -> None:
    """vLLM as it is, with its own loading."""
    from drivetrain_rollout import _vllm_versions as versions
    from drivetrain_rollout.vllm import _arguments
    from safetensors.torch import load_file

    versions.set_environment(cpu=False, eager=True)
    arguments = _arguments(engine_config(folder, eager=True), dtype="bfloat16", eager=True, longest=512)
    engine = versions.start(arguments)
    [model] = engine.collective_rpc(lambda worker: worker.get_model())

    async def answer(_peer: Any, request: LoadFile | LoadOne) -> Loaded:
        match request:
            case LoadFile(path):
                model.load_weights(iter(load_file(path, device="cuda").items()))
            case LoadOne(name, handle):
                model.load_weights([(name, import_tensor(handle))])
        torch.cuda.synchronize()
        return Loaded()

    with Endpoint.connect(address, protocol=USUAL, handler=answer, name="usual", timeout=60) as endpoint:
        endpoint.wait_closed()
    versions.stop(engine)


def step(model: torch.nn.Module) -> None:
    """What stands for an optimizer step: all parameters change a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 1e-3)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(act: Callable[[], object], model: torch.nn.Module, rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        step(model)
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_ours(model: Any, folder: str, rounds: int, *, eager: bool) -> dict[str, Any]:
    from drivetrain_learner import PolicyModel

    policy = PolicyModel(model, autocast=torch.bfloat16)
    with Endpoint.bind(protocol=PROTOCOL) as endpoint, child(endpoint, "ours"):
        engine = RemoteEngine(endpoint.wait_for_peer(120), engine_config(folder, eager=eager))

        async def use() -> dict[str, Any]:
            found: dict[str, Any] = {}
            with contextlib.closing(SharedWeights(policy, [engine.info], dtype=torch.bfloat16)) as shared:
                seconds, digests = [], []
                for version in range(1, rounds + 2):
                    step(model)
                    before = memory()
                    start = time.perf_counter()
                    push = shared.push(version)
                    pushed = time.perf_counter()
                    state = await engine.write_weights(push.updates[0])
                    seconds.append((time.perf_counter() - start, pushed - start))
                    assert (state.policy_version, state.digest, state.status) == (version, push.digest, "ready")
                    found["learner_extra_bytes"] = memory(peak=True) - before
                    digests.append(push.digest)
                assert len(set(digests)) == len(digests), "the parameters changed, and the digest did not"
                found["first_seconds"] = seconds[0][0]
                found["seconds"] = [total for total, _ in seconds[1:]]
                found["digest_seconds"] = [part for _, part in seconds[1:]]
                found["logprob_difference"] = await difference(engine, model)
            await engine.close()
            return found

        return asyncio.run(use())


def memory(*, peak: bool = False) -> int:
    """Bytes that this process has allocated on the GPU, now or at most since it was asked without `peak`."""
    if DEVICE == "cpu":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


async def difference(engine: RemoteEngine, model: Any) -> float:
    """Mean |log-prob of the engine - of the learner| of 16 x 32 sampled tokens."""
    requests = [
        GenerateRequest(
            request_id=str(i), prompt_token_ids=tuple(range(5, 9 + i)), sampling=SamplingParams(max_tokens=32)
        )
        for i in range(16)
    ]
    total, count = 0.0, 0
    for done in await asyncio.gather(*map(engine.generate, requests)):
        ids = torch.tensor([[*done.prompt_token_ids, *done.response_token_ids]], device=DEVICE)
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[-len(done.response_token_ids) :, 0].tolist()
        total += sum(abs(a - b) for a, b in zip(own, done.rollout_logprobs, strict=True))
        count += len(own)
    return total / count


def measure_usual(model: Any, folder: str, rounds: int) -> dict[str, Any]:
    from safetensors.torch import save_file

    with (
        Endpoint.bind(protocol=USUAL) as endpoint,
        child(endpoint, "usual", folder),
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        peer = endpoint.wait_for_peer(300)
        path = str(pathlib.Path(shm, "weights.safetensors"))

        def by_file() -> None:
            state = {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in model.named_parameters()}
            save_file(state, path)
            peer.call(LoadFile(path), timeout=120)

        def by_parameter() -> None:
            with TensorExports() as exports:
                for name, parameter in model.named_parameters():
                    handle = exports.export(parameter.detach().to(torch.bfloat16))
                    peer.call(LoadOne(name, handle), timeout=60)
                    exports.release(handle)

        timed(by_parameter, model, 1)
        found = {"parameters_seconds": timed(by_parameter, model, rounds)}
        return found | {"file_seconds": timed(by_file, model, max(rounds // 6, 1))}


@contextlib.contextmanager
def child(endpoint: Endpoint, kind: str, *arguments: str) -> Iterator[None]:
    """A process that joins the endpoint, and ends with it."""
    with subprocess.Popen([sys.executable, __file__, "--serve", kind, endpoint.address, *arguments]):
        try:
            yield
        finally:
            endpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--masters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: starts sooner, and syncs as fast")
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--serve", nargs="+")
    options = parser.parse_args()
    if options.serve:
        {"ours": serve_ours, "usual": serve_usual}[options.serve[0]](*options.serve[1:])
        return
    results = []
    for shape in options.shape or ["1.5b"]:
        results.append(measure(shape, options.masters, options.rounds, eager=options.eager))
        for name, value in results[-1].items():
            sys.stdout.write(f"{name:26} {value:.4g}\n" if isinstance(value, float) else f"{name:26} {value}\n")
        sys.stdout.flush()
        if options.save:
            content = {"environment": environment(), "command": " ".join(sys.argv), "results": results}
            options.save.write_text(json.dumps(content, indent=1) + "\n")


def measure(shape: str, masters: str, rounds: int, *, eager: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder = tempfile.mkdtemp()
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, architectures=["Qwen2ForCausalLM"])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, masters))
    if DEVICE == "cpu":
        model.save_pretrained(folder)
        return measure_ours(model, folder, rounds, eager=True)
    found = measure_ours(model, folder, rounds, eager=eager) | measure_usual(model, folder, rounds)
    shutil.rmtree(folder)
    ours = statistics.median(found["seconds"])
    return {
        "shape": shape,
        "masters": masters,
        "bytes": sum(p.numel() for p in model.parameters()) * 2,
        "ours_ms": ours * 1e3,
        "ours_worst_ms": max(found["seconds"]) * 1e3,
        "of_it_learner_digest_ms": statistics.median(found["digest_seconds"]) * 1e3,
        "first_ms": found["first_seconds"] * 1e3,
        "learner_extra_bytes": found["learner_extra_bytes"],
        "logprob_difference": found["logprob_difference"],
        "parameters_ms": statistics.median(found["parameters_seconds"]) * 1e3,
        "file_ms": statistics.median(found["file_seconds"]) * 1e3,
        "ratio_parameters": statistics.median(found["parameters_seconds"]) / ours,
        "ratio_file": statistics.median(found["file_seconds"]) / ours,
    }


if __name__ == "__main__":
    main()
