import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from drivetrain_algorithms import KLDirection, aggregate, full_vocabulary_kl, kl_estimate, value_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import profile

DIRECTIONS: list[KLDirection] = ["reverse", "forward", "jensen_shannon"]
LOG = math.log


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(logits: Tensor, ref_logits: Tensor, mask: Tensor, direction: KLDirection, temperature: float = 1.0) -> Tensor:
    """The definition, whole and with torch's own gradient."""
    p, q = (logits / temperature).softmax(-1), (ref_logits / temperature).softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    m = 0.5 * (p + q)
    divergence = {"reverse": kl(p, q), "forward": kl(q, p), "jensen_shannon": 0.5 * (kl(p, m) + kl(q, m))}[direction]
    return torch.where(mask, divergence, 0.0)


@pytest.mark.parametrize(
    ("direction", "expected"),
    [
        # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), m = (3/8, 1/4, 3/8)
        ("reverse", 0.5 * LOG(2) + 0.25 * LOG(1) + 0.25 * LOG(0.5)),
        ("forward", 0.25 * LOG(0.5) + 0.25 * LOG(1) + 0.5 * LOG(2)),
        ("jensen_shannon", 0.5 * LOG(0.5 / 0.375) + 0.25 * LOG(0.25 / 0.375)),
    ],
)
def test_divergences_by_hand(direction: KLDirection, expected: float) -> None:
    p, q = logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.25, 0.5)
    # logits are known up to a constant only
    assert full_vocabulary_kl(p + 7.0, q - 3.0, ones(1), direction=direction).item() == pytest.approx(expected)


def test_gradients_by_hand() -> None:
    p, q = logits_of(0.5, 0.5).requires_grad_(), logits_of(0.25, 0.75)
    kl = 0.5 * LOG(2) + 0.5 * LOG(2 / 3)
    (reverse,) = torch.autograd.grad(full_vocabulary_kl(p, q, ones(1)).sum(), p)
    assert reverse[0].tolist() == pytest.approx([0.5 * (LOG(2) - kl), 0.5 * (LOG(2 / 3) - kl)])
    (forward,) = torch.autograd.grad(full_vocabulary_kl(p, q, ones(1), direction="forward").sum(), p)
    assert forward[0].tolist() == pytest.approx([0.5 - 0.25, 0.5 - 0.75])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("chunk_size", [1, 3, 5, 7, 100, None])
def test_it_is_the_definition_whatever_the_chunks(
    direction: KLDirection, temperature: float, chunk_size: int | None
) -> None:
    logits, ref_logits = random(3, 5, 11).requires_grad_(), random(3, 5, 11, seed=1)
    mask, weight = random(3, 5, seed=2) > -1.0, random(3, 5, seed=3)
    expected = plain(logits, ref_logits, mask, direction, temperature)
    result = full_vocabulary_kl(
        logits, ref_logits, mask, direction=direction, temperature=temperature, chunk_size=chunk_size
    )
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad((weight * result).sum(), logits), torch.autograd.grad((weight * expected).sum(), logits)
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_gradients_in_float64_for_any_shape(direction: KLDirection, shape: tuple[int, ...]) -> None:
    logits, ref_logits = random(*shape, 6).requires_grad_(), random(*shape, 6, seed=1)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3

    def loss(x: Tensor) -> Tensor:
        return full_vocabulary_kl(x, ref_logits, mask, direction=direction, temperature=1.3, chunk_size=2)

    assert loss(logits).shape == shape
    assert torch.autograd.gradcheck(loss, logits)


