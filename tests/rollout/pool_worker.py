"""A worker process whose engine has no model: python pool_worker.py ADDRESS NAME SECONDS_A_STEP."""

import sys
import time

from drivetrain_rollout import EngineConfig, RolloutEngine
from drivetrain_rollout.remote import serve
from drivetrain_rollout.testing import ScriptedEngine, sha256_digest

SHAPES = {"a": (64, 64), "b": (3,)}


def slow_engine(config: EngineConfig) -> RolloutEngine:
    engine = ScriptedEngine(shapes=SHAPES, digest=sha256_digest, tokens_per_step=4, seed=config.seed)
    backend = engine._loop._backend  # type: ignore[attr-defined]
    step = backend.step

    def slowly():  # type: ignore[no-untyped-def]
        time.sleep(float(sys.argv[3]))
        return step()

    backend.step = slowly
    return engine


if __name__ == "__main__":
    serve(sys.argv[1], factory=slow_engine, name=sys.argv[2])
