import math

import pytest
import torch
from drivetrain_algorithms import gae, returns_to_go, value_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan


def bools(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows).bool()


def random_batch(num_sequences: int, length: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_sequences, length, dtype=torch.float64, generator=generator)
    values = torch.randn(num_sequences, length, dtype=torch.float64, generator=generator)
    mask = torch.rand(num_sequences, length, generator=generator) > 0.3
    return rewards, values, mask


def gae_token_by_token(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other, on the host."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                delta = float(rewards[row, t]) + gamma * next_value - float(values[row, t])
                next_advantage = delta + gamma * lam * next_advantage
                next_value = float(values[row, t])
                advantages[row, t] = next_advantage
                returns[row, t] = next_advantage + next_value
    return advantages, returns


def test_gae_by_hand() -> None:
    # δ = (1 + .5*2 - 1, 0 + .5*4 - 2, 8 - 4) = (1, 0, 4);  γλ = .25;  Â = (1 + .25*1, 0 + .25*4, 4)
    advantages, returns = gae(
        torch.tensor([[1.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]]), bools([[1, 1, 1]]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [[1.25, 1.0, 4.0]]
    assert returns.tolist() == [[2.25, 3.0, 8.0]]


def test_a_tool_token_is_no_step_and_its_value_does_not_leak() -> None:
    # δ₂ = 1 - .2 = .8;  δ₀ = .9*.2 - .5 = -.32;  Â₀ = -.32 + .72*.8 = .256
    advantages, returns = gae(
        torch.tensor([[0.0, 7.0, 1.0]]), torch.tensor([[0.5, 99.0, 0.2]]), bools([[1, 0, 1]]), gamma=0.9, lam=0.8
    )
    assert advantages[0].tolist() == pytest.approx([0.256, 0.0, 0.8], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.756, 0.0, 1.0], abs=1e-6)


def test_returns_to_go_reach_across_a_tool_token() -> None:
    result = returns_to_go(torch.tensor([[0.0, 0.0, 1.0]]), bools([[1, 0, 1]]), gamma=0.5)
    assert result.tolist() == [[0.5, 0.0, 1.0]]


def test_returns_to_go_by_hand() -> None:
    result = returns_to_go(torch.tensor([[1.0, 2.0, 4.0, 9.0]]), bools([[1, 1, 1, 0]]), gamma=0.5)
    assert result.tolist() == [[3.0, 4.0, 4.0, 0.0]]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 33, 64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 0.7), (0.01, 0.5)])
def test_gae_equals_its_definition_at_every_length(length: int, gamma: float, lam: float) -> None:
    rewards, values, mask = random_batch(5, length, seed=length)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected_advantages, expected_returns = gae_token_by_token(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected_advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, expected_returns, rtol=1e-12, atol=1e-12)


def test_lam_one_gives_the_return_minus_the_value() -> None:
    rewards, values, mask = random_batch(4, 19)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    monte_carlo = returns_to_go(rewards, mask, gamma=0.9)
    torch.testing.assert_close(returns, monte_carlo, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, (monte_carlo - values) * mask, rtol=1e-12, atol=1e-12)


def test_lam_zero_gives_the_td_error() -> None:
    advantages, _ = gae(
        torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]]), bools([[1, 1, 1]]), gamma=0.5, lam=0.0
    )
    assert advantages.tolist() == [[1.0, -3.0, -27.0]]


def test_gamma_zero_gives_the_reward_minus_the_value() -> None:
    rewards, values, mask = random_batch(3, 6)
    advantages, returns = gae(rewards, values, mask, gamma=0.0, lam=0.9)
    torch.testing.assert_close(advantages, (rewards - values) * mask)
    torch.testing.assert_close(returns, rewards * mask)


def test_returns_are_advantages_plus_values() -> None:
    rewards, values, mask = random_batch(6, 21)
    advantages, returns = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    torch.testing.assert_close(returns, (advantages + values) * mask, rtol=1e-12, atol=1e-12)


