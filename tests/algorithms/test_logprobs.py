import copy
import math
from typing import Any

import pytest
import torch
from drivetrain_algorithms import (
    aggregate,
    logprobs_from_hidden,
    sft_loss,
    token_entropy,
    token_logprobs,
    value_checks,
)
from drivetrain_learner import PackedBatch, PolicyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG = math.log


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ids(*shape: int, below: int, seed: int = 5) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def test_logprobs_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]]).log()
    assert token_logprobs(logits, torch.tensor([1, 0])).tolist() == pytest.approx([LOG(2 / 8), LOG(1 / 3)])
    # at a temperature of 1/2 the probabilities are squared: 4 of 1 + 4 + 25
    assert token_logprobs(logits, torch.tensor([1, 0]), temperature=0.5).tolist() == pytest.approx(
        [LOG(4 / 30), LOG(1 / 3)]
    )
    # and that is no log-probability divided by the temperature
    assert token_logprobs(logits, torch.tensor([1, 0]))[0].item() / 0.5 != pytest.approx(LOG(4 / 30))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    assert token_entropy(logits).tolist() == pytest.approx([1.5 * LOG(2), LOG(3)])
    squared = [4 / 6, 1 / 6, 1 / 6]
    assert token_entropy(logits, temperature=0.5)[0].item() == pytest.approx(-sum(p * LOG(p) for p in squared))


def test_from_hidden_states_by_hand() -> None:
    hidden, weight = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    labels, bias = torch.tensor([0]), torch.tensor([1.0, -1.0])

    def expected(a: float, b: float) -> float:
        return a - LOG(math.exp(a) + math.exp(b))

    assert logprobs_from_hidden(hidden, weight, labels).item() == pytest.approx(expected(2, 3))
    assert logprobs_from_hidden(hidden, weight, labels, bias=bias).item() == pytest.approx(expected(3, 2))
    capped = logprobs_from_hidden(hidden, weight, labels, bias=bias, soft_cap=2.0, temperature=0.5)
    # cap what has its bias, then divide by the temperature
    assert capped.item() == pytest.approx(expected(4 * math.tanh(3 / 2), 4 * math.tanh(2 / 2)))


def test_it_is_torchs_cross_entropy() -> None:
    logits, labels = random(4, 6, 11).requires_grad_(), ids(4, 6, below=11)
    loss = sft_loss(token_logprobs(logits, labels, temperature=0.7), torch.ones(4, 6, dtype=torch.bool))
    expected = torch.nn.functional.cross_entropy((logits / 0.7).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), logits), torch.autograd.grad(expected.sum(), logits), rtol=1e-9, atol=1e-12
    )


def test_the_entropy_is_the_expected_surprise() -> None:
    logits = random(5, 7)
    every = torch.stack([token_logprobs(logits, torch.full((5,), v), temperature=1.3) for v in range(7)], -1)
    torch.testing.assert_close(token_entropy(logits, temperature=1.3), -(every.exp() * every).sum(-1))


