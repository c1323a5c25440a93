"""What a controller and a rollout worker say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from drivetrain_transport import Protocol

from drivetrain_rollout.engine import (
    EngineConfig,
    EngineInfo,
    EngineMetrics,
    PauseMode,
    RequestErrorReason,
    WeightsState,
    WeightWrite,
)
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make an engine: Started or CallFailed."""

    config: EngineConfig


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sample a response to each request, and answer with the first that end: Ended."""

    batch: int
    requests: tuple[GenerateRequest, ...]
    every: float | None = None
    """Seconds between chunks of those that run; None: none are told."""


class More(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next chunks of a batch, or responses of it to end: Ended."""

    batch: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for one request of a batch any more; it ends somehow. Done."""

    batch: int
    index: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep a part of an update; the first of another update drops what was kept. Done."""

    update: int
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the parts that were kept as one update: Done or CallFailed."""

    update: int
    policy_version: int
    digest: str


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let the engine's writer bring other weights: Done or CallFailed."""

    write: WeightWrite


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give the device's memory back: Done or CallFailed."""

    level: int


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the memory again: Done or CallFailed."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop sampling: Done, once nothing is sampled, or CallFailed."""

    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on sampling: Done or CallFailed."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the engine is doing: Measured or CallFailed."""


class Health(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the engine's thread: Done or CallFailed."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the engine; another may be started. Done or CallFailed."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves."""

    info: EngineInfo
    weights: WeightsState


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A RequestError."""

    request_id: str
    reason: RequestErrorReason
    message: str
    partial: Completion | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one request of a batch ended, by its index there: one of the two is there."""

    index: int
    completion: Completion | None = None
    failure: RequestFailed | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a response that runs, by its request's index in the batch."""

    index: int
    chunk: Chunk


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Outcomes of a batch, and before them chunks, at least one in all; each is told once."""

    outcomes: tuple[Outcome, ...]
    chunks: tuple[Progress, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the engine is doing."""

    metrics: EngineMetrics
    weights: WeightsState


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It happened; the engine's weights after it."""

    weights: WeightsState


ErrorKind = Literal["WeightsRefused", "ValueError", "TimeoutError", "RuntimeError"]


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One of the contract's other errors, and the engine's weights after it, if there is an engine."""

    kind: ErrorKind
    message: str
    weights: WeightsState | None


PROTOCOL = Protocol(
    requests=Start
    | Generate
    | More
    | Abort
    | Bucket
    | Commit
    | Write
    | Sleep
    | Wake
    | Pause
    | Resume
    | Metrics
    | Health
    | Stop,
    replies=Started | Ended | Measured | Done | CallFailed,
    version="drivetrain-rollout/4",
)
