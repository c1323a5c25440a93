import pytest
import torch
from drivetrain_learner import PackedBatch


def ten_slots() -> PackedBatch:
    """Sequences of 3, 0 (one token), 5 and 2 slots."""
    token_ids = [[1, 2, 3, 4], [9], [5, 6, 7, 8, 9, 10], [11, 12, 13]]
    return PackedBatch.pack(token_ids, [[i >= 2 for i in range(len(ids))] for ids in token_ids])


def test_pack_shifts_once() -> None:
    batch = ten_slots()
    assert batch.input_ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 11, 12]
    assert batch.labels.tolist() == [2, 3, 4, 6, 7, 8, 9, 10, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 8, 10]
    assert batch.cu_seqlens.dtype == torch.int32
    # A slot is masked by its label: the first response token (index 2) is the second slot's label.
    assert batch.loss_mask.tolist() == [False, True, True, False, True, True, True, True, False, True]
    assert batch.tokens.tolist() == list(range(10))
    assert batch.sequences.tolist() == [0, 1, 2, 3]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_sequences) == (5, 10, 4)


@pytest.mark.parametrize("token_ids", [[], [[]], [[7]], [[], [7], []]])
def test_sequences_that_predict_nothing_have_no_slots(token_ids: list[list[int]]) -> None:
    batch = PackedBatch.pack(token_ids, [[True] * len(ids) for ids in token_ids])
    assert batch.num_tokens == 0
    assert batch.num_sequences == len(token_ids)
    assert batch.lengths.tolist() == [0] * len(token_ids)
    assert batch.max_seqlen == 0
    assert sum(part.num_sequences for part in batch.split(4)) == len(token_ids)


def test_pack_refuses_masks_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"response_mask\[1\] has 1 entries for 2 tokens"):
        PackedBatch.pack([[1, 2], [3, 4]], [[True, True], [True]])
    with pytest.raises(ValueError, match="response_mask has 1 sequences for 2"):
        PackedBatch.pack([[1, 2], [3, 4]], [[True, True]])


def test_align_leaves_out_each_first_token() -> None:
    values = ten_slots().align([[0.0, 0.1, 0.2, 0.3], [0.4], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], [1.1, 1.2, 1.3]])
    torch.testing.assert_close(values, torch.tensor([0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.3]))


def test_align_refuses_another_length() -> None:
    with pytest.raises(ValueError, match=r"values\[0\] has 3 entries for a sequence of 4 tokens"):
        ten_slots().align([[0.0] * 3, [0.0], [0.0] * 6, [0.0] * 3])


def test_select_keeps_the_way_back() -> None:
    batch = ten_slots()
    part = batch.select([3, 1, 0])
    assert part.input_ids.tolist() == [11, 12, 1, 2, 3]
    assert part.tokens.tolist() == [8, 9, 0, 1, 2]
    assert part.sequences.tolist() == [3, 1, 0]
    assert part.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert part.max_seqlen == 3
    again = part.select([2])
    assert again.tokens.tolist() == [0, 1, 2]
    assert again.sequences.tolist() == [0]
    torch.testing.assert_close(again.labels, batch.labels[again.tokens])
    assert batch.select([]).num_tokens == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 8, 10, 99])
def test_split_loses_nothing_and_keeps_the_limit(limit: int) -> None:
    batch = ten_slots()
    parts = batch.split(limit)
    assert torch.cat([part.tokens for part in parts]).tolist() == list(range(10))
    assert torch.cat([part.sequences for part in parts]).tolist() == [0, 1, 2, 3]
    for part in parts:
        assert part.cu_seqlens[0] == 0
        assert part.cu_seqlens[-1] == part.num_tokens == len(part.labels)
        assert part.num_tokens <= limit or (part.lengths > 0).sum() == 1
        assert part.max_seqlen == int(part.lengths.max())
        assert part.num_tokens > 0


def test_split_evens_out_the_parts_it_needs() -> None:
    batch = PackedBatch.pack([[0] * 11] * 10, [[True] * 11] * 10)
    assert [part.num_tokens for part in batch.split(90)] == [50, 50]


def test_split_needs_room() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        ten_slots().split(0)