def test_dropping_the_masked_slots_changes_nothing() -> None:
    rewards, values, mask = random_batch(1, 40)
    whole = gae(rewards, values, mask, gamma=0.9, lam=0.8).advantages[mask]
    kept = [x[mask].unsqueeze(0) for x in (rewards, values, mask)]
    torch.testing.assert_close(gae(*kept, gamma=0.9, lam=0.8).advantages[0], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_packed_equals_padded(gamma: float, lam: float) -> None:
    lengths = [5, 0, 1, 8, 0, 3]
    rewards, values, mask = random_batch(len(lengths), 8)
    inside = torch.arange(8) < torch.tensor(lengths).unsqueeze(-1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    padded = gae(rewards, values, mask & inside, gamma=gamma, lam=lam)
    packed = gae(rewards[inside], values[inside], mask[inside], gamma=gamma, lam=lam, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed.advantages, padded.advantages[inside], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed.returns, padded.returns[inside], rtol=1e-12, atol=1e-12)
    to_go = returns_to_go(rewards[inside], mask[inside], gamma=gamma, cu_seqlens=cu_seqlens)
    expected = returns_to_go(rewards, mask & inside, gamma=gamma)[inside]
    torch.testing.assert_close(to_go, expected, rtol=1e-12, atol=1e-12)


def test_padding_and_the_order_of_sequences_do_not_matter() -> None:
    rewards, values, mask = random_batch(4, 10)
    plain = gae(rewards, values, mask, gamma=0.9, lam=0.8).advantages
    order = torch.tensor([2, 0, 3, 1])
    wider = [torch.nn.functional.pad(x[order], (3, 2)) for x in (rewards, values, mask)]
    torch.testing.assert_close(
        gae(*wider, gamma=0.9, lam=0.8).advantages[:, 3:13], plain[order], rtol=1e-12, atol=1e-12
    )


def test_masked_slots_may_hold_nan_and_inf() -> None:
    advantages, returns = gae(
        torch.tensor([[0.0, NAN, 1.0, math.inf]]),
        torch.tensor([[0.5, math.inf, 0.2, NAN]]),
        bools([[1, 0, 1, 0]]),
        gamma=0.9,
        lam=0.8,
    )
    assert advantages[0].tolist() == pytest.approx([0.256, 0.0, 0.8, 0.0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.756, 0.0, 1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_an_unmasked_nan_stays_in_its_own_packed_sequence(lam: float) -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, NAN, 1.0, 1.0])
    advantages, _ = gae(
        rewards,
        torch.zeros(6),
        torch.ones(6, dtype=torch.bool),
        gamma=1.0,
        lam=lam,
        cu_seqlens=torch.tensor([0, 2, 5, 6]),
    )
    assert advantages.isnan().tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4])])
def test_what_is_discounted_to_nothing_carries_no_nan(cu_seqlens: Tensor | None) -> None:
    rewards, every = torch.tensor([1.0, 1.0, NAN, 1.0]), torch.ones(4, dtype=torch.bool)
    values = torch.zeros(4)
    if cu_seqlens is None:
        rewards, values, every = rewards.unsqueeze(0), values.unsqueeze(0), every.unsqueeze(0)
    to_go = returns_to_go(rewards, every, gamma=0.0, cu_seqlens=cu_seqlens)
    assert to_go.flatten().isnan().tolist() == [False, False, True, False]
    advantages, _ = gae(rewards, values, every, gamma=1.0, lam=0.5, cu_seqlens=cu_seqlens)
    assert advantages.flatten().isnan().tolist() == [True, True, True, False]


def test_a_masked_last_slot_does_not_see_the_next_packed_sequence() -> None:
    result = returns_to_go(
        torch.tensor([1.0, 5.0, 7.0]),
        torch.tensor([True, False, True]),
        gamma=0.5,
        cu_seqlens=torch.tensor([0, 2, 3]),
    )
    assert result.tolist() == [1.0, 0.0, 7.0]


def test_empty_batches_and_fully_masked_sequences_give_zeros() -> None:
    advantages, returns = gae(
        torch.full((2, 3), NAN), torch.full((2, 3), NAN), bools([[0, 0, 0], [0, 0, 0]]), gamma=0.9, lam=0.9
    )
    assert advantages.eq(0).all()
    assert returns.eq(0).all()
    for shape in [(0, 4), (3, 0)]:
        empty = torch.zeros(shape)
        assert gae(empty, empty, empty.bool(), gamma=0.9, lam=0.9).returns.shape == shape
    nothing = torch.zeros(0)
    assert (
        gae(nothing, nothing, nothing.bool(), gamma=1.0, lam=1.0, cu_seqlens=torch.tensor([0, 0])).returns.numel() == 0
    )


