import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drivetrain_learner import latest_checkpoint, load_checkpoint, save_checkpoint


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    base = torch.full((4, 3), value)
    return {
        "w": base,
        "w.T": base.T,
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }


def test_round_trip(tmp_path: Path) -> None:
    state = {"best": 0.1 + 0.2, "names": ["a", "é"], "nothing": None}
    path = save_checkpoint(tmp_path / "new", 12, tensors(), state)
    assert path.name == "step-00000012"
    assert latest_checkpoint(tmp_path / "new") == path
    checkpoint = load_checkpoint(path)
    assert checkpoint.step == 12
    assert checkpoint.state == state
    assert checkpoint.tensors.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(checkpoint.tensors[name], tensor)
        assert checkpoint.tensors[name].dtype == tensor.dtype


def test_the_newest_is_the_highest_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (9, 100, 20):
        save_checkpoint(tmp_path, step, tensors(), None)
    (tmp_path / "step-notes").mkdir()
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).step == 100


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        path = save_checkpoint(tmp_path, 5, tensors(value), value)
    assert [child.name for child in tmp_path.iterdir()] == ["step-00000005.2"]
    assert latest_checkpoint(tmp_path) == path
    assert load_checkpoint(path).state == 3.0


@pytest.mark.parametrize("damage", ["truncate", "no tensors", "no state", "torn state", "other format"])
def test_an_incomplete_checkpoint_is_left_out_with_a_warning(tmp_path: Path, damage: str) -> None:
    good = save_checkpoint(tmp_path, 1, tensors(), None)
    bad = save_checkpoint(tmp_path, 2, tensors(), None)
    data, header = bad / "tensors.safetensors", bad / "state.json"
    match damage:
        case "truncate":
            data.write_bytes(data.read_bytes()[:-1])
        case "no tensors":
            data.unlink()
        case "no state":
            header.unlink()
        case "torn state":
            header.write_text(header.read_text()[:20])
        case "other format":
            header.write_text(json.dumps(json.loads(header.read_text()) | {"format": 99}))
    with pytest.warns(RuntimeWarning, match="step-00000002 is not complete"):
        assert latest_checkpoint(tmp_path) == good
    with pytest.raises(ValueError, match="is not complete"):
        load_checkpoint(bad)


@pytest.mark.parametrize("state", [{"x": float("nan")}, {"x": object()}, {"x": torch.zeros(1)}])
def test_a_state_that_is_no_json_leaves_nothing_behind(tmp_path: Path, state: object) -> None:
    good = save_checkpoint(tmp_path, 1, tensors(), None)
    with pytest.raises(ValueError, match="state cannot be written as JSON"):
        save_checkpoint(tmp_path, 2, tensors(), state)
    assert list(tmp_path.iterdir()) == [good]


def test_a_file_that_cannot_be_written_is_an_error_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails in safetensors as it would there."""
    good = save_checkpoint(tmp_path, 1, tensors(), None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(OSError, match=r"tensors\.safetensors cannot be written: .*File too large"):
            save_checkpoint(tmp_path, 2, {"big": torch.zeros(100_000)}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [good]
    assert latest_checkpoint(tmp_path) == good


def test_negative_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step is -1"):
        save_checkpoint(tmp_path, -1, {}, None)


# For each k, a forked child saves and kills itself at its k-th look at the file system, until one survives. The same
# step is saved over and over, so that replacing is cut short too. Then children are killed from outside, at any moment.
KILLER = """
import os, random, signal, sys, time
import torch
from drivetrain_learner import save_checkpoint
root, big = sys.argv[1], torch.zeros(2_000_000)
torch.set_num_threads(1)

def child(kill_at, value):
    pid = os.fork()
    if pid:
        return pid
    seen = 0
    def count(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.scandir"):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    save_checkpoint(root, 3, {"w": torch.full((1000,), float(value)), "big": big}, value)
    os._exit(0)

save_checkpoint(root, 3, {"w": torch.full((1000,), -1.0), "big": big}, -1)
print("ready", flush=True)
kill_at = 0
while True:
    kill_at += 1
    _, status = os.waitpid(child(kill_at, kill_at), 0)
    print("killed" if status else "survived", flush=True)
    sys.stdin.readline()
    if not status:
        break
for _ in range(10):
    pid = child(0, 1000)
    time.sleep(random.uniform(0.0, 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("killed", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.filterwarnings("ignore:.*(not finished|not complete):RuntimeWarning")
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    kills = 0
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            path = latest_checkpoint(tmp_path)
            assert path is not None
            checkpoint = load_checkpoint(path)
            assert checkpoint.tensors["w"].unique().tolist() == [checkpoint.state]
            kills += line == "killed\n"
            if line != "ready\n":
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.returncode == 0
    assert kills >= 18
    path = save_checkpoint(tmp_path, 3, tensors(), "after")
    assert list(tmp_path.iterdir()) == [path]
