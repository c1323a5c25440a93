"""Engines that sample from a policy: token ids in, token ids and log-probs out, with verified weights.

Engines live in modules of their own, which import what they drive: ``drivetrain_rollout.vllm`` and
``drivetrain_rollout.transformers`` in this process, ``drivetrain_rollout.remote`` in another.
"""

from drivetrain_rollout.engine import (
    DigestFunction,
    EngineConfig,
    EngineInfo,
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
    Completion,
    FinishReason,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

__all__ = [
    "Completion",
    "DigestFunction",
    "EngineConfig",
    "EngineInfo",
    "FinishReason",
    "GenerateRequest",
    "RequestError",
    "RequestErrorReason",
    "Rollout",
    "RolloutEngine",
    "RolloutGroup",
    "SamplingParams",
    "WeightUpdate",
    "WeightWrite",
    "WeightsRefused",
    "WeightsState",
    "Writer",
]
