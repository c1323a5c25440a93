"""Supervised training of the embedded model, to a policy that is sometimes right: PPO needs something to reinforce."""

import itertools
import pathlib
import random
from collections.abc import Callable, Sequence

import torch
from drivetrain_algorithms import aggregate, sft_loss
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, load_model

from drivetrain_ppo.config import WarmStartConfig
from drivetrain_ppo.data import Prompt, Tokenizer
from drivetrain_ppo.errors import ConfigError

PROBE_EVERY = 5
PROBE_PROMPTS = 128


def warm_start(
    folder: pathlib.Path,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: WarmStartConfig,
    *,
    stop_token_id: int,
    max_tokens: int,
    seed: int,
    progress: Callable[[int, float], None],
) -> float:
    """Train the model in `folder` on some answers until greedy accuracy on fresh prompts reaches the target.

    Returns that accuracy. `progress` hears of it every few steps. The demonstrations come from the end of `prompts`,
    and the probe from just before them.
    """
    if len(prompts) < config.demonstrations + PROBE_PROMPTS:
        raise ConfigError(
            f"warm_start.demonstrations: {config.demonstrations} and {PROBE_PROMPTS} to probe with are more than the "
            f"{len(prompts)} training prompts"
        )
    shown = prompts[-config.demonstrations :]
    probe = prompts[-config.demonstrations - PROBE_PROMPTS : -config.demonstrations]
    demonstrations = _pack(shown, tokenizer, stop_token_id)
    learner = Learner(PolicyModel(load_model(str(folder))), LearnerConfig(lr=config.lr, max_grad_norm=1.0))
    rng = random.Random(f"{seed}/warm-start")
    accuracy = 0.0
    for step in range(1, config.max_steps + 1):
        chosen = rng.sample(range(len(shown)), min(config.batch_size, len(shown)))
        _step(learner, demonstrations.select(torch.tensor(chosen)))
        if step % PROBE_EVERY == 0:
            accuracy = greedy_accuracy(learner.module, probe, tokenizer, max_tokens=max_tokens)
            progress(step, accuracy)
            if accuracy >= config.target_accuracy:
                break
    learner.module.model.save_pretrained(folder)
    return accuracy


def _pack(prompts: Sequence[Prompt], tokenizer: Tokenizer, stop_token_id: int) -> PackedBatch:
    answers = [[*tokenizer.encode(prompt.example.ground_truth)[1:], stop_token_id] for prompt in prompts]
    return PackedBatch.pack(
        [prompt.token_ids + answer for prompt, answer in zip(prompts, answers, strict=True)],
        [
            [False] * len(prompt.token_ids) + [True] * len(answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    )


def _step(learner: Learner[PolicyModel], batch: PackedBatch) -> None:
    tokens = batch.loss_mask.sum()

    def loss(part: PackedBatch) -> LossTerms:
        mask, bounds = part.loss_mask, part.cu_seqlens
        per_token = sft_loss(learner.module(part).logprobs, mask)
        mean = aggregate(per_token, mask, mode="token_mean", denominator=tokens, cu_seqlens=bounds)
        return LossTerms(loss=mean, metrics={})

    learner.update(batch, loss)


@torch.no_grad()
def greedy_accuracy(model: PolicyModel, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_tokens: int) -> float:
    """Share of prompts that greedy decoding answers exactly. Prompts of one length are decoded together."""
    right = 0
    for _, group in itertools.groupby(sorted(prompts, key=_length), key=_length):
        same = list(group)
        ids = torch.tensor([prompt.token_ids for prompt in same])
        written = model.model.generate(input_ids=ids, max_new_tokens=max_tokens, do_sample=False)[:, ids.shape[1] :]
        answers = [tokenizer.decode(row, skip_special_tokens=True) for row in written.tolist()]
        right += sum(answer == prompt.example.ground_truth for answer, prompt in zip(answers, same, strict=True))
    return right / len(prompts)


def _length(prompt: Prompt) -> int:
    return len(prompt.token_ids)
