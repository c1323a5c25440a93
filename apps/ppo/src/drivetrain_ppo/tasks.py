"""Tasks with an exact answer that need no download."""

import difflib
import hashlib
import random
from typing import Any

from drivetrain_ppo.config import DataConfig
from drivetrain_ppo.data import Example
from drivetrain_ppo.errors import ConfigError

LETTERS = "abcdefghij"
LENGTH = 6


def is_held_out(answer: str, *, share: float = 0.1) -> bool:
    """Whether an answer belongs to evaluation: a fixed share of all answers, the same for each seed and run.

    Splitting by answer keeps every prompt with that answer out of training, so that none can be remembered.
    """
    digest = hashlib.blake2b(answer.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def sort_letters(config: DataConfig, *, seed: int) -> tuple[list[Example], list[Example]]:
    """`dbcaef>` -> `abcdef`: six letters of a to j, to be written in order. Some 5,005 answers, a million prompts."""
    if config.options:
        raise ConfigError(f"data.options: sort_letters takes none, got {sorted(config.options)}")
    rng = random.Random(f"{seed}/sort_letters")
    held_out_rng = random.Random("held-out/sort_letters")
    return (
        list(_letters(rng, config.train_size, held_out=False)),
        list(_letters(held_out_rng, config.held_out, held_out=True)),
    )


def _letters(rng: random.Random, count: int, *, held_out: bool) -> list[Example]:
    seen: set[str] = set()
    examples: list[Example] = []
    while len(examples) < count:
        letters = "".join(rng.choices(LETTERS, k=LENGTH))
        answer = "".join(sorted(letters))
        if letters in seen or is_held_out(answer) != held_out:
            continue
        seen.add(letters)
        examples.append(Example(prompt=f"{letters}>", ground_truth=answer, data_source="sort_letters"))
    return examples


def reasoning_gym(config: DataConfig, *, seed: int) -> tuple[list[Example], list[Example]]:
    """A task of the reasoning-gym package by name; its own scorer is the reward `reasoning_gym`."""
    import reasoning_gym.factory as factory

    name = config.source.partition(":")[2]
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=1)
        raise ConfigError(
            f"data.source: reasoning-gym has no task {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    try:
        train = factory.create_dataset(name, size=config.train_size, seed=seed, **config.options)
        held_out = factory.create_dataset(name, size=config.held_out, seed=2**31 - 1, **config.options)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"data.options: {name}: {error}") from None
    known = {item["question"] for item in held_out}
    return (
        [_example(name, item) for item in train if item["question"] not in known],
        [_example(name, item) for item in held_out],
    )


def _example(name: str, item: dict[str, Any]) -> Example:
    return Example(
        prompt=item["question"],
        ground_truth=str(item["answer"]),
        data_source=f"reasoning_gym:{name}",
        extra={"metadata": _plain(item["metadata"])},
    )


def _plain(value: Any) -> Any:
    """Metadata as JSON can hold it; the scorers read numbers, texts, lists and mappings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
