"""A checkpoint's policy as a Hugging Face folder that transformers and vLLM load."""

import pathlib

from drivetrain_learner import PolicyModel, latest_checkpoint, load_checkpoint, load_model
from drivetrain_sharding import load_named_tensors

from drivetrain_ppo import models
from drivetrain_ppo.config import load_config
from drivetrain_ppo.errors import ConfigError


def export(checkpoint: pathlib.Path, folder: pathlib.Path) -> str:
    """Write the policy of `checkpoint` (one of RUN/checkpoints, or RUN for its newest) into `folder`.

    Raises ConfigError when there is no complete checkpoint, or `folder` already holds something.
    """
    run = checkpoint if (checkpoint / "config.yaml").is_file() else checkpoint.parent.parent
    found = latest_checkpoint(run / "checkpoints") if run == checkpoint else checkpoint
    if found is None or not (run / "config.yaml").is_file():
        raise ConfigError(f"{checkpoint}: neither a run with a complete checkpoint nor a folder of RUN/checkpoints")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: the folder is not empty")
    models.silence_progress_bars()
    try:
        loaded = load_checkpoint(found)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = load_config(run / "config.yaml")
    source = str(run / "model") if config.model.source == "embedded" else models.resolve_source(config)
    policy = PolicyModel(load_model(source))
    prefix = "actor/model/"
    load_named_tensors(policy, {k.removeprefix(prefix): v for k, v in loaded.tensors.items() if k.startswith(prefix)})
    policy.model.save_pretrained(folder)
    models.copy_tokenizer(source, folder)
    models.make_readable(folder)
    return f"{folder}: the policy of {found}, step {loaded.step}"
