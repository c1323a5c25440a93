import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from drivetrain_learner import Learner, LearnerConfig, LossTerms, PackedBatch, PolicyModel, ValueModel
from torch import Tensor, nn

Make = Callable[..., Any]


class Table(nn.Module):
    """One number for each token id, and a bias: a module whose gradients can be worked out by hand."""

    def __init__(self, size: int = 8, value: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((size,), value))

    def forward(self, batch: PackedBatch) -> Tensor:
        return self.table[batch.labels]


class Recorder:
    """Keeps the gradients an optimizer was given at each step."""

    def __init__(self, learner: Learner) -> None:
        self.gradients: list[list[Tensor]] = []
        learner.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._keep(learner))

    def _keep(self, learner: Learner) -> None:
        self.gradients.append([p.grad.clone() for p in learner.module.parameters() if p.grad is not None])


def everything(sequences: list[list[int]]) -> PackedBatch:
    return PackedBatch.pack(sequences, [[index > 0 for index in range(len(ids))] for ids in sequences])


def token_mean(module: Callable[[PackedBatch], Tensor], denominator: float) -> Callable[[PackedBatch], LossTerms]:
    def loss(batch: PackedBatch) -> LossTerms:
        values = module(batch)[batch.loss_mask]
        return LossTerms(loss=values.sum() / denominator, metrics={"count": torch.tensor(float(values.numel()))})

    return loss


def test_token_mean_of_two_micro_batches_is_not_a_mean_of_means() -> None:
    """100 tokens of loss 0.5 and 900 of 0.3: 0.32 in one micro-batch and in two (a mean of means gives 0.40)."""
    batch = everything([[0] + [1] * 100, [0] + [2] * 900])
    for limit in (1000, 900):
        module = Table()
        with torch.no_grad():
            module.table[1], module.table[2] = 0.5, 0.3
        learner = Learner(module, LearnerConfig(lr=0.0, max_tokens_per_microbatch=limit))
        recorder = Recorder(learner)
        result = learner.update(batch, token_mean(module, 1000.0))
        assert result.loss == pytest.approx(0.32, abs=1e-7)
        assert result.metrics == {"count": 1000.0}
        assert recorder.gradients[0][0].tolist() == pytest.approx([0, 0.1, 0.9, 0, 0, 0, 0, 0], rel=1e-4)
        assert result.grad_norm == pytest.approx(math.sqrt(0.82), rel=1e-4)


@pytest.mark.parametrize("limit", [400, 60, 50, 7])
def test_gradients_do_not_depend_on_the_micro_batches(make_llama: Make, make_sequences: Make, limit: int) -> None:
    sequences = make_sequences(2, 4, 51, 130, 3, 9)

    def run(max_tokens: int) -> tuple[list[Tensor], list[float]]:
        policy = PolicyModel(make_llama())
        learner = Learner(policy, LearnerConfig(lr=1e-3, max_tokens_per_microbatch=max_tokens))
        recorder = Recorder(learner)
        batch = everything(sequences)
        denominator = float(batch.loss_mask.sum())

        def loss(part: PackedBatch) -> LossTerms:
            output = policy(part, entropy=True)
            metrics = {"entropy": output.entropy.sum() / denominator, "sequences": torch.tensor(part.num_sequences)}
            return LossTerms(loss=-output.logprobs.sum() / denominator, metrics=metrics)

        result = learner.update(batch, loss)
        return recorder.gradients[0], [result.loss, result.grad_norm, *result.metrics.values()]

    whole, numbers = run(10_000)
    cut, cut_numbers = run(limit)
    assert cut_numbers == pytest.approx(numbers, rel=1e-5)
    assert numbers[-1] == 6
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_grad_norm_of_ones_is_the_root_of_their_number() -> None:
    module = Table(size=9)
    learner = Learner(module, LearnerConfig(lr=0.1, max_grad_norm=1.5))
    recorder = Recorder(learner)
    result = learner.update(everything([list(range(9)), [1, 0]]), token_mean(module, 1.0))
    assert result.grad_norm == pytest.approx(3.0)
    torch.testing.assert_close(recorder.gradients[0][0], torch.full((9,), 0.5))


def test_below_max_grad_norm_gradients_are_left_bit_equal() -> None:
    module = Table(size=9)
    learner = Learner(module, LearnerConfig(lr=0.1, max_grad_norm=3.1))
    recorder = Recorder(learner)
    learner.update(everything([list(range(9)), [1, 0]]), token_mean(module, 1.0))
    assert recorder.gradients[0][0].tolist() == [1.0] * 9


