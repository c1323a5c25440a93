import math

import pytest
import torch
from drivetrain_algorithms import check_finite


def test_the_sample_and_token_are_named() -> None:
    x = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, math.inf], [-math.inf, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 0, 0]]).bool()
    with pytest.raises(ValueError, match="old_logprobs is inf at token 2 of sequence 1; 2 of 6 unmasked slots"):
        check_finite("old_logprobs", x, mask)


def test_packed_positions_count_from_the_start_of_the_sequence() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, math.nan, 0.0])
    with pytest.raises(ValueError, match="values is nan at token 1 of sequence 2; 1 of 5"):
        check_finite("values", x, torch.ones(5, dtype=torch.bool), cu_seqlens=torch.tensor([0, 2, 2, 5]))


def test_masked_slots_may_hold_anything() -> None:
    check_finite("values", torch.tensor([[math.nan, 1.0]]), torch.tensor([[False, True]]))
    check_finite("values", torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))