def test_what_is_not_contiguous_gives_the_same() -> None:
    whole, ref_whole = random(3, 6, 11), random(3, 6, 11, seed=1)
    logits = whole[:, :-1].transpose(0, 1).requires_grad_()
    ref_logits = ref_whole[:, :-1].transpose(0, 1)
    mask = ones(5, 3)
    copy = logits.detach().contiguous().requires_grad_()
    result, expected = (
        full_vocabulary_kl(logits, ref_logits, mask, chunk_size=2),
        full_vocabulary_kl(copy, ref_logits, mask),
    )
    assert torch.equal(result, expected)
    assert torch.equal(*torch.autograd.grad(result.sum(), logits), *torch.autograd.grad(expected.sum(), copy))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_policies_give_exactly_nothing(direction: KLDirection) -> None:
    logits = random(50, 33, dtype=torch.float32).requires_grad_()
    result = full_vocabulary_kl(logits, logits.detach().clone(), ones(50), direction=direction)
    result.sum().backward()
    assert logits.grad is not None
    assert not result.any()
    assert not logits.grad.any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rounding_takes_no_divergence_below_zero(direction: KLDirection) -> None:
    logits = random(400, 33, dtype=torch.float32)
    almost = logits + 1e-5 * random(400, 33, seed=1, dtype=torch.float32)
    result = full_vocabulary_kl(logits, almost, ones(400), direction=direction)
    assert (result >= 0).all()
    assert result.max() < 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_slots_give_exactly_zero_value_and_gradient(direction: KLDirection, garbage: float) -> None:
    mask = torch.tensor([False, True])
    expected = full_vocabulary_kl(random(2, 4), random(2, 4, seed=1), mask, direction=direction)
    for position in range(2):
        inputs = [random(2, 4), random(2, 4, seed=1)]
        inputs[position][0] = garbage
        logits = inputs[0].requires_grad_()
        result = full_vocabulary_kl(*inputs, mask, direction=direction)
        # what weighs a masked slot may be anything too
        result.backward(torch.tensor([garbage, 1.0], dtype=torch.float64))
        assert result.tolist() == expected.tolist()
        assert result[0].item() == 0.0
        assert logits.grad is not None
        assert logits.grad[0].tolist() == [0.0] * 4
        assert logits.grad[1].all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_token_that_neither_can_say_is_as_if_it_were_not_there(direction: KLDirection) -> None:
    logits, ref_logits = random(3, 5).requires_grad_(), random(3, 5, seed=1)
    never = torch.full((3, 1), -math.inf, dtype=torch.float64)
    expected = full_vocabulary_kl(logits, ref_logits, ones(3), direction=direction)
    longer = torch.cat((logits.detach(), never), -1).requires_grad_()
    result = full_vocabulary_kl(longer, torch.cat((ref_logits, never), -1), ones(3), direction=direction)
    torch.testing.assert_close(result, expected)
    (gradient,) = torch.autograd.grad(result.sum(), longer)
    torch.testing.assert_close(gradient[:, :-1], *torch.autograd.grad(expected.sum(), logits))
    assert gradient[:, -1].tolist() == [0.0] * 3