def test_masters_move_at_a_learning_rate_of_1e_6() -> None:
    module = Table(value=0.02)
    learner = Learner(module, LearnerConfig(lr=1e-6, max_grad_norm=None))
    batch = everything([[0, 1, 2, 3]])
    for _ in range(100):
        learner.update(batch, token_mean(module, 3.0))
    assert module.table[1].item() == pytest.approx(0.02 - 1e-4, rel=1e-4)
    assert module.table[0].item() == pytest.approx(0.02)
    (moments,) = learner.optimizer.state.values()
    assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32


def test_parameters_that_would_swallow_small_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter table is torch.bfloat16.*load the model with dtype"):
        Learner(Table().bfloat16(), LearnerConfig(lr=1e-6))


def test_a_frozen_module_infers_and_does_not_update() -> None:
    module = Table(value=0.5).requires_grad_(False)
    reference = Learner(module, LearnerConfig(lr=1e-6))
    batch = everything([[0, 1, 2], [0, 3]])
    assert reference.infer(batch, module).tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(RuntimeError, match="no parameter with requires_grad"):
        reference.update(batch, token_mean(module, 3.0))


def test_a_micro_batch_without_trainable_tokens_changes_nothing() -> None:
    sequences = [[0, 1, 2], [0, 3, 3], [0, 4, 5]]
    masks = [[False, True, True], [False, False, False], [False, True, True]]
    with_masked = PackedBatch.pack(sequences, masks)
    gradients = []
    for batch in (with_masked, with_masked.select([0, 2])):
        module = Table()
        learner = Learner(module, LearnerConfig(lr=0.1, max_tokens_per_microbatch=2))
        recorder = Recorder(learner)
        learner.update(batch, token_mean(module, 4.0))
        gradients.append(recorder.gradients[0][0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("sequences", [[[0, 1, 2], [3, 4]], [[0]], []])
def test_a_batch_without_trainable_tokens_is_skipped_with_the_reason(sequences: list[list[int]]) -> None:
    module = Table(value=1.0)
    learner = Learner(module, LearnerConfig(lr=0.1, weight_decay=0.5))
    batch = PackedBatch.pack(sequences, [[False] * len(ids) for ids in sequences])
    result = learner.update(batch, token_mean(module, 0.0))
    assert result.skipped == "no slot has loss_mask true"
    assert (result.loss, result.grad_norm, result.metrics, learner.step) == (0.0, 0.0, {}, 0)
    assert module.table.tolist() == [1.0] * 8


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_with_the_reason(poison: float) -> None:
    module = Table(value=1.0)
    learner = Learner(module, LearnerConfig(lr=0.1, max_tokens_per_microbatch=2))
    batch = everything([[0, 1, 2], [0, 3, 4]])
    learner.update(batch, token_mean(module, 4.0))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    factors = iter([1.0, poison])
    result = learner.update(batch, lambda part: LossTerms(loss=module(part).sum() * next(factors)))
    assert result.skipped is not None
    assert result.skipped.startswith("the gradient's norm is")
    assert not math.isfinite(result.grad_norm)
    after = learner.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert learner.step == 1


def test_the_ratio_is_exactly_one_before_the_first_update(make_llama: Make, make_sequences: Make) -> None:
    policy = PolicyModel(make_llama(attention_dropout=0.1))
    batch = everything(make_sequences(4, 9, 13, 2, 30))
    learner = Learner(policy, LearnerConfig(lr=0.0, max_tokens_per_microbatch=16))
    old_logprobs = learner.infer(batch, lambda part: policy(part).logprobs)
    ratios: list[Tensor] = []

    def loss(part: PackedBatch) -> LossTerms:
        ratio = (policy(part).logprobs - old_logprobs[part.tokens]).exp()
        ratios.append(ratio.detach())
        return LossTerms(loss=ratio.sum())

    for _ in range(2):
        learner.update(batch, loss)
        assert torch.cat(ratios).eq(1.0).all()
    # In mini-batches of another order and size only rounding differs.
    for mini_batch in (batch.select([4, 0]), batch.select([1, 3, 2])):
        ratios.clear()
        learner.update(mini_batch, loss)
        assert (torch.cat(ratios) - 1.0).abs().max() < 1e-5


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None
    third: Tensor


def test_infer_joins_in_the_batchs_order() -> None:
    module = Table()
    learner = Learner(module, LearnerConfig(lr=0.1, max_tokens_per_microbatch=3))
    batch = everything([[0, 1, 2, 3], [4, 5], [6, 7, 1, 2], [3, 4]])
    result = learner.infer(batch, lambda part: Pair(part.labels * 10, None, part.lengths))
    assert result.first.tolist() == [10, 20, 30, 50, 70, 10, 20, 40]
    assert result.second is None
    assert result.third.tolist() == [3, 1, 3, 1]
    values = learner.infer(batch, module)
    assert not values.requires_grad
    assert learner.infer(batch.select([]), module).shape == (0,)


def test_reduce_alone_is_the_identity() -> None:
    learner = Learner(Table(), LearnerConfig(lr=0.1))
    assert learner.reduce(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_weight_decay_leaves_vectors_alone() -> None:
    module = nn.Linear(2, 2)
    learner = Learner(module, LearnerConfig(lr=0.1, weight_decay=0.5))
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    zero = torch.zeros((), requires_grad=True)
    learner.update(everything([[0, 1]]), lambda part: LossTerms(loss=zero * 1.0))
    torch.testing.assert_close(module.weight.detach(), weight * 0.95)
    assert torch.equal(module.bias.detach(), bias)


def test_losses_that_cannot_be_trained_on_are_named() -> None:
    module = Table()
    learner = Learner(module, LearnerConfig(lr=0.1, max_tokens_per_microbatch=1))
    batch = everything([[0, 1], [0, 2]])
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        learner.update(batch, lambda part: LossTerms(loss=module(part)))
    with pytest.raises(ValueError, match="requires_grad=False"):
        learner.update(batch, lambda part: LossTerms(loss=torch.tensor(1.0)))
    names = iter(["kl", "ratio"])
    with pytest.raises(ValueError, match=r"metrics are \['ratio'\], before \['kl'\]"):
        learner.update(batch, lambda part: LossTerms(loss=module(part).sum(), metrics={next(names): torch.ones(())}))


def train(learner: Learner, batch: PackedBatch, steps: range) -> list[tuple[float, float, float]]:
    module = learner.module
    numbers = []
    for step in steps:
        part = batch.select([step % 4, (step + 1) % 4])

        def loss(piece: PackedBatch) -> LossTerms:
            output = module(piece)
            values = -output.logprobs if isinstance(module, PolicyModel) else (output - 1.0) ** 2
            return LossTerms(loss=values[piece.loss_mask].mean())

        result = learner.update(part, loss)
        numbers.append((result.loss, result.grad_norm, result.lr))
    return numbers


@pytest.mark.parametrize("critic", [False, True])
def test_five_and_five_steps_are_bit_equal_to_ten(make_llama: Make, make_sequences: Make, critic: bool) -> None:
    config = LearnerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=3, schedule="cosine", total_steps=10)
    batch = everything(make_sequences(6, 9, 4, 7))

    def make(seed: int) -> Learner:
        policy = PolicyModel(make_llama(seed=seed, tie_word_embeddings=True))
        return Learner(ValueModel.from_policy(policy) if critic else policy, config)

    straight = make(seed=0)
    expected = train(straight, batch, range(10))

    first = make(seed=0)
    numbers = train(first, batch, range(5))
    second = make(seed=7)
    second.load_state_dict(first.state_dict())
    assert second.step == 5
    assert numbers + train(second, batch, range(5, 10)) == expected
    for got, want in zip(second.state_dict().items(), straight.state_dict().items(), strict=True):
        assert got[0] == want[0]
        assert torch.equal(got[1], want[1])


def test_state_before_the_first_step_resumes_too() -> None:
    one, other = Learner(Table(value=1.0), LearnerConfig(lr=0.1)), Learner(Table(), LearnerConfig(lr=0.1))
    other.load_state_dict(one.state_dict())
    batch = everything([[0, 1, 2]])
    for learner in (one, other):
        learner.update(batch, token_mean(learner.module, 2.0))
    assert torch.equal(one.module.table, other.module.table)  # type: ignore[arg-type]
    assert sorted(one.state_dict()) == ["exp_avg/table", "exp_avg_sq/table", "model/table", "step"]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    learner = Learner(Table(value=1.0), LearnerConfig(lr=0.1))
    state = learner.state_dict()
    del state["exp_avg/table"]
    state["model/other"] = torch.zeros(1)
    state["model/table"] = torch.zeros(9)
    expected = r"unknown model/other; missing exp_avg/table; model/table is \(9,\), here \(8,\)"
    with pytest.raises(ValueError, match=expected):
        learner.load_state_dict(state)
    assert learner.module.table.tolist() == [1.0] * 8  # type: ignore[union-attr, operator]