def test_half_precision_is_computed_in_float32() -> None:
    rewards = torch.full((1, 1000), 0.01, dtype=torch.bfloat16)
    result = returns_to_go(rewards, torch.ones(1, 1000, dtype=torch.bool), gamma=1.0)
    assert result.dtype is torch.float32
    assert result[0, 0].item() == pytest.approx(1000 * rewards[0, 0].item(), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_in_float64(packed: bool) -> None:
    rewards, values, mask = random_batch(2, 7)
    cu_seqlens = None
    if packed:
        rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
        cu_seqlens = torch.tensor([0, 7, 14])
    rewards.requires_grad_()
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda r, v: tuple(gae(r, v, mask, gamma=0.9, lam=0.8, cu_seqlens=cu_seqlens)), (rewards, values)
    )


def test_misfits_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values has shape \(2, 4\)"):
        gae(x, torch.zeros(2, 4), mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        gae(x, x, mask.float(), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        gae(x, x, mask, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match="lam=nan"):
        gae(x, x, mask, gamma=1.0, lam=NAN)
    with pytest.raises(ValueError, match="together with cu_seqlens"):
        gae(x[0], x[0], mask[0], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="packed"):
        gae(x, x, mask, gamma=1.0, lam=1.0, cu_seqlens=torch.tensor([0, 6]))
    for bounds in [[0, 2], [1, 3], [0, 2, 1, 3]]:
        with pytest.raises(ValueError, match="must rise from 0 to the number of slots, 3"):
            gae(x[0], x[0], mask[0], gamma=1.0, lam=1.0, cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match="int32 or int64"):
        gae(x[0], x[0], mask[0], gamma=1.0, lam=1.0, cu_seqlens=torch.tensor([0.0, 3.0]))


# Sequences that were cut off


def test_bootstrapping_by_hand() -> None:
    # γ = λ = .5. First row, V after it 2: δ = (1 + .5*2 - 1, 4 + .5*2 - 2) = (1, 3);  Â = (1 + .25*3, 3)
    # Second row ended: δ = (1 + .5*2 - 1, 4 - 2) = (1, 2);  Â = (1.5, 2)
    rewards, values = torch.tensor([[1.0, NAN, 4.0, NAN]] * 2), torch.tensor([[1.0, NAN, 2.0, NAN]] * 2)
    mask, following = bools([[1, 0, 1, 0]] * 2), torch.tensor([2.0, 0.0])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, bootstrap_values=following)
    assert advantages.tolist() == [[1.75, 0.0, 3.0, 0.0], [1.5, 0.0, 2.0, 0.0]]
    assert returns.tolist() == [[2.75, 0.0, 5.0, 0.0], [2.5, 0.0, 4.0, 0.0]]
    # G = (1 + .5*5, 4 + .5*2) and (1 + .5*4, 4)
    to_go = returns_to_go(rewards, mask, gamma=0.5, bootstrap_values=following)
    assert to_go.tolist() == [[3.5, 0.0, 5.0, 0.0], [3.0, 0.0, 4.0, 0.0]]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 20), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.data())
