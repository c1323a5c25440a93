"""metrics.jsonl: one line per step, in order, complete after every write."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drivetrain_telemetry import MetricsWriter, read_metrics


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_each_step_is_one_line_on_disk_before_write_returns(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {"reward/mean": 0.25, "policy/grad_norm": 1, "weights/digest": "a1f0"})
        assert path.read_text() == '{"step":1,"reward/mean":0.25,"policy/grad_norm":1,"weights/digest":"a1f0"}\n'
        metrics.write(2, {"reward/mean": 0.5})
    assert read_metrics(path) == [
        {"step": 1, "reward/mean": 0.25, "policy/grad_norm": 1, "weights/digest": "a1f0"},
        {"step": 2, "reward/mean": 0.5},
    ]


@pytest.mark.parametrize(
    "key", ["loss", "policy/", "/loss", "Policy/loss", "policy/loss/extra", "policy loss", "policy/1"]
)
def test_a_name_that_is_not_area_and_name_is_refused_and_nothing_is_written(tmp_path, key):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics, pytest.raises(ValueError, match="area/name"):
        metrics.write(1, {"reward/mean": 0.0, key: 1.0})
    assert path.read_text() == ""


def test_non_finite_numbers_become_null_and_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {"policy/loss": float("nan"), "policy/grad_norm": float("-inf"), "critic/loss": None})
    line = path.read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {
        "step": 1,
        "policy/loss": None,
        "policy/grad_norm": None,
        "critic/loss": None,
        "telemetry/non_finite": 2,
    }


@pytest.mark.parametrize("value", [True, [1.0], object(), 1j])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path, value):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics, pytest.raises(ValueError, match="reward/mean"):
        metrics.write(1, {"reward/mean": value})


def test_steps_only_increase(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(5, {"reward/mean": 0.0})
        for step in (5, 4):
            with pytest.raises(RuntimeError, match=f"step {step} after step 5"):
                metrics.write(step, {"reward/mean": 1.0})
    assert steps(tmp_path / "metrics.jsonl") == [5]


def test_a_new_run_does_not_write_into_the_metrics_of_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {"reward/mean": 0.0})
    with pytest.raises(ValueError, match="resume"):
        MetricsWriter(path)


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(1, 11):
            metrics.write(step, {"reward/mean": step / 10})
    with MetricsWriter.resume(path, 6) as metrics:
        assert steps(path) == [1, 2, 3, 4, 5, 6]
        with pytest.raises(RuntimeError, match="step 6 after step 6"):
            metrics.write(6, {"reward/mean": -1.0})
        metrics.write(7, {"reward/mean": 7.0})
    assert [record["reward/mean"] for record in read_metrics(path)] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 7.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_of_a_run_that_has_written_no_metrics(tmp_path):
    with MetricsWriter.resume(tmp_path / "metrics.jsonl", 0) as metrics:
        metrics.write(1, {"reward/mean": 0.5})
    assert steps(tmp_path / "metrics.jsonl") == [1]


def test_an_unfinished_last_line_is_left_out_and_resume_removes_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"reward/mean":0.5}\n{"step":2,"rewa')
    assert steps(path) == [1]
    with MetricsWriter.resume(path, 2) as metrics:
        metrics.write(3, {"reward/mean": 0.75})
    assert path.read_text() == '{"step":1,"reward/mean":0.5}\n{"step":3,"reward/mean":0.75}\n'


@pytest.mark.parametrize("line", ["not json", "[1]", '{"reward/mean": 1.0}', '{"step": "two"}'])
def test_a_finished_line_that_is_no_record_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":1}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_nothing_can_be_written_after_close(tmp_path):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.close()
    with pytest.raises(RuntimeError, match="closed"):
        metrics.write(1, {"reward/mean": 0.0})


def test_what_was_written_survives_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, time\n"
        "from drivetrain_telemetry import MetricsWriter\n"
        "metrics = MetricsWriter(sys.argv[1])\n"
        "for step in range(1, 100):\n"
        "    metrics.write(step, {'reward/mean': 0.5})\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    assert steps(path) == list(range(1, 100))
