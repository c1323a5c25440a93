"""The verdict names the stage, its share, the runner-up, a reason and a setting."""

import dataclasses

import pytest
from drivetrain_telemetry import RULES, Rule, verdict

STEP = {"time/rollout": 6.0, "time/update_actor": 3.0, "time/weight_sync": 0.5, "time/step": 10.0}


def test_the_longest_stage_sets_the_pace():
    found = verdict([STEP])
    assert (found.stage, found.share, found.seconds) == ("rollout", 0.6, 6.0)
    assert (found.runner_up, found.runner_up_share) == ("update_actor", 0.3)
    assert found.text == (
        "rollout sets the pace: 60% of a step (6 of 10 s); update_actor comes next with 30%. "
        "Why: each response is sampled one token after the other, and a step waits for the longest. "
        "To change it: raise rollout.max_num_seqs where a step has more samples than that, then rollout.workers."
    )


def test_the_reason_follows_from_what_was_measured():
    found = verdict([{**STEP, "rollout/truncated": 0.5}, {**STEP, "rollout/truncated": 0.3}])
    assert found.why == "40% of the responses run to the length limit, and a step waits for the longest"
    assert "rollout.max_response_tokens" in found.change


def test_the_first_of_three_or_more_records_is_left_out():
    warm_up = {"time/rollout": 1.0, "time/update_actor": 500.0, "time/step": 501.0}
    assert verdict([warm_up, STEP]).stage == "update_actor"
    assert verdict([warm_up, STEP, STEP]).share == 0.6


def test_time_between_the_stages_can_set_the_pace():
    found = verdict([{"time/rollout": 1.0, "time/step": 4.0}])
    assert (found.stage, found.share, found.runner_up) == ("other", 0.75, "rollout")
    assert "rollout.prompts_per_step" in found.text


def test_two_stages_of_nearly_the_same_share_set_it_together():
    found = verdict([{"time/rollout": 5.1, "time/update_actor": 4.9, "time/step": 10.0}])
    assert found.text.startswith("rollout and update_actor set the pace together: 51% and 49% of a step of 10 s.")


def test_a_single_stage_has_no_runner_up():
    found = verdict([{"time/rollout": 2.0}])
    assert (found.runner_up, found.runner_up_share, found.share) == ("", 0.0, 1.0)
    assert found.text.startswith("rollout sets the pace: 100% of a step (2 of 2 s).")


@pytest.mark.parametrize("records", [[], [{"reward/mean": 1.0}], [{"time/step": None}]])
def test_without_times_the_verdict_says_so(records):
    found = verdict(records)
    assert (found.stage, found.share) == ("", 0.0)
    assert found.text == "No step was timed, so nothing can be said about the pace."


def test_own_rules_come_before_the_table_and_an_unknown_stage_is_named():
    times = {"time/judge": 3.0, "time/step": 3.0}
    assert "'judge'" in verdict([times]).change
    own = Rule("judge", "the judge model answers one sample at a time", "raise judge.batch_size")
    assert verdict([times], rules=(own, *RULES)).change == "raise judge.batch_size"


def test_every_rule_can_speak():
    always = [dataclasses.replace(rule, applies=None) for rule in RULES]
    for rule in always:
        seconds = {} if rule.stage == "other" else {f"time/{rule.stage}": 9.0, "time/rollout": 1.0}
        record = {"time/values": 0.5, "rollout/truncated": 0.5, **seconds, "time/step": 10.0}
        if rule.stage == "rollout":
            record["time/rollout"] = 9.0
        found = verdict([record], rules=[rule])
        assert found.stage == rule.stage
        assert found.text.endswith(f"To change it: {rule.change}.")
        assert "{" not in found.text
