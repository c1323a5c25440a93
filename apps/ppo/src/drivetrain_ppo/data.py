"""Prompts: where they come from, how they become token ids, and in which order a run sees them."""

import hashlib
import json
import pathlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from drivetrain_ppo.config import DataConfig
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.preflight import check_data_source


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One task: chat messages (or plain text) and what a right answer is."""

    prompt: str | tuple[Message, ...]
    ground_truth: str
    data_source: str
    extra: dict[str, Any] = {}


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """An example as the engine gets it."""

    token_ids: list[int]
    text: str
    example: Example


class PromptState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt source stands: enough to go on with exactly the prompts that are left."""

    taken: int
    fingerprint: str


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class PromptSource:
    """Training prompts in an order that depends on the seed alone: each epoch is a new permutation of all of them.

    The order is a function of (seed, epoch), so that the state is one number and resuming repeats and skips nothing.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("data.source: no training prompts are left: all are empty or over data.max_prompt_tokens")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._taken = 0
        self._order: list[int] = []
        self._epoch = -1
        ids = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            ids.update(json.dumps([prompt.token_ids, prompt.example.ground_truth]).encode())
        self._fingerprint = ids.hexdigest()

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def state(self) -> PromptState:
        return PromptState(taken=self._taken, fingerprint=self._fingerprint)

    def restore(self, state: PromptState) -> None:
        """Go on after the prompts already taken. Raises ValueError if the data is not the data of the state."""
        if state.fingerprint != self._fingerprint:
            raise ConfigError("data: the prompts differ from the checkpoint's: resume with the data the run began with")
        self._taken = state.taken

    def _next(self) -> Prompt:
        epoch, position = divmod(self._taken, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        self._taken += 1
        return self._prompts[self._order[position]]


class PromptData(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a run, tokenised."""

    train: list[Prompt]
    held_out: list[Prompt]
    left_out: int
    """Prompts that were empty or longer than `max_prompt_tokens`."""


def load_prompts(config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> PromptData:
    """Read or generate the examples, keep some apart for evaluation, and tokenise them.

    Generated tasks are split so that no held-out answer (sort_letters) or question is trained on; files at random.
    """
    from drivetrain_ppo import tasks

    if config.source == "sort_letters":
        train, held_out = tasks.sort_letters(config, seed=seed)
    elif config.source.startswith("reasoning_gym:"):
        train, held_out = tasks.reasoning_gym(config, seed=seed)
    else:
        examples = list(read_examples(config))
        if len(examples) <= config.held_out:
            raise ConfigError(f"data.held_out: {config.held_out} of {len(examples)} examples leave nothing to train on")
        random.Random(f"{seed}/split").shuffle(examples)
        train, held_out = examples[config.held_out :], examples[: config.held_out]
    kept = list(_tokenised(train, config, tokenizer))
    kept_out = list(_tokenised(held_out, config, tokenizer))
    left_out = len(train) + len(held_out) - len(kept) - len(kept_out)
    if not kept_out:
        raise ConfigError("data.held_out: no held-out prompts are left: all are empty or over data.max_prompt_tokens")
    return PromptData(train=kept, held_out=kept_out, left_out=left_out)


def _tokenised(examples: Iterable[Example], config: DataConfig, tokenizer: Tokenizer) -> Iterator[Prompt]:
    for example in examples:
        said = [example.prompt] if isinstance(example.prompt, str) else [turn.content for turn in example.prompt]
        if not any(text.strip() for text in said):
            continue
        token_ids, text = encode_prompt(example.prompt, tokenizer, system_prompt=config.system_prompt)
        if len(token_ids) <= config.max_prompt_tokens:
            yield Prompt(token_ids=token_ids, text=text, example=example)


def encode_prompt(
    prompt: str | Sequence[Message], tokenizer: Tokenizer, *, system_prompt: str = ""
) -> tuple[list[int], str]:
    """Token ids and text of a prompt, through the chat template when the tokenizer has one.

    The template writes its own special tokens, so its ids are used as they are: encoding its text again would begin
    with a second BOS.
    """
    if tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
        return tokenizer.encode(system_prompt + text), text
    messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0].role != "system":
        messages.insert(0, Message("system", system_prompt))
    chat = [{"role": message.role, "content": message.content} for message in messages]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids), messages[-1].content


def read_examples(config: DataConfig) -> Iterator[Example]:
    """Examples of a JSONL file (`prompt`, `answer`) or of a parquet file in verl's schema."""
    check_data_source(config.source)
    path = pathlib.Path(config.source)
    reader = {".jsonl": _read_jsonl, ".parquet": _read_parquet}[path.suffix]
    for count, example in enumerate(reader(path, config)):
        if count >= config.train_size + config.held_out:
            return
        yield example


def _read_jsonl(path: pathlib.Path, config: DataConfig) -> Iterator[Example]:
    used = (config.prompt_key, config.answer_key, "data_source")
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"data.source: {path}:{number}: not JSON: {error}") from None
            for key in (config.prompt_key, config.answer_key):
                if not isinstance(row, dict) or key not in row:
                    raise ConfigError(
                        f"data.source: {path}:{number}: no key {key!r} (data.prompt_key, data.answer_key)"
                    )
            yield Example(
                prompt=_messages(row[config.prompt_key], f"{path}:{number}"),
                ground_truth=str(row[config.answer_key]),
                data_source=str(row.get("data_source", path.stem)),
                extra={key: value for key, value in row.items() if key not in used},
            )


def _read_parquet(path: pathlib.Path, _config: DataConfig) -> Iterator[Example]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("data.source: parquet files need pyarrow: pip install 'drivetrain-ppo[parquet]'") from None
    file = pyarrow.parquet.ParquetFile(path)
    missing = {"prompt", "data_source", "reward_model"} - set(file.schema_arrow.names)
    if missing:
        raise ConfigError(
            f"data.source: {path}: no column {sorted(missing)} (prompt, data_source, reward_model.ground_truth)"
        )
    for batch in file.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            reward_model = row["reward_model"]
            if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
                raise ConfigError(f"data.source: {path}: reward_model holds no ground_truth")
            yield Example(
                prompt=_messages(row["prompt"], str(path)),
                ground_truth=str(reward_model["ground_truth"]),
                data_source=str(row["data_source"]),
                extra=row.get("extra_info") or {},
            )


def _messages(value: object, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    try:
        return tuple(msgspec.convert(value, list[Message]))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"data.source: {where}: a prompt is a text or a list of role/content messages: {error}"
        ) from None