def test_a_token_that_only_one_can_say() -> None:
    both, first = logits_of(0.5, 0.5), logits_of(1.0, 0.0)
    assert full_vocabulary_kl(both, first, ones(1)).item() == math.inf
    assert full_vocabulary_kl(first, both, ones(1)).item() == pytest.approx(LOG(2))
    assert full_vocabulary_kl(first, both, ones(1), direction="forward").item() == math.inf
    assert full_vocabulary_kl(both, first, ones(1), direction="forward").item() == pytest.approx(LOG(2))
    # m = (3/4, 1/4)
    halfway = 0.25 * LOG(0.5 / 0.75) + 0.25 * LOG(0.5 / 0.25) + 0.5 * LOG(1 / 0.75)
    apart = full_vocabulary_kl(first, logits_of(0.0, 1.0), ones(1), direction="jensen_shannon")
    assert apart.item() == pytest.approx(LOG(2))
    for pair in ((both, first), (first, both)):
        logits = pair[0].clone().requires_grad_()
        result = full_vocabulary_kl(logits, pair[1], ones(1), direction="jensen_shannon")
        assert result.item() == pytest.approx(halfway)
        assert torch.autograd.grad(result.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_policies_a_world_apart_stay_numbers(direction: KLDirection) -> None:
    logits, ref_logits = torch.tensor([[500.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 500.0]])
    result = full_vocabulary_kl(logits, ref_logits, ones(1), direction=direction)
    result.sum().backward()
    assert result.item() == pytest.approx(LOG(2) if direction == "jensen_shannon" else 500.0)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unmasked_nan_and_inf_show_in_their_own_slot(direction: KLDirection, bad: float) -> None:
    for position in range(2):
        inputs = [random(3, 4), random(3, 4, seed=1)]
        inputs[position][1, 2] = bad
        result = full_vocabulary_kl(*inputs, ones(3), direction=direction)
        assert result.isnan().tolist() == [False, True, False]


def test_it_is_what_the_estimators_estimate() -> None:
    logits, ref_logits = random(1, 4), random(1, 4, seed=1)
    logprobs, ref_logprobs = logits.log_softmax(-1)[0], ref_logits.log_softmax(-1)[0]
    estimate = (logprobs.exp() * kl_estimate(logprobs, ref_logprobs, ones(4), kind="k1")).sum()
    assert full_vocabulary_kl(logits, ref_logits, ones(1)).item() == pytest.approx(estimate.item())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_descending_it_brings_the_policy_to_the_reference(direction: KLDirection) -> None:
    logits, reference = 0.5 * random(1, 4), 0.5 * random(1, 4, seed=1)
    divergences = []
    for _ in range(100):
        logits = logits.detach().requires_grad_()
        divergence = full_vocabulary_kl(logits, reference, ones(1), direction=direction)
        divergences.append(divergence.item())
        logits = logits - torch.autograd.grad(divergence.sum(), logits)[0]
    assert all(after < max(before, 1e-12) for before, after in pairwise(divergences))
    assert divergences[-1] < 0.1 * divergences[0]


def test_packed_permuted_and_split_batches_give_the_same() -> None:
    lengths = [3, 0, 5, 1]
    padded, ref_padded = random(4, 5, 7), random(4, 5, 7, seed=1)
    there = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    mask = there & (random(4, 5, seed=2) > -1.0)
    result = full_vocabulary_kl(padded, ref_padded, mask, chunk_size=4)
    packed = full_vocabulary_kl(padded[there], ref_padded[there], mask[there], chunk_size=3)
    assert packed.tolist() == result[there].tolist()
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(full_vocabulary_kl(padded[order], ref_padded[order], mask[order]), result[order])
    parts = [full_vocabulary_kl(padded[i], ref_padded[i], mask[i]) for i in range(4)]
    sums = [
        aggregate(x.unsqueeze(0), m.unsqueeze(0), mode="token_sum", denominator=1)
        for x, m in zip(parts, mask, strict=True)
    ]
    assert sum(sums).item() == pytest.approx(aggregate(result, mask, mode="token_sum", denominator=1).item())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_is_computed_in_float32(direction: KLDirection) -> None:
    logits, ref_logits = random(9, 65).bfloat16().requires_grad_(), random(9, 65, seed=1).bfloat16()
    result = full_vocabulary_kl(logits, ref_logits, ones(9), direction=direction, chunk_size=4)
    assert result.dtype is torch.float32
    exact = plain(logits.detach().double(), ref_logits.double(), ones(9), direction)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    assert gradient.dtype is torch.bfloat16


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that was allocated at once, over what was there before."""
    with profile(profile_memory=True) as record:
        kept = function()
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = total = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    del kept
    return peak


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_more_than_a_few_chunks_exist_at_once(direction: KLDirection) -> None:
    slots, vocabulary, chunk = 120, 2000, 4
    logits, ref_logits = torch.randn(slots, vocabulary, requires_grad=True), torch.randn(slots, vocabulary)
    kept: list[Tensor] = []
    results: list[Tensor] = []

    def forward() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            results.append(full_vocabulary_kl(logits, ref_logits, ones(slots), direction=direction, chunk_size=chunk))

    per_array, small = 4 * chunk * vocabulary, 16 * slots
    assert peak_bytes(forward) < 5 * per_array + small
    # nothing of the size of the logits is kept, but the arguments themselves
    assert {x.data_ptr() for x in kept if x.numel() > slots} <= {logits.data_ptr(), ref_logits.data_ptr()}
    gradient = 4 * slots * vocabulary
    backward = peak_bytes(lambda: torch.autograd.grad(results[0].sum(), logits))
    assert gradient <= backward < gradient + 5 * per_array + small


def test_the_operators_are_registered_as_torch_asks() -> None:
    for direction in DIRECTIONS:
        arguments = (random(3, 4), random(3, 4, seed=1), random(3, seed=2) > -1.0, direction, 0.7, 2)
        operators = torch.ops.drivetrain_algorithms
        torch.library.opcheck(operators.divergence_gradient.default, (random(3, seed=3), *arguments))
        torch.library.opcheck(operators.divergence.default, (arguments[0].requires_grad_(), *arguments[1:]))


def test_only_the_policy_has_a_gradient() -> None:
    logits, ref_logits = random(2, 4).requires_grad_(), random(2, 4, seed=1).requires_grad_()
    full_vocabulary_kl(logits, ref_logits, ones(2)).sum().backward()
    assert ref_logits.grad is None
    assert not full_vocabulary_kl(logits.detach(), ref_logits, ones(2)).requires_grad


def test_a_batch_of_nothing_but_masked_slots_gives_zero() -> None:
    logits = torch.full((2, 3, 4), math.nan, requires_grad=True)
    mask = ~ones(2, 3)
    result = full_vocabulary_kl(logits, torch.full((2, 3, 4), math.nan), mask)
    aggregate(result, mask, mode="token_mean", denominator=0.0).backward()
    assert logits.grad is not None
    assert not result.any()
    assert not logits.grad.any()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 9),
    scale=st.floats(0.0, 30.0),
    temperature=st.floats(0.1, 5.0),
    chunk_size=st.integers(1, 8),
)
def test_properties(seed: int, vocabulary: int, scale: float, temperature: float, chunk_size: int) -> None:
    logits, ref_logits = scale * random(5, vocabulary, seed=seed), scale * random(5, vocabulary, seed=seed + 1)
    mask = random(5, seed=seed + 2) > -1.0

    def divergence(a: Tensor, b: Tensor, direction: KLDirection) -> Tensor:
        return full_vocabulary_kl(a, b, mask, direction=direction, temperature=temperature, chunk_size=chunk_size)

    reverse, forward = divergence(logits, ref_logits, "reverse"), divergence(logits, ref_logits, "forward")
    halfway = divergence(logits, ref_logits, "jensen_shannon")
    assert (torch.stack((reverse, forward, halfway)) >= 0).all()
    assert (halfway <= LOG(2) * (1 + 1e-12)).all()
    assert (halfway <= 0.25 * (reverse + forward) + 1e-12).all()
    torch.testing.assert_close(divergence(ref_logits, logits, "forward"), reverse)
    torch.testing.assert_close(divergence(ref_logits, logits, "jensen_shannon"), halfway)
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(divergence(logits[:, order], ref_logits[:, order], "reverse"), reverse)
    logits.requires_grad_()
    for direction in DIRECTIONS:
        (gradient,) = torch.autograd.grad(divergence(logits, ref_logits, direction).sum(), logits)
        # a constant added to all logits changes nothing
        assert gradient.sum(-1).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "sideways"}, r"direction='sideways'.*reverse, forward, jensen_shannon"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"mask": torch.ones(3)}, r"mask has dtype torch\.float32"),
        ({"mask": ones(2)}, r"logits has shape \(3, 4\) and mask \(2,\)"),
        ({"ref_logits": torch.zeros(3)}, r"ref_logits has shape \(3,\)"),
        ({"ref_logits": torch.zeros(3, 5)}, "ref_logits has a vocabulary of 5 and logits of 4"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"logits": torch.zeros(3, 4), "ref_logits": torch.zeros(3, 4), "mask": ones(3)}
    with pytest.raises(ValueError, match=message):
        full_vocabulary_kl(**(arguments | change))  # type: ignore[arg-type]


def test_value_checks_name_the_slot() -> None:
    logits, fine = random(2, 3, 4), random(2, 3, 4)
    fine[..., 0] = -math.inf
    with value_checks():
        full_vocabulary_kl(fine, fine, ones(2, 3))
        for bad in (math.nan, math.inf):
            logits[1, 2, 0] = bad
            with pytest.raises(ValueError, match=f"ref_logits is {bad} at token 2 of sequence 1"):
                full_vocabulary_kl(fine, logits, ones(2, 3))


@pytest.mark.parametrize(("direction", "chunk_size"), [("reverse", None), ("forward", 4), ("jensen_shannon", 4)])
def test_it_compiles_whole_for_any_number_of_slots(direction: KLDirection, chunk_size: int | None) -> None:
    def loss(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
        divergence = full_vocabulary_kl(2.0 * logits, ref_logits, mask, direction=direction, chunk_size=chunk_size)
        return divergence.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for slots, vocabulary in ((3, 7), (9, 8), (10, 9), (21, 10)):  # one to six chunks
        ref_logits, mask = random(slots, vocabulary, seed=1), random(slots, seed=2) > -1.0
        results = []
        for function in (loss, compiled):
            logits = random(slots, vocabulary).requires_grad_()
            result = function(logits, ref_logits, mask)
            results.append((result, *torch.autograd.grad(result, logits)))
        torch.testing.assert_close(results[1], results[0])


def test_jensen_shannon_of_distributions_far_apart() -> None:
    logits, ref_logits = torch.tensor([[-95.0, 0.0, 0.0, 0.0]]), torch.tensor([[50.0, 0.0, 0.0, 0.0]])
    divergence = full_vocabulary_kl(logits, ref_logits, torch.tensor([True]), direction="jensen_shannon")
    assert divergence.item() == pytest.approx(math.log(2), rel=1e-5)
