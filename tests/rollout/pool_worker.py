"""A worker process whose engine has no model: python pool_worker.py ADDRESS NAME SECONDS_A_STEP."""

import sys

from drivetrain_rollout import EngineConfig, RolloutEngine
from drivetrain_rollout.remote import serve
from drivetrain_rollout.testing import ScriptedEngine, sha256_digest

SHAPES = {"a": (64, 64), "b": (3,)}


def slow_engine(config: EngineConfig) -> RolloutEngine:
    return ScriptedEngine(
        shapes=SHAPES, digest=sha256_digest, tokens_per_step=4, step_seconds=float(sys.argv[3]), seed=config.seed
    )


if __name__ == "__main__":
    serve(sys.argv[1], factory=slow_engine, name=sys.argv[2])
