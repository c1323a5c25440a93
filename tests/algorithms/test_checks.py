import math
import threading

import pytest
import torch
from drivetrain_algorithms import check_finite, sft_loss, value_checks, whiten
from torch import Tensor

BROKEN = torch.tensor([[0.0, math.nan]])
EVERY = torch.ones(1, 2, dtype=torch.bool)


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


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(1, 3\) and mask \(1, 2\)"):
        check_finite("values", torch.zeros(1, 3), EVERY)
    with pytest.raises(ValueError, match="together with cu_seqlens"):
        check_finite("values", torch.zeros(2), EVERY[0])


def test_values_are_looked_at_inside_only() -> None:
    assert sft_loss(BROKEN, EVERY).isnan().any()
    with value_checks():
        with pytest.raises(ValueError, match="logprobs is nan at token 1 of sequence 0"):
            sft_loss(BROKEN, EVERY)
        sft_loss(BROKEN, torch.tensor([[True, False]]))
    assert sft_loss(BROKEN, EVERY).isnan().any()


def test_leaving_by_an_error_and_nesting_restore_what_was() -> None:
    with pytest.raises(ValueError, match="x is nan"):
        with value_checks():
            whiten(BROKEN, EVERY)
    whiten(BROKEN, EVERY)
    with value_checks():
        with value_checks():
            pass
        with pytest.raises(ValueError, match="x is nan"):
            whiten(BROKEN, EVERY)


def test_another_thread_is_not_concerned() -> None:
    results: list[Tensor] = []
    with value_checks():
        thread = threading.Thread(target=lambda: results.append(sft_loss(BROKEN, EVERY)))
        thread.start()
        thread.join(timeout=30)
    assert len(results) == 1


def test_compiled_code_does_not_check() -> None:
    compiled = torch.compile(sft_loss, fullgraph=True, backend="aot_eager")
    with value_checks():
        assert compiled(BROKEN, EVERY).isnan().any()


def test_names_of_its_own_parameters_are_names_too() -> None:
    with pytest.raises(ValueError, match="mask is nan at token 1 of sequence 0"):
        check_finite("mask", torch.tensor([[0.0, math.nan]]), torch.tensor([[True, True]]))


def test_numbers_are_floating_point() -> None:
    ids = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logprobs has dtype torch\.int64; pass floating-point numbers"):
        sft_loss(ids, torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"logprobs has dtype torch\.complex64"):
        sft_loss(ids.to(torch.complex64), torch.ones(1, 2, dtype=torch.bool))