def test_a_sequence_cut_in_two_gets_what_it_gets_whole(
    seed: int, length: int, gamma: float, lam: float, data: st.DataObject
) -> None:
    rewards, values, mask = random_batch(3, length + 1, seed=seed)
    cut = data.draw(st.integers(0, length))
    mask[:, cut] = True  # the token at which it is cut
    whole = gae(rewards, values, mask, gamma=gamma, lam=lam)
    first = [x[:, :cut] for x in (rewards, values, mask)]
    following = values[:, cut] + lam * whole.advantages[:, cut]
    part = gae(*first, gamma=gamma, lam=lam, bootstrap_values=following)
    torch.testing.assert_close(part.advantages, whole.advantages[:, :cut], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(part.returns, whole.returns[:, :cut], rtol=1e-9, atol=1e-9)
    to_go = returns_to_go(rewards, mask, gamma=gamma)
    part_to_go = returns_to_go(rewards[:, :cut], mask[:, :cut], gamma=gamma, bootstrap_values=to_go[:, cut])
    torch.testing.assert_close(part_to_go, to_go[:, :cut], rtol=1e-9, atol=1e-9)


def test_with_lam_zero_the_first_part_only_needs_the_next_value() -> None:
    rewards, values, mask = random_batch(4, 12)
    mask[:, 7] = True
    whole = gae(rewards, values, mask, gamma=0.9, lam=0.0).advantages[:, :7]
    part = gae(rewards[:, :7], values[:, :7], mask[:, :7], gamma=0.9, lam=0.0, bootstrap_values=values[:, 7]).advantages
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


def test_zeros_bootstrap_nothing() -> None:
    rewards, values, mask = random_batch(4, 12)
    ended = torch.zeros(4)
    for one, other in zip(
        gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap_values=ended),
        gae(rewards, values, mask, gamma=0.9, lam=0.8),
        strict=True,
    ):
        assert torch.equal(one, other)
    to_go = returns_to_go(rewards, mask, gamma=0.9, bootstrap_values=ended)
    assert torch.equal(to_go, returns_to_go(rewards, mask, gamma=0.9))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_packed_equals_padded_at_any_lengths(lengths: list[int], seed: int, gamma: float) -> None:
    rewards, values, mask = random_batch(len(lengths), 9, seed=seed)
    following = rewards.sum(1)
    inside = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    mask &= inside
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    padded = gae(rewards, values, mask, gamma=gamma, lam=0.8, bootstrap_values=following)
    packed = gae(
        rewards[inside],
        values[inside],
        mask[inside],
        gamma=gamma,
        lam=0.8,
        bootstrap_values=following,
        cu_seqlens=cu_seqlens,
    )
    torch.testing.assert_close(packed.advantages, padded.advantages[inside], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed.returns, padded.returns[inside], rtol=1e-12, atol=1e-12)
    expected = returns_to_go(rewards, mask, gamma=gamma, bootstrap_values=following)[inside]
    to_go = returns_to_go(rewards[inside], mask[inside], gamma=gamma, bootstrap_values=following, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(to_go, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 10_000), st.floats(-3.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_gae_is_linear(seed: int, factor: float, gamma: float, lam: float) -> None:
    one, other = (random_batch(3, 17, seed=seed + i)[:2] for i in range(2))
    mask = random_batch(3, 17, seed=seed)[2]
    following = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    combined = gae(
        one[0] + factor * other[0],
        one[1] + factor * other[1],
        mask,
        gamma=gamma,
        lam=lam,
        bootstrap_values=following[0] + factor * following[1],
    )
    parts = [
        gae(*x, mask, gamma=gamma, lam=lam, bootstrap_values=v) for x, v in zip((one, other), following, strict=True)
    ]
    for k in range(2):
        torch.testing.assert_close(combined[k], parts[0][k] + factor * parts[1][k], rtol=1e-9, atol=1e-9)


def test_what_cannot_matter_is_not_read() -> None:
    rewards, values = torch.ones(2, 3), torch.ones(2, 3)
    mask, following = bools([[1, 1, 0], [0, 0, 0]]), torch.tensor([1.0, NAN], requires_grad=True)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, bootstrap_values=following)
    assert advantages[1].eq(0).all()
    (advantages + returns).sum().backward()
    assert following.grad is not None
    # ∂Â/∂V = γ at the last token, γ γλ before it, and the same for the returns.
    assert following.grad.tolist() == [2 * (0.5 + 0.5 * 0.25), 0.0]
    for bad in (NAN, math.inf):
        never = torch.tensor([bad, bad])
        assert gae(rewards, values, mask, gamma=0.0, lam=0.5, bootstrap_values=never).returns.sum() == 2.0
        assert returns_to_go(rewards, mask, gamma=0.0, bootstrap_values=never).sum() == 2.0
    shown = returns_to_go(rewards, mask, gamma=0.5, bootstrap_values=torch.tensor([NAN, NAN]))
    assert shown.isnan().tolist() == mask.tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_returns_and_bootstrap_values_in_float64(packed: bool) -> None:
    rewards, values, mask = random_batch(2, 7)
    following = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    cu_seqlens = None
    if packed:
        rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
        cu_seqlens = torch.tensor([0, 7, 14])
    rewards.requires_grad_()
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda r, v: returns_to_go(r, mask, gamma=0.9, bootstrap_values=v, cu_seqlens=cu_seqlens), (rewards, following)
    )
    assert torch.autograd.gradcheck(lambda r: returns_to_go(r, mask, gamma=0.9, cu_seqlens=cu_seqlens), rewards)
    assert torch.autograd.gradcheck(
        lambda r, v, b: tuple(gae(r, v, mask, gamma=0.9, lam=0.8, bootstrap_values=b, cu_seqlens=cu_seqlens)),
        (rewards, values, following),
    )


