import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_learner import PackedBatch, PolicyModel, ValueModel, load_model
from torch import Tensor

Make = Callable[..., Any]


def everything(sequences: list[list[int]]) -> PackedBatch:
    return PackedBatch.pack(sequences, [[True] * len(ids) for ids in sequences])


def reference(model: Any, sequences: list[list[int]], temperature: float = 1.0) -> Tensor:
    """Log-probs from the whole logits of a model that attends as transformers does, one sequence at a time."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    rows = []
    for ids in sequences:
        log_p = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
        rows.append(log_p.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(rows)


def test_packed_equals_one_by_one_in_any_order(make_llama: Make, make_sequences: Make) -> None:
    sequences = make_sequences(9, 2, 30, 5)
    model = make_llama()
    policy = PolicyModel(model)
    expected = reference(model, sequences, temperature=0.6)
    batch = everything(sequences)
    torch.testing.assert_close(policy(batch, temperature=0.6).logprobs, expected, rtol=1e-5, atol=1e-5)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1], [1], [2]):
        part = batch.select(order)
        torch.testing.assert_close(policy(part, temperature=0.6).logprobs, expected[part.tokens], rtol=1e-5, atol=1e-5)


def test_a_neighbour_changes_nothing(make_llama: Make, make_sequences: Make) -> None:
    sequences = make_sequences(9, 12, 7)
    policy = PolicyModel(make_llama())
    before = policy(everything(sequences)).logprobs
    changed = [sequences[0], [(token + 1) % 23 for token in sequences[1]], sequences[2]]
    after = policy(everything(changed)).logprobs
    kept = torch.cat([torch.arange(8), torch.arange(19, 25)])
    assert torch.equal(before[kept], after[kept])
    assert not torch.equal(before[8:19], after[8:19])


def test_a_neighbour_of_nan_poisons_nothing(make_llama: Make) -> None:
    model = make_llama()
    policy = PolicyModel(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[22] = float("nan")
    batch = everything([[1, 2, 3, 4], [22, 22, 22, 22, 22, 22], [5, 6]])
    logprobs = policy(batch).logprobs
    assert logprobs[[0, 1, 2, 8]].isfinite().all()
    (gradient,) = torch.autograd.grad(logprobs[[0, 1, 2, 8]].sum(), model.get_input_embeddings().weight)
    assert gradient[:22].isfinite().all()


def test_gradients_equal_those_of_whole_logits(make_llama: Make, make_sequences: Make) -> None:
    sequences = make_sequences(9, 2, 15)
    model = make_llama()
    slope = torch.linspace(-1, 1, 23)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    rows = []
    for ids in sequences:
        log_p = plain(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        rows.append(log_p.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    (torch.cat(rows) * slope).sum().backward()
    (PolicyModel(model)(everything(sequences)).logprobs * slope).sum().backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_masked_slots_are_exactly_zero(make_llama: Make, make_sequences: Make) -> None:
    (ids,) = make_sequences(8)
    policy = PolicyModel(make_llama())
    all_slots = policy(everything([ids]), entropy=True)
    batch = PackedBatch.pack([ids], [[index >= 5 for index in range(8)]])
    result = policy(batch, entropy=True)
    assert result.logprobs[:4].tolist() == [0.0] * 4
    assert result.entropy[:4].tolist() == [0.0] * 4
    torch.testing.assert_close(result.logprobs[4:], all_slots.logprobs[4:])
    torch.testing.assert_close(result.entropy[4:], all_slots.entropy[4:])


@pytest.mark.parametrize("token_ids", [[], [[3]], [[], [3]]])
def test_nothing_to_predict(make_llama: Make, token_ids: list[list[int]]) -> None:
    policy = PolicyModel(make_llama())
    logprobs = policy(everything(token_ids)).logprobs
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in policy.parameters())
    assert ValueModel(policy.model)(everything(token_ids)).shape == (0,)


def test_dropout_in_the_configuration_is_off(make_llama: Make, make_sequences: Make) -> None:
    batch = everything(make_sequences(9, 4))
    policy = PolicyModel(make_llama(attention_dropout=0.5)).train()
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


def test_sliding_windows_are_kept(make_sequences: Make) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, initializer_range=0.3,
    )  # fmt: skip
    sequences = make_sequences(12, 3, 6)
    model = MistralForCausalLM(config)
    expected = reference(model, sequences)
    got = PolicyModel(model)(everything(sequences)).logprobs
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_other_features_are_refused(make_llama: Make, make_sequences: Make) -> None:
    model = make_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping=30"):
        PolicyModel(model)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_distribution(make_llama: Make, make_sequences: Make, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        PolicyModel(make_llama())(everything(make_sequences(4)), temperature=temperature)


def test_activation_checkpointing_changes_no_gradient(make_llama: Make, make_sequences: Make) -> None:
    batch = everything(make_sequences(9, 4, 13))
    gradients = []
    for checkpointing in (False, True):
        model = make_llama().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        PolicyModel(model)(batch).logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_autocast_computes_in_bf16_and_leaves_fp32_gradients(make_llama: Make, make_sequences: Make) -> None:
    batch = everything(make_sequences(9, 4))
    model = make_llama()
    exact = PolicyModel(model)(batch).logprobs
    logprobs = PolicyModel(model, autocast=torch.bfloat16)(batch).logprobs
    assert logprobs.dtype == torch.float32
    assert not torch.equal(logprobs, exact)
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=0.15)
    logprobs.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_critic_starts_at_zero_with_the_policys_backbone(make_llama: Make, make_sequences: Make) -> None:
    policy = PolicyModel(make_llama())
    critic = ValueModel.from_policy(policy)
    batch = everything(make_sequences(6, 4))
    values = critic(batch)
    assert values.shape == (8,)
    assert values.dtype == torch.float32
    assert values.abs().max() == 0
    own, theirs = critic.backbone.embed_tokens.weight, policy.model.model.embed_tokens.weight
    assert torch.equal(own, theirs)
    assert own.data_ptr() != theirs.data_ptr()
    # The head learns first: its gradient is the sum of the hidden states.
    values.sum().backward()
    assert critic.head.weight.grad.abs().min() > 0
    assert critic.head.bias.grad.item() == 8.0


def test_values_look_only_at_the_past(make_llama: Make) -> None:
    critic = ValueModel.from_policy(PolicyModel(make_llama()))
    torch.nn.init.ones_(critic.head.weight)
    values, changed = critic(everything([[1, 2, 3, 4, 5]])), critic(everything([[1, 2, 3, 9, 5]]))
    assert torch.equal(values[:3], changed[:3])
    assert values[3] != changed[3]


def test_load_model_reads_a_folder(tmp_path: Path, make_llama: Make, make_sequences: Make) -> None:
    model = make_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    batch = everything(make_sequences(7, 3))
    assert torch.equal(PolicyModel(loaded)(batch).logprobs, PolicyModel(model)(batch).logprobs)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert {p.dtype for p in load_model(str(tmp_path), dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_generate_still_works(make_llama: Make) -> None:
    model = make_llama(eos_token_id=None, pad_token_id=0)
    prompts = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(prompts, **settings)
    assert torch.equal(PolicyModel(model).model.generate(prompts, **settings), plain)
