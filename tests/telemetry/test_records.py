"""Reading the record of a step."""

from drivetrain_telemetry import throughput
from drivetrain_telemetry.records import means, stage_seconds


def test_throughput_by_hand():
    record = {
        "step": 1,
        "time/step": 4.0,
        "time/rollout": 2.0,
        "time/update_actor": 1.0,
        "time/update_critic": 0.5,
        "rollout/samples": 100,
        "rollout/tokens": 1000.0,
        "rollout/response_tokens": 600.0,
    }
    assert throughput(record) == {
        "throughput/samples_per_s": 25.0,
        "throughput/tokens_per_s": 250.0,
        "throughput/rollout_qps": 50.0,
        "throughput/rollout_tokens_per_s": 300.0,
        "throughput/actor_tokens_per_s": 1000.0,
        "throughput/critic_tokens_per_s": 2000.0,
    }


def test_throughput_leaves_out_what_the_record_does_not_tell():
    assert throughput({"time/step": 2.0, "rollout/samples": 10, "rollout/tokens": None, "time/rollout": 0.0}) == {
        "throughput/samples_per_s": 5.0
    }


def test_stages_are_sorted_and_the_rest_of_the_step_is_other():
    record = {"time/rollout": 1.0, "time/values": 2.0, "time/step": 3.5, "reward/mean": 9.0, "time/reward": None}
    assert list(stage_seconds(record).items()) == [("values", 2.0), ("rollout", 1.0), ("other", 0.5)]


def test_means_are_over_the_records_that_hold_a_number():
    records = [{"a/x": 1.0, "a/y": None, "a/digest": "f0"}, {"a/x": 3, "a/y": 5.0}, {"a/y": 7.0}]
    assert means(records) == {"a/x": 2.0, "a/y": 6.0}
