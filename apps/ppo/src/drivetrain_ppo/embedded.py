"""The embedded default: a small model with a tokenizer of single letters, made on the spot.

It is a Llama of 0.45 million parameters, saved as an ordinary Hugging Face folder, so that everything after it (engine,
learner, export) treats it as any other model.
"""

import pathlib
from collections.abc import Iterable

import torch

from drivetrain_ppo.errors import ConfigError

HIDDEN = 128
VOCABULARY = ["<pad>", "<bos>", "<eos>", ">", *"abcdefghijkl"]


def check_letters(texts: Iterable[str]) -> None:
    """Refuse a text that the tokenizer would read as padding. Raises ConfigError with the letter and the alphabet."""
    for text in texts:
        for letter in text:
            if letter not in VOCABULARY:
                known = "".join(token for token in VOCABULARY if len(token) == 1)
                raise ConfigError(
                    f"model.source: the embedded model knows no {letter!r} (in {text[:40]!r}), only the letters {known}"
                )


def make_model(folder: pathlib.Path, *, seed: int) -> None:
    """Write a freshly initialised model and its tokenizer into `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer(folder)


def make_tokenizer(folder: pathlib.Path) -> None:
    """One token a character, `<bos>` in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
