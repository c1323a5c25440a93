"""The results of benchmarks that are kept."""

import json
import subprocess
import sys


def bench_table(root, *arguments) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "tools" / "bench_table.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def result(**extra: float) -> dict[str, object]:
    stats = {"rounds": 5, "median": 0.5, "min": 0.4, "max": 0.6}
    return {
        "machine_info": {
            "system": "Linux",
            "python_version": "3.11.7",
            "cpu": {"brand_raw": "Some(R) Chip(TM) 7 @ 2.60GHz", "count": 2},
        },
        "commit_info": {"id": "0123abcd", "dirty": True},
        "datetime": "2026-01-02T03:04:05+00:00",
        "benchmarks": [{"fullname": "benchmarks/bench_a.py::test_b[c]", "stats": stats, "extra_info": extra}],
    }


def test_results_are_kept_under_the_name_of_the_hardware(root, tmp_path):
    path = tmp_path / "latest.json"
    path.write_text(json.dumps(result(ratio=2.0, owed=1.0, threads=2)))
    done = bench_table(root, path, "--save", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bench_a.py::test_b[c]" in done.stdout
    kept = json.loads((tmp_path / "cpu-2core-some-chip-7-2-60ghz.json").read_text())
    assert kept["hardware"] == {"cpu": "Some(R) Chip(TM) 7 @ 2.60GHz", "cores": 2, "system": "Linux"}
    assert kept["versions"]["python"] == "3.11.7"
    assert {"torch", "msgspec", "pyzmq"} <= kept["versions"].keys()
    assert (kept["commit"], kept["date"]) == ("0123abcd+changes", "2026-01-02")
    assert kept["benchmarks"] == [
        {
            "name": "bench_a.py::test_b[c]",
            "rounds": 5,
            "median_s": 0.5,
            "min_s": 0.4,
            "max_s": 0.6,
            "ratio": 2.0,
            "owed": 1.0,
            "threads": 2,
        }
    ]


def test_a_claim_that_does_not_hold_is_kept_and_is_a_failure(root, tmp_path):
    path = tmp_path / "latest.json"
    path.write_text(json.dumps(result(ratio=0.9, owed=1.0)))
    assert bench_table(root, path, "--save", tmp_path).returncode == 1
    (saved,) = tmp_path.glob("cpu-*.json")
    assert json.loads(saved.read_text())["benchmarks"][0]["ratio"] == 0.9
