"""The configuration of a run: one frozen struct per component, from YAML and `key=value`, checked before all else.

Reading a configuration imports neither torch nor an engine, so that a mistyped key is answered at once.
"""

import difflib
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import yaml
from drivetrain_learner.config import LearnerConfig

from drivetrain_ppo.errors import ConfigError

# How far a number may go, beside its key. Docs show these names as the type.
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOr0 = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveOr0 = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy to train; critic and reference start from it."""

    source: str = "embedded"
    """`embedded` (a small model of the letters a to l and `>`, made and warm-started on the spot), `smollm2`, a local
    folder, or a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of learner and engine; `auto` is float32 on a CPU and bfloat16 elsewhere. Masters and optimizer
    states are float32 either way."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts and their answers come from."""

    source: str = "sort_letters"
    """`sort_letters`, `reasoning_gym:NAME`, or a path ending in .jsonl or .parquet."""
    train_size: Count = 32768
    """Prompts to generate for training (generated tasks), or the most to read (files)."""
    held_out: Count = 512
    """Prompts kept apart for evaluation."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out when the data is read, and counted."""
    shuffle: bool = True
    """A new order each epoch; false keeps the file's."""
    options: dict[str, Any] = {}
    """Settings of the task generator itself, e.g. `{min_terms: 2, max_terms: 2}`."""
    prompt_key: str = "prompt"
    """JSONL: the key of the prompt (text, or a list of chat messages)."""
    answer_key: str = "answer"
    """JSONL: the key of the exact answer."""
    system_prompt: str = ""
    """Put before each conversation that has none of its own."""


class WarmStartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised training of the embedded model before PPO."""

    demonstrations: Count = 128
    """Answers to learn from."""
    batch_size: Count = 64
    """Demonstrations in an optimizer step."""
    lr: Positive = 1e-3
    """AdamW's learning rate."""
    target_accuracy: Share = 0.30
    """Training stops when greedy accuracy on fresh training prompts reaches this."""
    max_steps: Count = 400
    """Optimizer steps after which it stops in any case."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy is sampled, and by which engine."""

    engine: str = "vllm"
    """`vllm` or `transformers`; on ROCm `vllm_rocm` is accepted for `vllm`."""
    prompts_per_step: Count = 256
    """Prompts of one PPO step."""
    samples_per_prompt: Count = 1
    """Responses to each of them."""
    temperature: Annotated[float, msgspec.Meta(ge=0.01)] = 1.0
    """Divides the logits, in the engine and in the learner alike."""
    max_response_tokens: Count = 16
    """A response that reaches it is cut off there."""
    max_model_len: Count | None = None
    """Longest prompt plus response; by default `data.max_prompt_tokens + rollout.max_response_tokens`, or
    what the model can take if that is less."""
    max_num_seqs: Count = 256
    """Responses that an engine samples at once."""
    memory_fraction: PositiveShare | None = None
    """Share of the accelerator's memory the engine may take; by default the accelerator profile's."""
    kv_cache_bytes: Count | None = None
    """Bytes of vLLM's KV cache; by default what the memory fraction leaves, or 512 MiB on a CPU."""
    enforce_eager: bool | None = None
    """Neither compile nor capture graphs; by default on a CPU only."""
    engine_args: dict[str, Any] = {}
    """Passed to the engine as they are."""
    workers: Count = 1
    """Engines, each in a process of its own."""
    spawn: bool = True
    """Start the workers on this machine; otherwise wait for `drivetrain-ppo rollout-worker --join` to come."""
    listen: str = "tcp://127.0.0.1:0"
    """Where workers join. Off this machine, CURVE keys are needed."""
    keys: str | None = None
    """Folder of CURVE keys (`drivetrain-ppo keys FOLDER` makes one)."""
    weight_sync: Literal["auto", "shared", "sent"] = "auto"
    """How weights reach the engines: `shared` lets engines on the learner's device read its memory and write their own
    parameters in place, `sent` sends named tensors, `auto` is the former where it can be had."""
    join_timeout: Positive = 300.0
    """Seconds to wait for the workers to join, and for an engine to load."""
    timeout: Positive = 600.0
    """Seconds from a step's first request after which one without an answer counts as failed; the same for scoring
    and for a push of weights, which then end the run."""


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proximal policy optimisation (https://arxiv.org/abs/1707.06347) with a critic."""

    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 0.95
    """GAE's lambda: 1 is Monte-Carlo, 0 one-step."""
    clip_low: Share = 0.2
    """The ratio is held above 1 - clip_low."""
    clip_high: PositiveOr0 = 0.2
    """The ratio is held below 1 + clip_high."""
    value_clip: Positive = 0.2
    """New values are held this close to the old ones."""
    kl_coef: PositiveOr0 = 0.01
    """Weight of the KL penalty to the reference in the per-token rewards."""
    kl: Literal["k1", "abs", "k2", "k3"] = "k1"
    """The estimator of that penalty (http://joschu.net/blog/kl-approx.html)."""
    entropy_coef: PositiveOr0 = 0.01
    """Weight of the entropy bonus in the policy loss."""
    epochs: Count = 2
    """Passes over a step's samples."""
    minibatches: Count = 2
    """Optimizer steps of a pass."""
    whiten: bool = True
    """Advantages are shifted and scaled to mean 0 and variance 1 over the step."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How the policy loss weighs tokens and sequences."""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are scored."""

    function: str = "exact_match"
    """`exact_match`, `math_answer`, `reasoning_gym`, or one of your own as `module:function` or `file.py:function`,
    from a RewardRequest to a number."""
    workers: Count = 1
    """Processes that score; `exact_match` needs none."""
    deadline: Positive = 10.0
    """Seconds one call may take; after that its sample is failed, not scored 0."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run as a whole."""

    steps: Count = 120
    """PPO steps of the run."""
    device: str = "auto"
    """`auto`, `cpu`, or the accelerator's name."""
    eval_every: Count = 10
    """Steps between evaluations on the held-out prompts."""
    checkpoint_every: Count = 20
    """Steps between checkpoints; the last step has one in any case."""
    keep_checkpoints: Count = 2
    """The newest ones are kept."""
    max_failure_rate: Share = 0.1
    """The run stops when more than this share of a step's or an evaluation's samples fails, whatever the reason."""
    max_staleness: CountOr0 = 0
    """Optimizer steps a rollout may be behind the learner and still be trained on."""
    logprob_diff_limit: Positive | None = None
    """Mean |engine - learner| log-prob above which the run stops; by default 1e-4 in float32 and 0.05 in bfloat16."""
    stop_reward: float | None = None
    """Stop early when held-out reward reaches this."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one run."""

    name: str = "ppo"
    """Names the run's folder and its display."""
    seed: Seed = 1
    """Decides data order, sampling, minibatches and the embedded model."""
    run_dir: str | None = None
    """Where the run writes; by default `runs/NAME-DATE`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    actor: LearnerConfig = LearnerConfig(lr=1e-6)
    critic: LearnerConfig = LearnerConfig(lr=5e-6)
    trainer: TrainerConfig = TrainerConfig()


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string; people mean the number."""


def _no_key_twice(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """YAML lets the last of two equal keys win in silence."""
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _no_key_twice)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_config(path: str | pathlib.Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file (or start from the defaults), apply `key=value` overrides, and check the result.

    Raises ConfigError with the dotted path of what is wrong and, for an unknown key, the nearest valid name.
    """
    data: dict[str, Any] = {}
    if path is not None:
        file = pathlib.Path(path)
        if not file.is_file():
            raise ConfigError(f"{file}: no such configuration file")
        try:
            loaded = yaml.load(file.read_bytes(), Loader=_Loader)  # noqa: S506 (a SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(loaded, dict | None):
            raise ConfigError(f"{file}: expected `key: value` lines, got {type(loaded).__name__}")
        data = loaded or {}
    for override in overrides:
        _override(data, override)
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Build and check a RunConfig from plain nested mappings."""
    _reject_unknown_keys(data)
    try:
        config = msgspec.convert(_merge(_defaults(), data), RunConfig)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        name = where.strip("`.")
        message = _in_words(message, name)
        given = "" if ", got " in message or not name else f", got {_at(data, name)!r}"
        raise ConfigError(f"{name or 'configuration'}: {message}{given}") from None
    _check_values(config)
    return config


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: overrides are written key=value, e.g. trainer.steps=50")
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: `{parent}` holds a value, not a group of settings")
    try:
        data[leaf] = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.YAMLError:
        data[leaf] = text


def _defaults() -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(RunConfig())
    return built


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """The keys in which two configurations differ, but for the place they are written to."""
    ours, theirs = msgspec.to_builtins(one), msgspec.to_builtins(other)
    return [name for name in _leaves(ours) if _at(ours, name) != _at(theirs, name) and name != "run_dir"]


FREE_FORM = ("data.options", "rollout.engine_args")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in FREE_FORM:
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _reject_unknown_keys(data: Mapping[str, Any], known: Mapping[str, Any] | None = None, prefix: str = "") -> None:
    known = _defaults() if known is None else known
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key not in known:
            every = [*_leaves(_defaults()), *_defaults()]
            near = difflib.get_close_matches(name, every, n=1, cutoff=0.5) or difflib.get_close_matches(
                str(key), [leaf.rpartition(".")[2] for leaf in every], n=1, cutoff=0.6
            )
            full = [leaf for leaf in every if near and leaf.endswith(near[0])]
            raise ConfigError(f"{name}: unknown key" + (f"; did you mean `{full[0]}`?" if full else ""))
        if isinstance(value, dict) and isinstance(known[key], dict) and name not in FREE_FORM:
            _reject_unknown_keys(value, known[key], f"{name}.")


def _check_values(config: RunConfig) -> None:
    for name, value in _numbers(msgspec.to_builtins(config)):
        if not math.isfinite(value):
            raise ConfigError(f"{name}: {value} is no finite number")
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if config.algorithm.minibatches > samples:
        raise ConfigError(
            f"algorithm.minibatches: {config.algorithm.minibatches} parts of the {samples} samples of a step"
        )


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def _in_words(message: str, name: str) -> str:
    """The words of the docs, and the choices where there are some."""
    for theirs, ours in {"`array`": "`list`", "`object`": "`group of settings`"}.items():
        message = message.replace(theirs, ours)
    if message.startswith("Invalid enum value"):
        kind: Any = RunConfig
        for key in name.split("."):
            kind = get_type_hints(kind)[key]
        message = f"choose {', '.join(map(str, get_args(kind)))}"
    return message


def _at(data: Mapping[str, Any], name: str) -> Any:
    value: Any = data
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _merge(defaults: Mapping[str, Any], data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Data over defaults, so that a group may be given in part."""
    merged = dict(defaults)
    for key, value in data.items():
        name = f"{prefix}{key}"
        group = isinstance(value, dict) and isinstance(merged.get(key), dict) and name not in FREE_FORM
        merged[key] = _merge(merged[key], value, f"{name}.") if group else value
    return merged
