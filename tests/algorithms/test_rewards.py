import math

import pytest
import torch
from drivetrain_algorithms import KLKind, kl_estimate, token_rewards, value_checks
from hypothesis import given, settings
from hypothesis import strategies as st


def test_the_score_lands_on_the_last_token_and_kl_is_charged_everywhere() -> None:
    rewards = token_rewards(
        torch.tensor([1.0, -2.0]),
        torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]),
        torch.tensor([[-1.5, -2.0, -2.0], [-1.0, -3.0, -1.0]]),
        torch.tensor([[True, True, True], [True, True, False]]),
        kl_coef=0.5,
    )
    assert rewards.tolist() == [[-0.25, 0.0, 1.5], [0.0, -3.0, 0.0]]


def test_a_response_that_ends_with_a_tool_is_paid_at_the_last_chosen_token() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, math.nan, -math.inf]])
    mask = torch.tensor([[True, True, False, False]])
    assert token_rewards(torch.tensor([1.0]), logprobs, logprobs, mask, kl_coef=0.1).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_other_estimators_are_charged() -> None:
    arguments = (torch.zeros(1), torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    assert token_rewards(*arguments, kl_coef=1.0, kl="k1").item() == 2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="abs").item() == -2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="k2").item() == -2.0
    assert token_rewards(*arguments, kl_coef=1.0, kl="k3").item() == pytest.approx(-(math.exp(2.0) - 1.0 - 2.0))


def test_packed_equals_padded_and_a_sequence_without_tokens_is_not_paid() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 4, 2]
    logprobs, ref_logprobs = torch.randn(2, 4, 5, generator=generator)
    inside = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    mask = inside.clone()
    mask[0, 2] = False
    mask[3] = False
    scores = torch.tensor([1.0, math.nan, 3.0, math.nan])
    cu_seqlens = torch.tensor([0, 3, 3, 7, 9])
    padded = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.3)
    packed = token_rewards(
        scores, logprobs[inside], ref_logprobs[inside], mask[inside], kl_coef=0.3, cu_seqlens=cu_seqlens
    )
    assert torch.equal(packed, padded[inside])
    penalty = 0.3 * torch.where(mask, logprobs - ref_logprobs, 0.0)
    assert (padded + penalty).sum(-1).tolist() == pytest.approx([1.0, 0.0, 3.0, 0.0], abs=1e-6)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(["k1", "abs", "k2", "k3"]), st.integers(0, 99)
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_sequence_is_paid_its_score_less_its_divergence(lengths: list[int], kl: KLKind, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(7) < torch.tensor(lengths).unsqueeze(-1)
    mask = inside & (torch.rand(len(lengths), 7, generator=generator) > 0.3)
    logprobs, ref_logprobs = torch.randn(2, len(lengths), 7, dtype=torch.float64, generator=generator).where(
        mask, torch.nan
    )
    scores = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.2, kl=kl)
    divergence = kl_estimate(logprobs, ref_logprobs, mask, kind=kl).sum(-1)
    torch.testing.assert_close(rewards.sum(-1), torch.where(mask.any(-1), scores, 0.0) - 0.2 * divergence)
    assert rewards[~mask].eq(0).all()
    order = torch.randperm(len(lengths), generator=generator)
    permuted = token_rewards(scores[order], logprobs[order], ref_logprobs[order], mask[order], kl_coef=0.2, kl=kl)
    assert torch.equal(permuted, rewards[order])
    cu_seqlens = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    packed = token_rewards(
        scores, logprobs[inside], ref_logprobs[inside], mask[inside], kl_coef=0.2, kl=kl, cu_seqlens=cu_seqlens
    )
    assert torch.equal(packed, rewards[inside])


def test_rewards_are_constants() -> None:
    scores, logprobs, ref_logprobs = torch.ones(1), torch.tensor([[-3.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    expected = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.5)
    for x in (scores, logprobs, ref_logprobs):
        x.requires_grad_()
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.5)
    assert not rewards.requires_grad
    assert torch.equal(rewards, expected)


def test_a_batch_of_masked_tokens_pays_nothing() -> None:
    garbage = torch.full((2, 3), math.nan)
    rewards = token_rewards(torch.full((2,), math.nan), garbage, garbage, garbage > 0, kl_coef=0.1)
    assert rewards.eq(0).all()


def test_what_is_not_finite_shows_in_its_own_sequence() -> None:
    x, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)
    broken = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]])
    scores = torch.tensor([1.0, 1.0, math.nan])
    rewards = token_rewards(scores, broken, x, mask, kl_coef=0.1)
    assert rewards.isnan().tolist() == [[False, False], [True, False], [False, True]]
    with value_checks():
        with pytest.raises(ValueError, match="logprobs is nan at token 0 of sequence 1"):
            token_rewards(torch.zeros(3), broken, x, mask, kl_coef=0.1)
        with pytest.raises(ValueError, match="scores is nan at index 2"):
            token_rewards(scores, x, x, mask, kl_coef=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed: bool) -> None:
    logprobs, ref_logprobs = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    mask, cu_seqlens = torch.tensor([1, 1, 0, 1, 0, 1]).bool(), torch.tensor([0, 4, 6]) if packed else None
    if not packed:
        logprobs, ref_logprobs, mask = logprobs.view(2, 3), ref_logprobs.view(2, 3), mask.view(2, 3)
    scores = torch.tensor([1.0, -1.0])
    compiled = torch.compile(token_rewards, fullgraph=True, backend="aot_eager")
    expected = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.3, cu_seqlens=cu_seqlens)
    actual = compiled(scores, logprobs, ref_logprobs, mask, kl_coef=0.3, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(actual, expected)


def test_misfits_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\).*\[2\]"):
        token_rewards(torch.zeros(3), x, x, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl_coef=-0\.1"):
        token_rewards(torch.zeros(2), x, x, mask, kl_coef=-0.1)
    with pytest.raises(ValueError, match=r"kl='k4'.*k1, abs, k2, k3"):
        token_rewards(torch.zeros(2), x, x, mask, kl_coef=0.1, kl="k4")  # type: ignore[arg-type]
