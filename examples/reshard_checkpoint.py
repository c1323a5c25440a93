"""A checkpoint saved by four FSDP2 ranks becomes one for vLLM's tensor parallelism over two. It needs torch only.

    python examples/reshard_checkpoint.py [FOLDER]

A file holds what a rank holds. The files of the four are mapped, not loaded: one of the two new ranks is in memory at a
time. The digests of all pieces, which nothing gathers, prove that both checkpoints say the same.
"""

import pathlib
import sys
import tempfile

import torch
from drivetrain_sharding import Layout, Mesh, ShardedDigest, make_plan, pull, train_layout, vllm_layout

CONFIG = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 5003, "tie_word_embeddings": True,
}  # fmt: skip


def room(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """For what a rank holds; padding stays 0."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.parameter_shapes(rank).items()}


def opened(layout: Layout, folder: pathlib.Path) -> dict[int, dict[str, torch.Tensor]]:
    """What each rank holds, as it lies in the files."""
    files = {rank: folder / f"rank{rank}.pt" for rank in range(layout.mesh.size)}
    return {rank: torch.load(file, mmap=True, weights_only=True) for rank, file in files.items()}


def report(name: str, layout: Layout, folder: pathlib.Path) -> None:
    hashes = ShardedDigest(layout, dtype=torch.bfloat16)
    digest = hashes.combine({rank: hashes.hashes(rank, held) for rank, held in opened(layout, folder).items()})
    megabytes = sum(spec.nbytes for spec in layout.tensors) / 1e6
    print(f"{name}: {layout.mesh.size} files, {megabytes:.1f} MB, digest {digest.hex}")


def main(folder: pathlib.Path) -> None:
    trained = train_layout(CONFIG, Mesh((("dp", 4),)), dtype=torch.float32, fsdp="dp")
    served = vllm_layout(CONFIG, tp=2, dtype=torch.bfloat16)
    for name in ("trained", "served"):
        (folder / name).mkdir(parents=True)
    for rank in range(trained.mesh.size):  # what a training run would have left
        held = {name: tensor.normal_() for name, tensor in room(trained, rank, torch.float32).items()}
        torch.save(held, folder / "trained" / f"rank{rank}.pt")
    plan, files = make_plan(trained, served), opened(trained, folder / "trained")
    for rank in range(served.mesh.size):
        held = room(served, rank, torch.bfloat16)
        pull(plan, rank, files.__getitem__, held)
        torch.save(held, folder / "served" / f"rank{rank}.pt")
    for name, layout in (("trained", trained), ("served", served)):
        report(name, layout, folder / name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(sys.argv[1] if sys.argv[1:] else temporary))
