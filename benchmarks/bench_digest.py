"""The digest of a model's weights, beside SHA-256 and beside reading the memory; a delta between two of its versions.

pytest benchmarks/bench_digest.py --benchmark-only                        # on a GPU, the part for it too
"""

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drivetrain_sharding import (
    Layout,
    Mesh,
    Parameter,
    Part,
    ShardedDigest,
    TensorSpec,
    apply_delta,
    digest,
    encode_delta,
)  # fmt: skip

CPU_BYTES_PER_S = 2e9
GPU_LIMIT_S = 0.0025
LINK_BYTES_PER_S = 125e6
a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors of the shapes of Qwen2-1.5B: 338 of them, 2.9 GiB in bfloat16; on a CPU with an eighth of its rows."""
    parts = 1 if device != "cpu" else 8
    layer = {
        "q": (1536, 1536), "q_bias": (1536,), "k": (256, 1536), "k_bias": (256,), "v": (256, 1536), "v_bias": (256,),
        "o": (1536, 1536), "gate": (8960, 1536), "up": (8960, 1536), "down": (1536, 8960),
        "norm": (1536,), "post_norm": (1536,),
    }  # fmt: skip
    shapes = {f"{number}.{name}": shape for number in range(28) for name, shape in layer.items()}
    shapes |= {"embedding": (151936, 1536), "norm": (1536,)}
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty((max(rows // parts, 1), *rest), device=device).normal_(0, 0.02, generator=generator).to(dtype)
        for name, (rows, *rest) in shapes.items()
    }


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    return Layout(
        mesh=Mesh((("rank", 1),)),
        tensors=tuple(TensorSpec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()),
        parameters=tuple(Parameter(name=name, parts=(Part(tensor=name),)) for name in tensors),
    )


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds(work: Callable[[], Any], rounds: int = 7) -> float:
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_on_one_core(within: Any, benchmark: Any, dtype: torch.dtype) -> None:
    """2 GB/s; and how fast the core reads the same memory."""
    tensors = model("cpu", dtype)
    size = sum(tensor.nbytes for tensor in tensors.values())
    within(lambda: digest(tensors), limit=size / CPU_BYTES_PER_S, rounds=7)
    matrices = [tensor.view(torch.int64) for tensor in tensors.values() if tensor.shape[-1] % 4 == 0]
    benchmark.extra_info["gb_per_s"] = size / 1e9 / benchmark.stats.stats.median
    benchmark.extra_info["read_gb_per_s"] = size / 1e9 / seconds(lambda: [matrix.sum() for matrix in matrices])


@pytest.mark.usefixtures("one_thread")
def test_on_one_core_beside_sha256(against: Any) -> None:
    tensors = model("cpu")
    flat = {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}

    def sha256() -> None:
        hashed = hashlib.sha256()
        for octets in flat.values():
            hashed.update(octets)

    against(lambda: digest(tensors), sha256, owed=1.5, rounds=7)


@pytest.mark.gpu
@a_gpu
@pytest.mark.parametrize(
    ("kind", "limit"), [("bf16", GPU_LIMIT_S), ("fp32 as bf16", 2 * GPU_LIMIT_S), ("bf16 for the first time", 0.01)]
)
def test_on_a_gpu(within: Any, benchmark: Any, kind: str, limit: float) -> None:
    """A rank's hashes, until they are on the host; with a layout known before, and with a new one each time. Beside a
    copy of as many bytes on the device."""
    tensors = model("cuda", torch.float32 if "fp32" in kind else torch.bfloat16)
    layout = layout_of(tensors)
    sharded = ShardedDigest(layout, dtype=torch.bfloat16)
    hashes = sharded.hashes(0, tensors)
    assert sharded.combine({0: hashes}).hex == digest({name: tensor.bfloat16() for name, tensor in tensors.items()})

    def work() -> None:
        (ShardedDigest(layout, dtype=torch.bfloat16) if "first" in kind else sharded).hashes(0, tensors)

    size = sum(tensor.nbytes for tensor in tensors.values())
    within(work, limit=limit, rounds=50)
    source, target = torch.empty(2, size, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    copy_s = seconds(copy, 20)
    benchmark.extra_info.update(
        milliseconds=benchmark.stats.stats.median * 1e3,
        gb_per_s=size / 1e9 / benchmark.stats.stats.median,
        copy_milliseconds=copy_s * 1e3,
        times_a_copy=benchmark.stats.stats.median / copy_s,
        combine_milliseconds=seconds(lambda: sharded.combine({0: hashes})) * 1e3,
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [0.02, 0.05])
def test_delta_of_a_training_step(against: Any, benchmark: Any, part: float) -> None:
    """Encoding and applying a step that moves a part of all elements by a unit in the last place, beside what a link of
    1 Gbit/s takes for the version whole; the delta's own time on that link counts too."""
    base = model("cpu")
    generator = torch.Generator().manual_seed(1)
    new = {}
    for name, tensor in base.items():
        steps = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int16) * 2 - 1
        steps *= torch.rand(tensor.shape, generator=generator) < part
        new[name] = (tensor.view(torch.int16) + steps).view(tensor.dtype)
    size = sum(tensor.nbytes for tensor in base.values())
    start, end = digest(base), digest(new)
    delta = b"".join(encode_delta(base, new, base_digest=start, new_digest=end))
    held = {name: tensor.clone() for name, tensor in base.items()}
    back = b"".join(encode_delta(new, base, base_digest=end, new_digest=start))
    ways = [delta, back]

    def apply() -> None:
        apply_delta(held, ways[0])
        ways.reverse()

    encode_s = seconds(lambda: list(encode_delta(base, new, base_digest=start, new_digest=end)), 3)
    apply_s = seconds(apply, 3)

    def ours() -> None:
        list(encode_delta(base, new, base_digest=start, new_digest=end))
        apply()
        time.sleep(len(delta) / LINK_BYTES_PER_S)

    against(ours, lambda: time.sleep(size / LINK_BYTES_PER_S), owed=1.0, rounds=3)
    benchmark.extra_info.update(
        size_ratio=size / len(delta), encode_gb_per_s=size / 1e9 / encode_s, apply_gb_per_s=size / 1e9 / apply_s
    )