def test_a_token_that_cannot_occur() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1])), token_entropy(logits)
    assert logprobs.item() == pytest.approx(-LOG(2))
    assert entropy.item() == pytest.approx(LOG(2))
    assert torch.autograd.grad(logprobs.sum(), logits)[0].tolist() == [[-0.5, 0.5, 0.0]]
    assert torch.autograd.grad(entropy.sum(), logits)[0][0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    assert token_logprobs(logits, torch.tensor([2])).item() == -math.inf
    certain = torch.tensor([[3.0, -math.inf]])
    assert token_entropy(certain).item() == 0.0
    assert token_logprobs(certain, torch.tensor([0])).item() == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_slots_give_exactly_zero_value_and_gradient(garbage: float) -> None:
    mask = torch.tensor([True, False])
    logits, labels = random(2, 5), torch.tensor([3, -100])
    logits[1] = garbage
    logits.requires_grad_()
    for result in (token_logprobs(logits, labels, mask=mask), token_entropy(logits, mask=mask)):
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert result[0].isfinite()
        assert result[0].item() != 0.0
        assert result[1].item() == 0.0
        assert gradient[0].all()
        assert gradient[1].tolist() == [0.0] * 5

    hidden, weight = random(2, 3), random(5, 3, seed=1).requires_grad_()
    hidden[1] = garbage
    hidden.requires_grad_()
    result = logprobs_from_hidden(hidden, weight, labels, soft_cap=3.0, mask=mask)
    by_hidden, by_weight = torch.autograd.grad(result.sum(), (hidden, weight))
    assert result[1].item() == 0.0
    assert by_hidden[1].tolist() == [0.0] * 3
    alone = logprobs_from_hidden(hidden[:1], weight, labels[:1], soft_cap=3.0)
    torch.testing.assert_close(by_weight, *torch.autograd.grad(alone.sum(), weight))


def test_no_label_is_special() -> None:
    for label in (-100, -1, 5):
        with pytest.raises(ValueError, match=f"labels is {label} at slot 0; pass ids from 0 to 4"):
            token_logprobs(random(1, 5), torch.tensor([label]))
    with value_checks():
        masked = token_logprobs(random(1, 5), torch.tensor([-100]), mask=torch.tensor([False]))
    assert masked.tolist() == [0.0]


def test_value_checks_name_the_slot() -> None:
    logits = random(3, 5)
    logits[:, 0] = -math.inf
    with value_checks():
        token_logprobs(logits, torch.ones(3, dtype=torch.int64))
        logits[2, 1] = math.nan
        with pytest.raises(ValueError, match="logits is nan at slot 2"):
            token_entropy(logits)
        logits[2] = -math.inf
        with pytest.raises(ValueError, match="logits is -inf at slot 2"):
            token_entropy(logits)


def test_unmasked_nan_shows_in_its_own_slot() -> None:
    logits = random(3, 5)
    logits[1, 0] = math.nan
    assert token_logprobs(logits, torch.tensor([2, 2, 2])).isnan().tolist() == [False, True, False]
    assert token_entropy(logits).isnan().tolist() == [False, True, False]


def test_gradients_in_float64() -> None:
    logits, labels = random(2, 3, 5).requires_grad_(), ids(2, 3, below=5)
    mask = random(2, 3, seed=1) > -1.0
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, labels, temperature=0.7, mask=mask), logits)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=0.7, mask=mask), logits)
    hidden, weight, bias = (random(*shape, seed=2).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(
        lambda h, w, b: logprobs_from_hidden(h, w, labels, temperature=0.7, soft_cap=2.0, bias=b, mask=mask),
        (hidden, weight, bias),
    )


def test_packed_permuted_and_split_batches_give_the_same() -> None:
    lengths = torch.tensor([3, 0, 5, 1])
    there = torch.arange(5) < lengths.unsqueeze(-1)
    logits, labels, mask = random(4, 5, 7), ids(4, 5, below=7), there & (random(4, 5, seed=2) > -1.0)
    hidden, weight = random(4, 5, 3, seed=3), random(7, 3, seed=4)
    for function in (
        lambda part: token_logprobs(logits[part], labels[part], mask=mask[part]),
        lambda part: token_entropy(logits[part], mask=mask[part]),
        lambda part: logprobs_from_hidden(hidden[part], weight, labels[part], mask=mask[part]),
    ):
        whole = function(slice(None))
        order = torch.tensor([2, 0, 3, 1])
        torch.testing.assert_close(function(there), whole[there])
        torch.testing.assert_close(function(order), whole[order])
        parts = [aggregate(function([i]), mask[[i]], mode="token_sum", denominator=1).item() for i in range(4)]
        assert sum(parts) == pytest.approx(aggregate(whole, mask, mode="token_sum", denominator=1).item())


def test_half_precision_is_computed_in_float32() -> None:
    logits, labels = random(5, 9).bfloat16(), ids(5, below=9)
    assert token_logprobs(logits, labels).dtype is torch.float32
    torch.testing.assert_close(token_logprobs(logits, labels).double(), token_logprobs(logits.double(), labels))
    hidden, weight = random(5, 3).bfloat16(), random(9, 3, seed=1).bfloat16()
    half = logprobs_from_hidden(hidden, weight, labels)
    assert half.dtype is torch.float32
    torch.testing.assert_close(half.double(), logprobs_from_hidden(hidden.double(), weight.double(), labels))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    seed=st.integers(0, 10_000), vocabulary=st.integers(1, 9), temperature=st.floats(0.1, 5.0), shift=st.floats(-9, 9)
)
def test_properties(seed: int, vocabulary: int, temperature: float, shift: float) -> None:
    logits, labels = random(4, vocabulary, seed=seed), ids(4, below=vocabulary, seed=seed)
    logprobs, entropy = (
        token_logprobs(logits, labels, temperature=temperature),
        token_entropy(logits, temperature=temperature),
    )
    assert (logprobs <= 0).all()
    assert ((entropy >= -1e-12) & (entropy <= LOG(vocabulary) + 1e-9)).all()
    # a constant changes nothing, and a temperature is a scale of the logits
    torch.testing.assert_close(token_logprobs(logits + shift, labels, temperature=temperature), logprobs)
    torch.testing.assert_close(token_logprobs(logits / temperature, labels), logprobs)
    torch.testing.assert_close(token_entropy(logits / temperature), entropy)
    every = torch.stack([token_logprobs(logits, torch.full((4,), v)) for v in range(vocabulary)], -1)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    hotter = token_entropy(logits, temperature=1.5 * temperature)
    assert (hotter >= entropy - 1e-9).all()


