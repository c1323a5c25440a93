"""A test file that is also the program of the ranks which its tests look at."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import environment


def run_ranks(file: str, folder: Path, *arguments: str, world: int, timeout: float = 150) -> list[dict[str, Any]]:
    """Start the file once for each rank, as `python FILE RANK FOLDER ARGUMENTS...`; what each has found."""
    ranks = [
        subprocess.Popen([sys.executable, file, str(rank), str(folder), *arguments], cwd=folder, env=environment())
        for rank in range(world)
    ]
    try:
        codes = [rank.wait(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * world
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def be_a_rank(rank: str, folder: str, look: Callable[[], Any], *, world: int, device: str = "cpu") -> None:
    """What such a program does: join the others, look, and leave what was found for `run_ranks`."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=world
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(look()))
    gc.collect()  # modules and meshes in cycles keep the group's threads alive past its end, into the interpreter's
    dist.destroy_process_group()
