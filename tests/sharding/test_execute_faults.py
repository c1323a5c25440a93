"""A rank is killed at each stage of an update: the target serves the old version, the new one or none, never a mixture.

Two sources and a target, that serves out of files: other processes map them, and so does this test when the target is
dead. A staged target receives into a second file, and turns to it once the digest has proved it. One that is written in
place serves nothing meanwhile, and afterwards what the digest says that it holds.

This file is also the program that forks the ranks of each update, from a process that has imported torch.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_sharding import Executor, Split, TorchExchange, TransferFailed, digest, make_plan
from layouts import held_by, random_whole, simple_layout
from programs import environment
from torch import Tensor
from waiting import wait_until

LIMIT = 20.0
SHAPES = {f"w{index}": (6, 8) for index in range(12)}
SOURCE = simple_layout({"dp": 2}, SHAPES, splits=(Split(over="dp", dim=0),))
TARGET = simple_layout({}, SHAPES, dtype=torch.bfloat16)
PLAN = make_plan(SOURCE, TARGET, bucket_bytes=128)  # a round for each tensor
TARGET_RANK = 2  # of the processes; the others are the sources
OLD, NEW = ({name: t.bfloat16() for name, t in random_whole(SOURCE, seed).items()} for seed in (0, 1))
VERSIONS = {"old": digest(OLD), "new": digest(NEW)}

KINDS, VICTIMS, STAGES = ("staged", "in place"), (0, 1, 2), ("before", "round", "digest", "after")
UPDATES = list(itertools.product(KINDS, VICTIMS, STAGES))


def parameters(folder: Path, name: str) -> dict[str, Tensor]:
    """Those of the target that lie in one file."""
    sizes = [spec.nbytes for spec in TARGET.tensors]
    flat = torch.from_file(str(folder / name), shared=True, size=sum(sizes), dtype=torch.uint8)
    parts = flat.split(sizes)
    return {s.name: part.view(s.dtype).view(s.shape) for s, part in zip(TARGET.tensors, parts, strict=True)}


def serve(folder: Path, name: str, version: str) -> None:
    """Say, at one instant, which file is served from now on."""
    (folder / "next").write_text(json.dumps([name, version]))
    os.replace(folder / "next", folder / "served")


class Stages(TorchExchange):
    """Ends the process, as a crash does, when it comes to a stage."""

    def __init__(self, stage: str, **options: Any) -> None:
        super().__init__((0, 1), (2,), timeout=LIMIT, **options)
        self.stage, self.votes, self.rounds = stage, 0, 0

    def agree(self, ok: bool) -> bool:
        self.votes += 1
        self.at("before" if self.votes == 1 else "digest")
        return super().agree(ok)

    def start(self, sends: Any, receives: Any) -> Callable[[], None]:
        wait, self.rounds = super().start(sends, receives), self.rounds + 1
        if self.rounds == 5:  # the target has written those of the first one by now
            self.at("round")
        return wait

    def at(self, stage: str) -> None:
        if stage == self.stage:
            os.kill(os.getpid(), signal.SIGKILL)


def update(exchange: Stages, kind: str, folder: Path) -> str:
    """The target's part: what it serves afterwards."""
    name = "b" if kind == "staged" else "a"
    held = parameters(folder, name)
    if kind == "in place":
        (folder / "served").unlink()
    error = ""
    try:
        Executor(PLAN, exchange, target_rank=0).run(None, held)
    except TransferFailed as failure:
        error = str(failure)
    holds = digest(held)
    known = [version for version, hexdigits in VERSIONS.items() if hexdigits == holds]
    if known == ["new"] or (known and kind == "in place"):
        serve(folder, name, known[0])
    return error


def rank(number: int, folder: Path, kind: str, victim: int, stage: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=3)
    (folder / f"connected-{number}").touch()
    wait_until(lambda: len(list(folder.glob("connected-*"))) == 3, "the others")
    exchange, error = Stages(stage if victim == number else ""), ""
    start = time.monotonic()
    if number == TARGET_RANK:
        error = update(exchange, kind, folder)
    else:
        try:
            held = held_by(SOURCE, number, random_whole(SOURCE, 1))
            Executor(PLAN, exchange, source_rank=number).run(held)
        except TransferFailed as failure:
            error = str(failure)
    exchange.at("after")
    seconds = time.monotonic() - start
    (folder / f"{number}.json").write_text(json.dumps({"error": error, "seconds": seconds}))


def main(folder: Path) -> None:
    """All updates, one after the other; each in processes of its own."""
    for index, (kind, victim, stage) in enumerate(UPDATES):
        here = folder / str(index)
        here.mkdir()
        for tensor, value in zip(parameters(here, "a").values(), OLD.values(), strict=True):
            tensor.copy_(value)
        serve(here, "a", "old")
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    rank(number, here, kind, victim, stage)
                    code = 0
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (here / "codes").write_text(json.dumps(codes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("updates")
    subprocess.run([sys.executable, __file__, str(folder)], env=environment(), check=True, timeout=150)
    return folder


@pytest.mark.parametrize(("kind", "victim", "stage"), UPDATES)
def test_a_killed_rank(kind: str, victim: int, stage: str, folder: Path) -> None:
    here = folder / str(UPDATES.index((kind, victim, stage)))
    assert json.loads((here / "codes").read_text()) == [-signal.SIGKILL if n == victim else 0 for n in range(3)]
    served, version = json.loads(text.read_text()) if (text := here / "served").exists() else (None, None)
    if stage == "after" or (stage == "digest" and victim != TARGET_RANK):
        assert version == "new"
    elif kind == "staged" or (stage == "before" and victim != TARGET_RANK):
        assert version == "old"
    else:
        assert version is None
    if served is not None:
        held = parameters(here, served)
        assert digest(held) == VERSIONS[version]
        assert all(torch.equal(held[name], value) for name, value in (OLD if version == "old" else NEW).items())
    for number in {0, 1, 2} - {victim}:
        found = json.loads((here / f"{number}.json").read_text())
        assert found["seconds"] < LIMIT
        said = {"before": "the start of", "round": "round ", "digest": "the end of", "after": ""}[stage]
        assert said in found["error"]
        assert bool(found["error"]) == (stage != "after")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
