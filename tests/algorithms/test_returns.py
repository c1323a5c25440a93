import math

import pytest
import torch
from drivetrain_algorithms import gae, returns_to_go
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
