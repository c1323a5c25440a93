"""Prompts: their order, their split, their formats."""

import json
import pathlib
from typing import Any

import pytest
from drivetrain_ppo import tasks
from drivetrain_ppo.config import ConfigError, DataConfig
from drivetrain_ppo.data import Example, Message, Prompt, PromptSource, encode_prompt, load_prompts, read_examples


class Letters:
    """A tokenizer of single characters, with an optional chat template that begins with BOS as Llama's does."""

    def __init__(self, *, chat: bool = False) -> None:
        self.chat_template = "template" if chat else None

    def encode(self, text: str) -> list[int]:
        return [1, *(ord(letter) for letter in text)]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token > 1)

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode("".join(f"[{turn['role']}]{turn['content']}" for turn in conversation))


def prompts(count: int) -> list[Prompt]:
    example = Example(prompt="p", ground_truth="a", data_source="test")
    return [Prompt(token_ids=[i], text="p", example=example) for i in range(count)]


def ids(taken: list[Prompt]) -> list[int]:
    return [prompt.token_ids[0] for prompt in taken]


def test_resume_goes_on_with_the_prompts_that_are_left() -> None:
    straight = ids(PromptSource(prompts(20), seed=3).take(50))
    assert sorted(straight[:20]) == list(range(20)) == sorted(straight[20:40])
    assert straight[:20] != straight[20:40], "each epoch is a new permutation"
    first = PromptSource(prompts(20), seed=3)
    taken = ids(first.take(7))
    second = PromptSource(prompts(20), seed=3)
    second.restore(first.state())
    taken += ids(second.take(13))
    third = PromptSource(prompts(20), seed=3)
    third.restore(second.state())
    assert taken + ids(third.take(30)) == straight


def test_the_seed_decides_the_order() -> None:
    assert ids(PromptSource(prompts(20), seed=1).take(20)) != ids(PromptSource(prompts(20), seed=2).take(20))
    assert ids(PromptSource(prompts(5), seed=1, shuffle=False).take(7)) == [0, 1, 2, 3, 4, 0, 1]


def test_other_data_is_refused_on_resume() -> None:
    state = PromptSource(prompts(20), seed=3).state()
    with pytest.raises(ValueError, match="differ from the checkpoint's"):
        PromptSource(prompts(21), seed=3).restore(state)


def test_letters_are_split_by_answer() -> None:
    train, held_out = tasks.sort_letters(DataConfig(train_size=2000, held_out=200), seed=1)
    assert not {example.ground_truth for example in train} & {example.ground_truth for example in held_out}
    assert all("".join(sorted(str(e.prompt)[:-1])) == e.ground_truth for e in train[:50])
    other, same_held_out = tasks.sort_letters(DataConfig(train_size=2000, held_out=200), seed=2)
    assert same_held_out == held_out
    assert other != train


def test_reasoning_gym_tasks_and_their_scorer() -> None:
    from drivetrain_ppo.scorers import reasoning_gym
    from drivetrain_rewards import RewardRequest

    config = DataConfig(
        source="reasoning_gym:chain_sum", train_size=40, held_out=8, options={"min_terms": 2, "max_terms": 2}
    )
    train, held_out = tasks.reasoning_gym(config, seed=1)
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    json.dumps([example.extra for example in train])
    answer = train[0].ground_truth
    scores = [
        reasoning_gym(
            RewardRequest(
                sample_id=0,
                prompt="",
                response=response,
                ground_truth=answer,
                data_source=train[0].data_source,
                extra=train[0].extra,
            )
        )
        for response in (answer, f"The answer is {answer}.", f"{int(answer) + 1}", "")
    ]
    assert scores[:2] == [1.0, 1.0]
    assert scores[2] < 0.5
    assert scores[3] < 0.5


def test_unknown_task_and_options() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        tasks.reasoning_gym(DataConfig(source="reasoning_gym:chainsum"), seed=1)
    with pytest.raises(ConfigError, match=r"data\.options: chain_sum"):
        tasks.reasoning_gym(DataConfig(source="reasoning_gym:chain_sum", options={"min_term": 2}), seed=1)
    with pytest.raises(ConfigError, match="sort_letters takes none"):
        tasks.sort_letters(DataConfig(options={"n": 2}), seed=1)


def test_jsonl(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i}+1=", "reply": i + 1, "level": i} for i in range(5)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    config = DataConfig(source=str(file), prompt_key="question", answer_key="reply", held_out=2, max_prompt_tokens=9)
    assert [e.ground_truth for e in read_examples(config)] == ["1", "2", "3", "4", "5"]
    assert [e.extra for e in read_examples(config)][:2] == [{"level": 0}, {"level": 1}]
    data = load_prompts(config, Letters(), seed=1)
    assert len(data.train) == 3
    assert len(data.held_out) == 2
    assert data.left_out == 0
    with pytest.raises(ConfigError, match=r"sums.jsonl:1: no key 'prompt'"):
        list(read_examples(DataConfig(source=str(file))))
    with pytest.raises(ConfigError, match="5 of 5 examples leave nothing to train on"):
        load_prompts(
            DataConfig(source=str(file), prompt_key="question", answer_key="reply", held_out=5), Letters(), seed=1
        )


def test_long_and_empty_prompts_are_left_out_and_counted(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x" * n, "answer": "y"}) for n in (0, 3, 4, 5, 40, 3)))
    data = load_prompts(DataConfig(source=str(file), held_out=3, max_prompt_tokens=6), Letters(), seed=1)
    assert len(data.train) + len(data.held_out) == 4
    assert data.left_out == 2


def test_parquet_in_verls_schema(tmp_path: pathlib.Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1?"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(3)
    ]
    file = tmp_path / "train.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    examples = list(read_examples(DataConfig(source=str(file))))
    assert examples[2] == Example(
        prompt=(Message("user", "2+1?"),), ground_truth="3", data_source="openai/gsm8k", extra={"index": 2}
    )
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "x"}]), file)
    with pytest.raises(ConfigError, match="no column"):
        list(read_examples(DataConfig(source=str(file))))


def test_chat_template_ids_are_used_as_they_are() -> None:
    """A template that writes BOS itself must not be encoded again: exactly one BOS."""
    token_ids, text = encode_prompt((Message("user", "hi"),), Letters(chat=True), system_prompt="be brief")
    assert token_ids.count(1) == 1
    assert text == "hi"
    assert Letters().decode(token_ids) == "[system]be brief[user]hi"
    assert encode_prompt("hi", Letters())[0] == [1, 104, 105]


def test_unknown_source() -> None:
    with pytest.raises(ConfigError, match="neither sort_letters"):
        list(read_examples(DataConfig(source="gsm8k")))
    with pytest.raises(ConfigError, match="no such file"):
        list(read_examples(DataConfig(source="nowhere.jsonl")))
