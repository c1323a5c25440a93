"""Worker processes: whatever a reward function does costs its own sample and nothing else; nothing is left behind."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivetrain_rewards import Outcome, RewardPool, RewardRequest, Score, ScoreFailure, exact_match

FUNCTIONS = r"""
import os, re, signal, subprocess, sys, time

def act(request):
    what = request.response
    if what == "pid":
        return os.getpid()
    if what == "loop":
        while True:
            pass
    if what == "backtrack":
        return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "print":
        line = "x" * (1 << 20)
        for _ in range(1000):
            print(line)
        return 1.0
    if what == "raw print":
        os.write(1, b"noise")
        return 1.0
    if what == "raise":
        raise ValueError("cannot judge")
    if what == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(request.extra["file"], "w") as file:
            file.write(str(child.pid))
        while True:
            pass
    if what == "alarm":  # a time limit of its own, which works in a main thread only
        def late(signum, frame):
            raise TimeoutError("too slow")
        signal.signal(signal.SIGALRM, late)
        signal.alarm(1)
        time.sleep(30)
    if what == "forgotten alarm":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1.0
    if what == "nap":
        time.sleep(0.2)
    return float(len(what))
"""


@pytest.fixture
def act(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:act"


def request(response: str, number: int = 0, **extra: str) -> RewardRequest:
    return RewardRequest(sample_id=number, prompt="p", response=response, extra=extra)


def score(pool: RewardPool, *responses: str) -> list[Outcome]:
    return asyncio.run(pool.score([request(response, number) for number, response in enumerate(responses)]))


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_outcomes_are_in_the_order_of_the_requests(act: str) -> None:
    with RewardPool(act, num_workers=3, deadline=20) as pool:
        outcomes = score(pool, *(("nap" if k % 7 == 0 else "x" * k) for k in range(40)))
    assert [outcome.value for outcome in outcomes] == [3.0 if k % 7 == 0 else float(k) for k in range(40)]
    assert [outcome.sample_id for outcome in outcomes] == list(range(40))


def test_a_function_is_found_by_itself_and_scores_as_when_called_directly() -> None:
    requests = [
        RewardRequest(sample_id=k, prompt="p", response=text, ground_truth="y\u00e9s \U0001f600")
        for k, text in enumerate(["y\u00e9s \U0001f600", "no", " y\u00e9s \U0001f600\n", "x" * 1_000_000])
    ]
    with RewardPool(exact_match, num_workers=1, deadline=20) as pool:
        outcomes = asyncio.run(pool.score(requests))
    assert [outcome.value for outcome in outcomes] == [exact_match(one) for one in requests] == [1.0, 0.0, 1.0, 0.0]


def test_a_call_past_its_deadline_is_a_timeout_and_the_others_go_on(act: str, caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(act, num_workers=2, deadline=0.5) as pool:
        start = time.monotonic()
        outcomes = score(pool, "a", "loop", "ab", "backtrack", "abc", "abcd")
        assert time.monotonic() - start < 15
    late = [ScoreFailure(sample_id=k, reason="timeout", message="no score within 0.5 s") for k in (1, 3)]
    assert [outcomes[1], outcomes[3]] == late
    assert [outcome.value for k, outcome in enumerate(outcomes) if k not in (1, 3)] == [1.0, 2.0, 3.0, 4.0]
    assert pool.counts == {"scored": 4, "timeout": 2}
    assert {record.getMessage() for record in caplog.records} == {
        "sample 1: timeout: no score within 0.5 s",
        "sample 3: timeout: no score within 0.5 s",
    }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("exit", "the worker exited with status 3 while it scored the sample"),
        ("segfault", "the worker was ended by SIGSEGV while it scored the sample"),
    ],
)
def test_a_dead_worker_costs_its_sample_and_is_replaced(act: str, what: str, says: str) -> None:
    with RewardPool(act, num_workers=1, deadline=20) as pool:
        outcomes = score(pool, "a", what, "ab")
        assert outcomes[1] == ScoreFailure(sample_id=1, reason="worker_died", message=says)
        assert (outcomes[0], outcomes[2]) == (Score(sample_id=0, value=1.0), Score(sample_id=2, value=2.0))


def test_a_stopped_worker_is_killed_at_the_deadline(act: str) -> None:
    with RewardPool(act, num_workers=1, deadline=0.3) as pool:
        outcomes = score(pool, "stop", "ab")
    assert outcomes[0] == ScoreFailure(sample_id=0, reason="timeout", message="no score within 0.3 s")
    assert outcomes[1] == Score(sample_id=1, value=2.0)


def test_prints_do_not_disturb_the_channel(act: str) -> None:
    with RewardPool(act, num_workers=1, deadline=60) as pool:
        assert [outcome.value for outcome in score(pool, "print", "raw print", "ab")] == [1.0, 1.0, 2.0]


def test_errors_are_failures_and_the_worker_stays(act: str) -> None:
    with RewardPool(act, num_workers=1, deadline=20) as pool:
        outcomes = score(pool, "pid", "raise", "sys.exit", "pid")
    assert outcomes[1] == ScoreFailure(
        sample_id=1, reason="raised", message="ValueError: cannot judge (functions.py:30)"
    )
    assert outcomes[2] == ScoreFailure(sample_id=2, reason="raised", message="SystemExit: 3 (functions.py:16)")
    assert outcomes[0].value == outcomes[3].value


def test_a_function_that_always_raises_stops_the_run(act: str) -> None:
    with RewardPool(act, num_workers=2, deadline=20) as pool:
        with pytest.raises(
            RuntimeError, match=r"20 of the last 20 rewards failed.*: sample 0: raised: ValueError: cannot"
        ):
            score(pool, *["raise"] * 20)


def test_time_limits_by_signal_work_and_do_not_reach_the_next_sample(act: str) -> None:
    with RewardPool(act, num_workers=1, deadline=20) as pool:
        outcomes = score(pool, "alarm", "forgotten alarm", "nap")
    assert outcomes[0] == ScoreFailure(sample_id=0, reason="raised", message="TimeoutError: too slow (functions.py:39)")
    assert [outcome.value for outcome in outcomes[1:]] == [1.0, 3.0]


def test_what_a_late_function_has_started_is_killed_with_it(act: str, tmp_path: Path) -> None:
    file = tmp_path / "child"
    with RewardPool(act, num_workers=1, deadline=2) as pool:
        (outcome,) = asyncio.run(pool.score([request("spawn", file=str(file))]))
        assert outcome.reason == "timeout"
        child = int(file.read_text())
        wait_until(lambda: not alive(child), "the grandchild's end")


def test_a_request_that_cannot_be_sent_is_its_own_failure(act: str) -> None:
    with RewardPool(act, num_workers=1, deadline=20) as pool:
        outcomes = score(pool, "ab", "\ud800", "abc")
    assert [outcome.sample_id for outcome in outcomes] == [0, 1, 2]
    assert outcomes[1].reason == "raised"
    assert outcomes[1].message.startswith("the request cannot be sent to a worker: UnicodeEncodeError")
    assert (outcomes[0].value, outcomes[2].value) == (2.0, 3.0)


def test_several_loops_may_score_at_once(act: str) -> None:
    with RewardPool(act, num_workers=2, deadline=20) as pool, concurrent.futures.ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda size: score(pool, *["x" * size] * 5), range(4)))
    assert [[outcome.value for outcome in batch] for batch in batches] == [[float(size)] * 5 for size in range(4)]


def test_a_cancelled_score_leaves_the_pool_usable(act: str) -> None:
    async def main(pool: RewardPool) -> list[Outcome]:
        scoring = asyncio.ensure_future(pool.score([request("nap", k) for k in range(100)]))
        await asyncio.sleep(0.01)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        return await pool.score([request("ab")])

    with RewardPool(act, num_workers=1, deadline=20) as pool:
        start = time.monotonic()
        assert asyncio.run(main(pool)) == [Score(sample_id=0, value=2.0)]
        assert time.monotonic() - start < 10  # not the 20 s of the whole queue


def test_functions_that_cannot_be_imported_fail_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot import 'no_such_module:f': ModuleNotFoundError"):
        RewardPool("no_such_module:f", num_workers=2, deadline=1)
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(7)\n")
    with pytest.raises(ValueError, match=r"cannot import .*broken.py:f': the worker exited with status 7 meanwhile"):
        RewardPool(f"{broken}:f", num_workers=1, deadline=1)
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(TimeoutError, match=r"was not imported within 0.5 s"):
        RewardPool(f"{slow}:f", num_workers=1, deadline=1, start_deadline=0.5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain-rewards")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 0, "deadline": 1.0}, "num_workers is 0"),
        ({"num_workers": 1, "deadline": 0.0}, "deadline is 0.0 s"),
        ({"num_workers": 1, "deadline": float("nan")}, "deadline is nan s"),
    ],
)
def test_numbers_out_of_range_are_named(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RewardPool(exact_match, **options)  # type: ignore[arg-type]


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    processes, files = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() == processes
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain-rewards")]


@pytest.mark.usefixtures("nothing_left")
def test_close_leaves_no_process_no_thread_and_no_file(act: str) -> None:
    pool = RewardPool(act, num_workers=3, deadline=20)
    pids = {int(outcome.value) for outcome in score(pool, *["pid"] * 10)}
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match=r"this RewardPool is closed"):
        score(pool, "ab")


@pytest.mark.usefixtures("nothing_left")
def test_close_fails_what_waits_and_what_runs(act: str) -> None:
    pool = RewardPool(act, num_workers=1, deadline=60)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        running = threads.submit(score, pool, "loop", "ab")
        wait_until(lambda: pool._jobs.qsize() == 1, "the first job to be taken")
        pool.close()
        with pytest.raises(RuntimeError, match=r"the RewardPool closed while"):
            running.result(timeout=10)


SCRIPT = """
import asyncio, sys
from drivetrain_rewards import RewardPool, RewardRequest

def reward(request):
    import os
    if request.response == "loop":
        print("looping")
        sys.stderr.write(f"{os.getpid()}\\n")
        sys.stderr.flush()
        while True:
            pass
    return 1.0

if __name__ == "__main__":
    pool = RewardPool(reward, num_workers=1, deadline=600)
    print(asyncio.run(pool.score([RewardRequest(sample_id=0, prompt="", response="")])), flush=True)
    if sys.argv[1] == "loop":
        asyncio.run(pool.score([RewardRequest(sample_id=1, prompt="", response="loop")]))
    raise KeyError("the first error")
"""


def test_a_script_that_forgets_its_pool_exits_with_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), "no"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "KeyError: 'the first error'" in done.stderr
    assert done.stdout == "[Score(sample_id=0, value=1.0, details={})]\n"


def test_a_killed_owner_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script), "loop"], stdout=-1, stderr=-1, text=True) as owner:
        assert owner.stderr is not None
        worker = int(owner.stderr.readline())
        assert alive(worker)
        owner.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(worker), "the worker's end")