def test_masked_garbage_has_a_gradient_of_exactly_zero() -> None:
    rewards = torch.tensor([[1.0, NAN, 2.0, math.inf]], requires_grad=True)
    values = torch.tensor([[1.0, -math.inf, 2.0, NAN]], requires_grad=True)
    mask = bools([[1, 0, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    (advantages.sum() + returns.sum() + returns_to_go(rewards, mask, gamma=0.5).sum()).backward()
    for x in (rewards, values):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[~mask].eq(0).all()
    # The first reward counts once in Â, R and G; the last one 1 + γλ, 1 + γλ and 1 + γ times: 1.25 + 1.25 + 1.5.
    assert rewards.grad.tolist() == [[3.0, 0.0, 4.0, 0.0]]  # type: ignore[union-attr]


def test_mixed_precisions_take_the_wider() -> None:
    rewards, values, mask = random_batch(2, 5)
    expected = gae(rewards, values.float().double(), mask, gamma=0.9, lam=0.8).advantages
    result = gae(rewards, values.float(), mask, gamma=0.9, lam=0.8, bootstrap_values=torch.zeros(2)).advantages
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_misfits_of_bootstrap_values_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in (torch.zeros(3), torch.zeros(2, 3), torch.zeros(())):
        with pytest.raises(ValueError, match=r"bootstrap_values has shape .*; pass one per sequence, \[2\]"):
            gae(x, x, mask, gamma=1.0, lam=1.0, bootstrap_values=bad)
        with pytest.raises(ValueError, match=r"bootstrap_values has shape .*; pass one per sequence, \[2\]"):
            returns_to_go(x, mask, gamma=1.0, bootstrap_values=bad)
    with value_checks(), pytest.raises(ValueError, match="bootstrap_values is nan at index 1"):
        gae(x, x, mask, gamma=1.0, lam=1.0, bootstrap_values=torch.tensor([0.0, NAN]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_one_graph(packed: bool, bootstrapped: bool) -> None:
    rewards, values, mask = random_batch(3, 21)
    cu_seqlens = None
    if packed:
        rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
        cu_seqlens = torch.tensor([0, 30, 30, 63])
    following = torch.tensor([1.0, 2.0, 0.0]) if bootstrapped else None

    def f(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        keywords = {"bootstrap_values": following, "cu_seqlens": cu_seqlens}
        to_go = returns_to_go(rewards, mask, gamma=0.9, **keywords)
        return *gae(rewards, values, mask, gamma=0.9, lam=0.8, **keywords), to_go

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(rewards, values, mask), f(rewards, values, mask), rtol=1e-12, atol=1e-12)


def test_one_graph_with_gradients() -> None:
    rewards, _, mask = random_batch(3, 21)
    compiled = torch.compile(returns_to_go, fullgraph=True, backend="aot_eager", dynamic=False)
    gradients = []
    for function in (compiled, returns_to_go):
        leaf = rewards.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf, mask, gamma=0.9).square().sum(), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_decay_too_small_for_its_dtype_is_no_reset() -> None:
    rewards = torch.zeros(2048)
    rewards[-1] = math.nan
    returns = returns_to_go(rewards, torch.ones(2048, dtype=torch.bool), gamma=1e-3, cu_seqlens=torch.tensor([0, 2048]))
    assert returns.isnan().all()
