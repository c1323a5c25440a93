"""Engines that sample from a policy: token ids in, token ids and log-probs out, with verified weights.

Engines live in modules of their own, which import what they drive: ``drivetrain_rollout.vllm`` and
``drivetrain_rollout.transformers`` in this process (``drivetrain_rollout.start`` starts one by its word),
``drivetrain_rollout.remote`` in another. ``EnginePool`` makes one engine of many.
"""

from drivetrain_rollout._pool_config import MemberInfo, PoolConfig
from drivetrain_rollout.control import AdaptiveBatch, LimitConfig, SawtoothLimit
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
from drivetrain_rollout.pool import EnginePool
from drivetrain_rollout.seeds import derive_seed
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
    "AdaptiveBatch",
    "Chunk",
    "Completion",
    "DigestFunction",
    "EngineConfig",
    "EngineInfo",
    "EngineMetrics",
    "EnginePool",
    "FinishReason",
    "GenerateRequest",
    "LimitConfig",
    "MemberInfo",
    "PauseMode",
    "PoolConfig",
    "RequestError",
    "RequestErrorReason",
    "Rollout",
    "RolloutEngine",
    "RolloutGroup",
    "SamplingParams",
    "SawtoothLimit",
    "Timings",
    "VersionSpan",
    "WeightUpdate",
    "WeightWrite",
    "WeightsRefused",
    "WeightsState",
    "Writer",
    "derive_seed",
]
