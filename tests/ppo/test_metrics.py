"""Numbers of a step that are not the loop's arithmetic."""

import pytest
import torch
from drivetrain_learner import UpdateResult
from drivetrain_ppo.batch import Batch, Scored, make_batch
from drivetrain_ppo.config import from_dict
from drivetrain_ppo.metrics import (
    LogprobMismatch,
    check_finite_scores,
    check_logprobs,
    check_updates,
    weight_metrics,
)
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.weights import Push
from drivetrain_rollout import Completion, Rollout, VersionSpan


def one_rollout(*reported: float) -> Batch:
    turn = Completion(
        request_id="0",
        prompt_token_ids=(1, 2),
        response_token_ids=tuple(range(3, 3 + len(reported))),
        rollout_logprobs=reported,
        finish_reason="length",
        version_spans=(VersionSpan(0, len(reported)),),
    )
    return make_batch([Rollout(sample_id=0, group_id=0, turns=(turn,), score=1.0)], rank=0, size=1, device="cpu")


def scored(values: list[float]) -> Scored:
    old = torch.tensor(values)
    return Scored(old_logprobs=old, ref_logprobs=old, values=old)


def test_log_probs_that_differ_stop_the_run() -> None:
    batch = one_rollout(-1.0, -2.0)
    close, far = scored([0.0, -1.0001, -2.0]), scored([0.0, -1.2, -2.0])
    config = from_dict({"model": {"dtype": "float32"}})
    check_logprobs(config, Ranks(), batch, close)
    with pytest.raises(LogprobMismatch, match=r"differ by 1\.00e-01 on average"):
        check_logprobs(config, Ranks(), batch, far)
    found = check_logprobs(from_dict({"trainer": {"logprob_diff_limit": 0.2}}), Ranks(), batch, far)
    assert (float(found.abs_mean), float(found.abs_max)) == pytest.approx((0.1, 0.2), rel=1e-5)
    with pytest.raises(LogprobMismatch):
        check_logprobs(config, Ranks(), batch, scored([0.0, float("nan"), -2.0]))


def test_what_a_push_moved() -> None:
    push = Push(policy_version=4, digest="abc", nbytes=44, updates=())
    assert weight_metrics(push) == {"weights/version": 4, "weights/digest": "abc", "weights/bytes": 44}


def update(skipped: str | None) -> UpdateResult:
    return UpdateResult(loss=0.0, grad_norm=1.0, lr=1e-6, metrics={}, skipped=skipped)


def test_a_model_that_takes_no_step_at_all_stops_the_run() -> None:
    check_updates(3, actor=[update(None), update("the gradient's norm is inf")], critic=[update(None)])
    with pytest.raises(
        RuntimeError, match="step 3: all 2 updates of the actor were skipped: the gradient's norm is nan"
    ):
        check_updates(3, critic=[update(None)], actor=[update("the gradient's norm is nan")] * 2)


def test_numbers_that_are_none_are_named_before_they_spread() -> None:
    batch = one_rollout(-1.0, -2.0)
    bad = scored([float("nan"), -1.0, -2.0])
    check_finite_scores(batch, bad)  # the first slot belongs to the prompt
    with pytest.raises(ValueError, match="old_logprobs"):
        check_finite_scores(batch, scored([0.0, float("nan"), -2.0]))
