"""The learner's ranks: one process alone, or several in a torch process group, with the same few operations."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from drivetrain_transport import decode, encode

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the learner's processes. Rank 0 samples; all ranks learn."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Moves device tensors (NCCL, RCCL, or gloo)."""
    control: dist.ProcessGroup | None = None
    """Moves messages between hosts' memories (gloo)."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest value of a tensor over all ranks, element by element."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def share(self, value: T | None, kind: type[T]) -> T:
        """Rank 0's value, on every rank. It travels as a typed message, never pickled."""
        if self.size == 1:
            assert value is not None
            return value
        try:
            return self._share(value, kind)
        except RuntimeError as error:
            error.add_note(f"rank {self.rank} of {self.size} was sharing a {kind.__name__} of rank 0's")
            raise

    def _share(self, value: T | None, kind: type[T]) -> T:
        frames = (
            [torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in encode(value)] if self.is_main else []
        )
        lengths = self._broadcast(
            torch.tensor([frame.numel() for frame in frames], dtype=torch.int64), dtype=torch.int64
        )
        payload = self._broadcast(torch.cat(frames) if frames else torch.empty(0, dtype=torch.uint8), dtype=torch.uint8)
        shared: T = decode(_split(payload, lengths.tolist()), kind)
        return shared

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def _broadcast(self, tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        size = torch.tensor([tensor.numel()], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self.control)
        if not self.is_main:
            tensor = torch.empty(int(size), dtype=dtype)
        dist.broadcast(tensor, src=0, group=self.control)
        return tensor


def _split(payload: torch.Tensor, lengths: Sequence[int]) -> list[memoryview]:
    return [part.numpy().data for part in torch.split(payload, list(lengths))]
