"""The rollout worker: one engine in a process of its own, on this host or another, joined to a run by address."""

import os

from drivetrain_rollout import EngineConfig, RolloutEngine
from drivetrain_rollout.start import start_engine


def build_engine(config: EngineConfig) -> RolloutEngine:
    """The engine a controller asks this worker to host."""
    from drivetrain_sharding import digest

    from drivetrain_ppo.weights import SharedWriter

    return start_engine(config, digest=digest, writer=SharedWriter())


def run_worker(address: str, *, keys: str | None, timeout: float) -> None:
    """Join the controller, host the engine it asks for, and return when it says goodbye or is lost.

    Waits up to `timeout` seconds for the controller to be there.
    """
    from drivetrain_rollout.remote import serve
    from drivetrain_transport import load_keys

    serve(
        address,
        factory=build_engine,
        name=f"rollout-worker-{os.getpid()}",
        keys=None if keys is None else load_keys(keys),
        timeout=timeout,
    )
