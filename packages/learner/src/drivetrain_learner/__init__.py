"""The training engine: packed sequences, exact gradient accumulation, AdamW, checkpoints.

Names are imported when they are first used, so that `drivetrain_learner.config` can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_learner.batch import PackedBatch
    from drivetrain_learner.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
    from drivetrain_learner.config import LearnerConfig
    from drivetrain_learner.learner import Learner, LossTerms, UpdateResult
    from drivetrain_learner.logprobs import TokenOutputs
    from drivetrain_learner.models import PolicyModel, ValueModel, load_model

_MODULES = {
    "Checkpoint": "checkpoint",
    "Learner": "learner",
    "LearnerConfig": "config",
    "LossTerms": "learner",
    "PackedBatch": "batch",
    "PolicyModel": "models",
    "TokenOutputs": "logprobs",
    "UpdateResult": "learner",
    "ValueModel": "models",
    "latest_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "load_model": "models",
    "save_checkpoint": "checkpoint",
}

__all__ = [
    "Checkpoint",
    "Learner",
    "LearnerConfig",
    "LossTerms",
    "PackedBatch",
    "PolicyModel",
    "TokenOutputs",
    "UpdateResult",
    "ValueModel",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "save_checkpoint",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