def tiny_llama(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_learners_fused_logprobs_are_these(dtype: torch.dtype, temperature: float) -> None:
    sequences = [ids(length, below=23, seed=length).tolist() for length in (9, 2, 17, 5)]
    batch = PackedBatch.pack(sequences, [[i % 3 != 2 for i in range(len(x))] for x in sequences])
    model = tiny_llama(dtype)
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("eager")
    fused = PolicyModel(model)(batch, temperature=temperature, entropy=True)

    # one sequence at a time, with all logits: nothing of the learner
    outputs = [whole(torch.tensor([x]), output_hidden_states=True) for x in sequences]
    logits = torch.cat([output.logits[0, :-1] for output in outputs])
    hidden = torch.cat([output.hidden_states[-1][0, :-1] for output in outputs])
    labels, mask = batch.labels, batch.loss_mask
    expected = token_logprobs(logits, labels, temperature=temperature, mask=mask)
    entropy = token_entropy(logits, temperature=temperature, mask=mask)
    from_hidden = logprobs_from_hidden(hidden, whole.lm_head.weight, labels, temperature=temperature, mask=mask)

    assert fused.entropy is not None
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(fused.logprobs, expected, **close)
    torch.testing.assert_close(fused.logprobs, from_hidden, **close)
    torch.testing.assert_close(fused.entropy, entropy, **close)

    weight = random(len(labels), seed=3).to(torch.float32)
    gradients = [
        torch.autograd.grad((weight * (x + 0.3 * e)).sum(), m.lm_head.weight)[0]
        for x, e, m in ((fused.logprobs, fused.entropy, model), (expected, entropy, whole))
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"soft_cap": 0.0}, r"soft_cap=0\.0"),
        ({"soft_cap": math.nan}, "soft_cap=nan"),
        ({"bias": torch.zeros(4)}, r"bias has shape \(4,\)"),
        ({"weight": torch.zeros(3, 5)}, r"hidden has shape \(2, 3\) and weight \(3, 5\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels has shape \(3,\)"),
        ({"labels": torch.zeros(2)}, "labels has shape .2,. and dtype torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask has shape \(3,\)"),
        ({"mask": torch.ones(2)}, "mask has shape .2,. and dtype torch.float32"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        logprobs_from_hidden(**(arguments | change))


def test_a_scalar_has_no_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \(\)"):
        token_entropy(torch.zeros(()))


def test_they_compile_whole() -> None:
    def everything(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        logprobs = logprobs_from_hidden(hidden, weight, labels, temperature=0.7, soft_cap=3.0, mask=mask)
        return (logprobs + token_entropy(hidden @ weight.T, mask=mask)).sum()

    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for slots in (4, 9):
        results = []
        for function in (everything, compiled):
            hidden = random(slots, 3).requires_grad_()
            result = function(hidden, random(7, 3, seed=1), ids(slots, below=7), random(slots, seed=2) > -1.0)
            results.append((result, *torch.autograd.grad(result, hidden)))
        torch.testing.assert_close(results[1], results[0])


def test_a_soft_cap_hides_no_inf() -> None:
    weight = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    hidden, labels = torch.tensor([[math.inf, 1.0]]), torch.tensor([0])
    assert logprobs_from_hidden(hidden, weight, labels, soft_cap=30.0).isnan().all()


def test_autocast_takes_no_digits() -> None:
    hidden, weight = random(4, 64), random(7, 64, seed=1)
    labels = torch.tensor([0, 3, 6, 1])
    expected = logprobs_from_hidden(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(logprobs_from_hidden(hidden, weight, labels), expected, rtol=0.0, atol=0.0)
