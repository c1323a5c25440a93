"""ALG-12: the importance ratio is not 1 before the first update, and clipping acts on noise.

CarperAI/trlx#107, CarperAI/trlx#508, huggingface/trl#454, huggingface/trl#4
"""

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from drivetrain_algorithms import aggregate, loss_denominator, ppo_clip
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel
from torch import Tensor

VOCABULARY = 29
LENGTHS = [(3, 7), (5, 1), (2, 18), (1, 4), (9, 11), (4, 6), (6, 2)]
"""Tokens of the prompt and of the response."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_model(**changes: Any) -> Any:
    """Two layers, whose configuration asks for dropout in the attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "attention_dropout": 0.3,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).train()


def dropout_model() -> Any:
    """One with `nn.Dropout` modules as well: after the embeddings, the attention and each layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.3,
        resid_pdrop=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


MODELS = {"llama": tiny_model, "gpt2": dropout_model}
every_model = pytest.mark.parametrize("model_name", MODELS)


def packed_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, VOCABULARY, (p + r,), generator=generator).tolist() for p, r in LENGTHS]
    return PackedBatch.pack(sequences, [[i >= p for i in range(p + r)] for p, r in LENGTHS])


def padded_logprobs(model: Any, batch: PackedBatch, temperature: float) -> Tensor:
    """What transformers itself says about the labels, from a padded batch, in the packed order."""
    ids, labels = (
        [x[a:b] for a, b in itertools.pairwise(batch.cu_seqlens.tolist())] for x in (batch.input_ids, batch.labels)
    )
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    logits = model(input_ids=padded, attention_mask=attended).logits / temperature
    rows = [
        logits[row, : len(x)].log_softmax(-1).gather(-1, x.unsqueeze(-1)).squeeze(-1) for row, x in enumerate(labels)
    ]
    return torch.cat(rows).detach()


class Deviation(NamedTuple):
    """What the metrics of a run of updates say, at its worst."""

    ratio: float
    approx_kl: float
    clip_fraction: float


def train(
    learner: Learner[PolicyModel], batch: PackedBatch, old_logprobs: Tensor, *, temperature: float = 1.0
) -> Deviation:
    """Two epochs over all mini-batches, of two sequences and in another order each time."""
    advantages = torch.linspace(-2.0, 2.0, batch.num_tokens, device=old_logprobs.device)
    worst: list[tuple[float, float, float]] = []
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 5, 0, 3, 1, 4]):
        for start in range(0, 7, 2):
            minibatch = batch.select(order[start : start + 2])
            denominator = loss_denominator(minibatch.loss_mask, mode="token_mean", cu_seqlens=minibatch.cu_seqlens)

            def loss(part: PackedBatch, denominator: Tensor = denominator) -> LossTerms:
                out = learner.module(part, temperature=temperature)
                tokens, mask = part.tokens, part.loss_mask
                policy = ppo_clip(
                    out.logprobs, old_logprobs[tokens], advantages[tokens], mask, clip_low=0.2, clip_high=0.2
                )
                kept = (policy.ratio - 1).abs()
                worst.append((kept.max().item(), policy.approx_kl.max().item(), policy.clipped.float().mean().item()))

                def mean(x: Tensor) -> Tensor:
                    return aggregate(x, mask, mode="token_mean", denominator=denominator, cu_seqlens=part.cu_seqlens)

                metrics = {"approx_kl": mean(policy.approx_kl), "clip_fraction": mean(policy.clipped)}
                return LossTerms(loss=mean(policy.loss), metrics=metrics)

            result = learner.update(minibatch, loss)
            worst.append((0.0, result.metrics["approx_kl"], result.metrics["clip_fraction"]))
    return Deviation(*(max(column) for column in zip(*worst, strict=True)))


@every_model
@pytest.mark.parametrize("limit", [1000, 23, 10, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_is_one_at_every_trainable_token(model_name: str, limit: int, temperature: float) -> None:
    """At a learning rate of 0, whatever the micro-batches of scoring and of training: none of the limits divides."""
    batch = packed_batch()
    policy = PolicyModel(MODELS[model_name]())
    scorer = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=limit))
    old_logprobs = scorer.infer(batch, lambda part: policy(part, temperature=temperature).logprobs)
    assert old_logprobs[batch.loss_mask].lt(0).all()
    for training_limit in (1000, 13):
        learner = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=training_limit))
        deviation = train(learner, batch, old_logprobs, temperature=temperature)
        assert deviation.ratio < 1e-4
        assert deviation.approx_kl < 1e-8
        assert deviation.clip_fraction == 0.0
        assert learner.step == 8


@every_model
def test_scored_from_a_padded_batch_it_is_one_as_well(model_name: str) -> None:
    batch = packed_batch()
    model = MODELS[model_name]()
    old_logprobs = padded_logprobs(copy.deepcopy(model).eval(), batch, 0.8)
    learner = Learner(PolicyModel(model), LearnerConfig(lr=0.0, max_tokens_per_microbatch=10))
    deviation = train(learner, batch, old_logprobs, temperature=0.8)
    assert deviation.ratio < 1e-4
    assert deviation.approx_kl < 1e-8
    assert deviation.clip_fraction == 0.0


NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_computed_in_bfloat16_it_is_one_but_for_rounding(device: str) -> None:
    """With the kernels for packed sequences of the device, scored in other micro-batches than trained."""
    batch = packed_batch().to(device)
    policy = PolicyModel(
        tiny_model(initializer_range=0.1, hidden_size=64, head_dim=16).to(device), autocast=torch.bfloat16
    )
    scorer = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=23))
    old_logprobs = scorer.infer(batch, lambda part: policy(part).logprobs)
    deviation = train(Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=13)), batch, old_logprobs)
    assert deviation.ratio < 0.05
    assert deviation.approx_kl < 1e-3
    assert deviation.clip_fraction == 0.0


@every_model
def test_dropout_while_scoring_shows_in_the_metrics(model_name: str) -> None:
    batch = packed_batch()
    model = MODELS[model_name]()
    scored = copy.deepcopy(model).train()
    scored.set_attn_implementation("eager")
    torch.manual_seed(3)
    noisy = padded_logprobs(scored, batch, 1.0)
    learner = Learner(PolicyModel(model), LearnerConfig(lr=0.0, max_tokens_per_microbatch=10))
    deviation = train(learner, batch, noisy)
    assert deviation.ratio > 0.1
    assert deviation.approx_kl > 1e-3
    assert deviation.clip_fraction > 0.0


def test_scoring_that_is_off_by_one_shows_in_the_metrics() -> None:
    batch = packed_batch()
    policy = PolicyModel(tiny_model())
    learner = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=10))
    deviation = train(learner, batch, learner.infer(batch, lambda part: policy(part).logprobs).roll(1))
    assert deviation.ratio > 0.5
    assert deviation.approx_kl > 0.1
    assert deviation.clip_fraction > 0.1


def test_scoring_at_another_temperature_shows_in_the_metrics() -> None:
    batch = packed_batch()
    policy = PolicyModel(tiny_model())
    learner = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=10))
    old_logprobs = learner.infer(batch, lambda part: policy(part, temperature=0.6).logprobs)
    deviation = train(learner, batch, old_logprobs, temperature=1.0)
    assert deviation.ratio > 0.1
    assert deviation.approx_kl > 1e-3


def test_an_update_moves_it() -> None:
    """With a learning rate the same run leaves 1: the metrics above are not blind."""
    batch = packed_batch()
    policy = PolicyModel(tiny_model())
    learner = Learner(policy, LearnerConfig(lr=1e-2, max_tokens_per_microbatch=10))
    old_logprobs = learner.infer(batch, lambda part: policy(part).logprobs)
    assert train(learner, batch, old_logprobs).ratio > 1e-2
