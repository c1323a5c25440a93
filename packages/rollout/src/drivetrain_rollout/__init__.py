"""Engines that sample from a policy: token ids in, token ids and log-probs out, with verified weights.

Engines live in modules of their own, which import what they drive: ``drivetrain_rollout.vllm`` and
``drivetrain_rollout.transformers`` in this process, ``drivetrain_rollout.remote`` in another.
"""

from drivetrain_rollout.engine import (
    DigestFunction,
    EngineConfig,
    EngineInfo,
    EngineMetrics,
    PauseMode,
    RequestError,
    RequestErrorReason,
    RolloutEngine,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
    WeightWrite,
    Writer,
)
from drivetrain_rollout.types import (
    Chunk,
    Completion,
    FinishReason,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Timings,
    VersionSpan,
)

__all__ = [
    "Chunk",
    "Completion",
    "DigestFunction",
    "EngineConfig",
    "EngineInfo",
    "EngineMetrics",
    "FinishReason",
    "GenerateRequest",
    "PauseMode",
    "RequestError",
    "RequestErrorReason",
    "Rollout",
    "RolloutEngine",
    "RolloutGroup",
    "SamplingParams",
    "Timings",
    "VersionSpan",
    "WeightUpdate",
    "WeightWrite",
    "WeightsRefused",
    "WeightsState",
    "Writer",
]
