"""events.jsonl: what happened, from any thread, and over resumes."""

import threading

import pytest
from drivetrain_telemetry import EventLog, read_events


def test_events_carry_their_time_and_fields_in_order(tmp_path):
    times = iter([100.0, 101.5])
    with EventLog(tmp_path / "events.jsonl", clock=lambda: next(times)) as events:
        events.write("run_started", seed=3)
        events.write("worker_lost", worker="rollout-1", requests=[7, 8], latency=float("inf"))
    assert read_events(tmp_path / "events.jsonl") == [
        {"time": 100.0, "event": "run_started", "seed": 3},
        {"time": 101.5, "event": "worker_lost", "worker": "rollout-1", "requests": [7, 8], "latency": None},
    ]


def test_a_resumed_run_goes_on_after_an_unfinished_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1.0,"event":"run_started"}\n{"time":2.0,"ev')
    with EventLog(path, clock=lambda: 3.0) as events:
        events.write("run_resumed")
    assert [event["event"] for event in read_events(path)] == ["run_started", "run_resumed"]


@pytest.mark.parametrize("field", ["time", "event"])
def test_the_logs_own_fields_cannot_be_given(tmp_path, field):
    with EventLog(tmp_path / "events.jsonl") as events, pytest.raises(ValueError, match=field):
        events.write("evaluation", **{field: 1})


def test_threads_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:

        def write(name: str) -> None:
            for number in range(200):
                events.write("tick", thread=name, number=number, padding="x" * 500)

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    found = read_events(path)
    for name in "abcd":
        assert [event["number"] for event in found if event["thread"] == name] == list(range(200))
