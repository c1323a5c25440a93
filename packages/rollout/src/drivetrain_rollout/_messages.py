"""What a controller and a rollout worker say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from drivetrain_transport import Protocol

from drivetrain_rollout.engine import EngineConfig, EngineInfo, RequestErrorReason, WeightsState
from drivetrain_rollout.types import Completion, GenerateRequest


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make an engine: Started or CallFailed."""

    config: EngineConfig


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sample one response: Generated or RequestFailed."""

    request: GenerateRequest


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


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give the device's memory back: Done or CallFailed."""

    level: int


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the memory again: Done or CallFailed."""


class Health(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the engine's thread: Done or CallFailed."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the engine; another may be started. Done or CallFailed."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves."""

    info: EngineInfo
    weights: WeightsState


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One response."""

    completion: Completion


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It happened; the engine's weights after it."""

    weights: WeightsState


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A RequestError."""

    request_id: str
    reason: RequestErrorReason
    message: str


ErrorKind = Literal["WeightsRefused", "ValueError", "TimeoutError", "RuntimeError"]


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One of the contract's other errors, and the engine's weights after it, if there is an engine."""

    kind: ErrorKind
    message: str
    weights: WeightsState | None


PROTOCOL = Protocol(
    requests=Start | Generate | Bucket | Commit | Sleep | Wake | Health | Stop,
    replies=Started | Generated | Done | RequestFailed | CallFailed,
    version="drivetrain-rollout/1",
)
