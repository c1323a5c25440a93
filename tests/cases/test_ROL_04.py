"""ROL-04: the trainer trains on ids that the engine neither read nor drew, since text went in between.

huggingface/trl#5224, NovaSky-AI/SkyRL#123, THUDM/slime#117, huggingface/trl#3853, vllm-project/vllm#16976: decoding and
encoding again makes one token of two; a template and a tokenizer that both begin the sequence begin it twice.

A tiny model samples at temperature 1.5 over the vocabulary of a real byte-pair tokenizer with a Llama-like template.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drivetrain_ppo.batch import make_batch
from drivetrain_rollout import Completion, EngineConfig, Rollout, SamplingParams
from drivetrain_rollout.chat import Chat
from drivetrain_rollout.environment import Step, run_episode
from drivetrain_rollout.testing import write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXT = "hello help hell low lower lowest yellow hollow user assistant tool the sum of two and three is five " * 20
LONGEST = 256
WHAT = [{"role": "user", "content": "hello, the sum of two and three?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    )
    # As Llama's: whatever is encoded begins with <s>, and so does the template.
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[TransformersEngine]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer))
    found = TransformersEngine(EngineConfig(engine="transformers", model=str(folder), max_model_len=LONGEST))
    yield found
    asyncio.run(found.close())


class Tool:
    """Answers each response with a message, three times."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.turns: list[Completion] = []

    async def reset(self) -> tuple[int, ...]:
        return self.chat.start(WHAT)

    async def step(self, response: Completion) -> Step:
        self.turns.append(response)
        said = self.chat.follow(response.response_token_ids, [{"role": "tool", "content": "five"}])
        return Step(token_ids=said, done=len(self.turns) == 3, score=0.0)


def rollouts(engine: TransformersEngine, tokenizer: Any) -> list[Rollout]:
    chat = Chat(tokenizer)
    sampling = SamplingParams(max_tokens=24, temperature=1.5, stop_token_ids=(tokenizer.eos_token_id,))

    async def all_of_them() -> list[Rollout]:
        return await asyncio.gather(
            *(run_episode(engine, Tool(chat), sampling, sample_id=index, max_tokens=LONGEST) for index in range(8))
        )

    return asyncio.run(all_of_them())


def test_what_is_trained_is_what_was_read_and_drawn(engine: TransformersEngine, tokenizer: Any):
    found = rollouts(engine, tokenizer)
    packed = make_batch(found, rank=0, size=1, device="cpu").packed
    rows = packed.labels.tensor_split(packed.cu_seqlens[1:-1].long())
    masks = packed.loss_mask.tensor_split(packed.cu_seqlens[1:-1].long())
    changed = 0
    for rollout, row, mask in zip(found, rows, masks, strict=True):
        assert len(rollout.turns) == 3
        assert len(rollout.token_ids) <= LONGEST
        last = rollout.turns[-1]
        assert tuple(row.tolist()) == (last.prompt_token_ids + last.response_token_ids)[1:]
        drawn = [token for turn in rollout.turns for token in turn.response_token_ids]
        assert row[mask].tolist() == drawn
        for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
            seen = before.prompt_token_ids + before.response_token_ids
            assert after.prompt_token_ids[: len(seen)] == seen
        assert rollout.token_ids.count(tokenizer.bos_token_id) - drawn.count(tokenizer.bos_token_id) == 1
        again = tokenizer.encode(tokenizer.decode(rollout.token_ids), add_special_tokens=False)
        changed += tuple(again) != rollout.token_ids
    assert changed >= 4  # the way over text would have changed them


def test_a_turn_reads_as_the_template_says(tokenizer: Any):
    chat = Chat(tokenizer)
    start = chat.start(WHAT)
    assert tokenizer.decode(start) == tokenizer.apply_chat_template(WHAT, tokenize=False, add_generation_prompt=True)
    end = tokenizer.eos_token_id
    cut_off = tokenizer.encode("hello low", add_special_tokens=False)
    answer = [{"role": "tool", "content": "five"}]
    whole = [*WHAT, {"role": "assistant", "content": "hello low"}, *answer]
    expected = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    for response in ([*cut_off, end], cut_off):
        ids = [*start, *response, *chat.follow(response, answer)]
        assert tokenizer.decode(ids) == expected
        assert ids.count(end) == 3


def test_a_template_that_hides_what_was_said_is_refused(tokenizer: Any):
    class Hiding:
        encode = tokenizer.encode

        def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
            return "".join(message["role"] for message in conversation)

    with pytest.raises(ValueError, match="does not show an assistant's message"):
        Chat(Hiding())
