"""From rollouts to tensors, and minibatches that do not depend on the number of ranks."""

import torch
from drivetrain_ppo.batch import make_batch, minibatches
from drivetrain_rollout import Completion, Rollout, VersionSpan


def rollout(index: int, prompt: list[int], response: list[int]) -> Rollout:
    turn = Completion(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        response_token_ids=tuple(response),
        rollout_logprobs=tuple(-(index + 1) - position / 10 for position in range(len(response))),
        finish_reason="stop",
        version_spans=(VersionSpan(0, len(response)),),
    )
    return Rollout(sample_id=index, group_id=index, turns=(turn,), score=float(index))


ROLLOUTS = [rollout(0, [1, 7, 3], [4, 2]), rollout(1, [1, 5], [2]), rollout(2, [1, 8, 8, 3], [4, 4, 4])]


def test_everything_is_aligned_with_the_labels() -> None:
    batch = make_batch(ROLLOUTS, rank=0, size=1, device="cpu")
    assert batch.packed.input_ids.tolist() == [1, 7, 3, 4, 1, 5, 1, 8, 8, 3, 4, 4]
    assert batch.packed.labels.tolist() == [7, 3, 4, 2, 5, 2, 8, 8, 3, 4, 4, 4]
    assert batch.packed.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]
    expected = torch.tensor([0, 0, -1, -1.1, 0, -2, 0, 0, 0, -3, -3.1, -3.2])
    assert torch.allclose(batch.rollout_logprobs, expected)
    assert batch.scores.tolist() == [0, 1, 2]


def test_ranks_share_out_the_rollouts() -> None:
    parts = [make_batch(ROLLOUTS, rank=rank, size=2, device="cpu") for rank in range(2)]
    assert [part.sample_index.tolist() for part in parts] == [[0, 2], [1]]
    assert [part.scores.tolist() for part in parts] == [[0, 2], [1]]
    assert [part.num_samples for part in parts] == [3, 3]


def test_minibatches_do_not_depend_on_the_number_of_ranks() -> None:
    rollouts = [rollout(index, [1, 2 + index], [3] * (1 + index % 4)) for index in range(13)]
    alone = make_batch(rollouts, rank=0, size=1, device="cpu")
    whole = [sorted(alone.sample_index[part.sequences].tolist()) for part in minibatches(alone, 4, seed=5)]
    assert sorted(index for part in whole for index in part) == list(range(13))
    assert {len(part) for part in whole} == {3, 4}
    ranks = [make_batch(rollouts, rank=rank, size=3, device="cpu") for rank in range(3)]
    split = [
        sorted(
            index
            for batch, part in zip(ranks, parts, strict=True)
            for index in batch.sample_index[part.sequences].tolist()
        )
        for parts in zip(*(minibatches(batch, 4, seed=5) for batch in ranks), strict=True)
    ]
    assert split == whole
    other = [sorted(alone.sample_index[part.sequences].tolist()) for part in minibatches(alone, 4, seed=6)]
    assert other != whole


def test_empty_and_one_token_responses() -> None:
    rollouts = [rollout(0, [1], [2]), rollout(1, [1, 4], []), rollout(2, [1, 4, 5], [6, 7, 2])]
    batch = make_batch(rollouts, rank=0, size=1, device="cpu")
    assert batch.packed.loss_mask.sum().item() == 4
    assert batch.packed.labels[batch.packed.loss_mask].tolist() == [2, 6, 7, 2]
    assert batch.rollout_logprobs[batch.packed.loss_mask].tolist()[0] == -1.0


def test_more_ranks_than_rollouts() -> None:
    batch = make_batch(ROLLOUTS[:1], rank=1, size=2, device="cpu")
    assert batch.packed.num_tokens == 0
    assert [part.num_tokens for part in minibatches(batch, 2, seed=1)] == [0, 0]
