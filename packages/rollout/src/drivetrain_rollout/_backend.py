"""What a model must do so that ``_loop`` makes an engine of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from drivetrain_rollout._checks import Manifest
from drivetrain_rollout.engine import EngineInfo
from drivetrain_rollout.types import GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A backend's answer to the request it was given under ``key``: what it has sampled for it, and no more than that
    (not what the request continues)."""

    key: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """See the fields of the same names in ``EngineMetrics``; of what was added to the backend."""

    waiting: int = 0
    kv_cache_usage: float | None = None
    preemptions: int = 0


class Backend(Protocol):
    """A model that samples in batches. Every method is called in the engine's thread, one at a time.

    Where a method says so, requests may be *held*: they were added and have not ended, ``drain`` was called, and
    ``step`` was not called since.
    """

    @property
    def info(self) -> EngineInfo:
        """What the model is; fixed."""

    @property
    def manifest(self) -> Manifest:
        """What a complete set of weights is; fixed."""

    def add(self, key: int, request: GenerateRequest) -> None:
        """Take a request; its seed is set unless it is greedy. A ValueError refuses this one alone."""

    def abort(self, key: int) -> None:
        """Forget a request that was added and has not ended."""

    def step(self) -> list[Sampled]:
        """Advance what was added; return what ended. Any exception is the end of the engine."""

    def drain(self) -> list[Sampled]:
        """Complete what ``step`` has begun, and begin nothing; return what ended."""

    def progress(self, keys: Sequence[int]) -> list[Sampled]:
        """What has been sampled so far, of requests that were added and have not ended; ``finish_reason`` is
        ``abort``."""

    def usage(self) -> Usage:
        """How full it is."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights, and use nothing more that was computed with the old ones: requests that are held go on
        behind what was sampled for them. Any exception leaves the weights unusable."""

    def parameters(self) -> Mapping[str, Tensor]:
        """What it samples with, by name. Asked for only if ``info.can_write``."""

    def write(self, act: Callable[[], str]) -> str:
        """Let ``act`` change the parameters in place; otherwise as ``load``."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back; nothing was added that has not ended."""

    def wake(self) -> None:
        """Take the memory again."""

    def close(self) -> None:
        """Free everything."""
