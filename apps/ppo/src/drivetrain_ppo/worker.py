"""The rollout worker: one engine in a process of its own, on this host or another, joined to a run by address."""

import os
from collections.abc import Callable

from drivetrain_rollout import EngineConfig, RolloutEngine


def _vllm(config: EngineConfig) -> RolloutEngine:
    from drivetrain_rollout.vllm import VLLMEngine
    from drivetrain_sharding import digest

    from drivetrain_ppo.weights import SharedWriter

    return VLLMEngine(config, digest=digest, writer=SharedWriter())


def _transformers(config: EngineConfig) -> RolloutEngine:
    from drivetrain_rollout.transformers import TransformersEngine
    from drivetrain_sharding import digest

    from drivetrain_ppo.weights import SharedWriter

    return TransformersEngine(config, digest=digest, writer=SharedWriter())


ENGINES: dict[str, Callable[[EngineConfig], RolloutEngine]] = {"vllm": _vllm, "transformers": _transformers}


def build_engine(config: EngineConfig) -> RolloutEngine:
    """The engine a controller asks this worker to host."""
    if config.engine not in ENGINES:
        raise ValueError(f"engine {config.engine!r} is unknown; this worker hosts {', '.join(ENGINES)}")
    return ENGINES[config.engine](config)


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
