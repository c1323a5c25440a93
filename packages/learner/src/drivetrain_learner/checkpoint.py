"""Checkpoints that are there whole or not at all: safetensors and JSON, nothing that runs code when it is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_UNFINISHED = ".unfinished-"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    tensors: dict[str, Tensor]
    """On the CPU."""
    state: Any
    """What was given as `state`, after a round trip through JSON."""


def save_checkpoint(root: str | os.PathLike[str], step: int, tensors: Mapping[str, Tensor], state: Any) -> Path:
    """Writes a checkpoint under `root` and returns its folder, `root/step-NNNNNNNN`.

    It is written beside its place, flushed to the disk, and only then given its name: whenever the process or the
    machine stops, `latest_checkpoint` finds the last one that was complete. If there is one of the same step already,
    the new one is put beside it (`step-NNNNNNNN.1`) before the old one is deleted. One process writes to a root.

    Args:
        root: the folder of a run's checkpoints; it is made if need be.
        step: how far the run is, from 0.
        tensors: named tensors, on any device.
        state: anything that JSON can hold; its numbers are finite.

    Raises:
        ValueError: `step` is negative, or `state` is nothing JSON can hold.
        OSError: the disk is full or cannot be written. No part of the new checkpoint is left; the older ones are whole.
    """
    if step < 0:
        raise ValueError(f"step is {step}; steps count from 0")
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(stale)
    older = [path for path in _checkpoints(root) if _order(path)[0] == step]
    generation = _order(older[-1])[1] + 1 if older else 0
    place = root / (f"step-{step:08d}" + (f".{generation}" if generation else ""))
    draft = root / f"{_UNFINISHED}{place.name}"
    try:
        draft.mkdir()
        _write(draft, step, tensors, state)
        draft.rename(place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _flush(root)
    for path in older:
        shutil.rmtree(path)
    return place


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint under `root`, or None. Warns of newer ones that are not complete."""
    root = Path(root)
    if not root.is_dir():
        return None
    for path in sorted(root.glob(f"{_UNFINISHED}*")):
        warnings.warn(f"{path} was not finished and is left out", RuntimeWarning, stacklevel=2)
    for path in reversed(_checkpoints(root)):
        if (fault := _fault(path)) is None:
            return path
        warnings.warn(f"checkpoint {path} is not complete ({fault}) and is left out", RuntimeWarning, stacklevel=2)
    return None


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        ValueError: it is not complete, with what is wrong.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if (fault := _fault(path)) is not None:
        raise ValueError(f"checkpoint {path} is not complete: {fault}")
    header = json.loads((path / _STATE).read_text())
    return Checkpoint(step=header["step"], tensors=load_file(path / _TENSORS), state=header["state"])


def _write(draft: Path, step: int, tensors: Mapping[str, Tensor], state: Any) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state cannot be written as JSON: {error}") from error
    try:
        save_file(dict(_separate(tensors)), draft / _TENSORS)
    except SafetensorError as error:  # what a full disk comes as
        raise OSError(f"{draft / _TENSORS} cannot be written: {error}") from error
    _make_readable(draft / _TENSORS)
    _flush(draft / _TENSORS)
    header = {
        "format": _FORMAT,
        "step": step,
        "sizes": {_TENSORS: (draft / _TENSORS).stat().st_size},
        "state": state,
    }
    (draft / _STATE).write_text(json.dumps(header, allow_nan=False))
    _flush(draft / _STATE)
    _flush(draft)


def _make_readable(path: Path) -> None:
    """Gives a file the permissions that new files have; safetensors makes its own for one user alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _separate(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Contiguous CPU tensors that share no memory with each other, as safetensors asks."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        yield name, own.clone() if storage in seen else own
        seen.add(storage)


def _fault(path: Path) -> str | None:
    """What keeps a checkpoint from being complete."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        header = json.loads((path / _STATE).read_text())
    except FileNotFoundError:
        return f"{_STATE} is missing"
    except ValueError as error:
        return f"{_STATE} cannot be read: {error}"
    if header.get("format") != _FORMAT:
        return f"{_STATE} has format {header.get('format')}, known is {_FORMAT}"
    for name, size in header["sizes"].items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            return f"{name} has {found} of {size} bytes"
    return None


def _checkpoints(root: Path) -> list[Path]:
    return sorted((path for path in root.glob("step-*") if _order(path)[0] >= 0), key=_order)


def _order(path: Path) -> tuple[int, int]:
    """Step and generation; a negative step for folders that are something else."""
    match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
