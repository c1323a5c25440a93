"""StageTimer: stages add up within their step, and misuse is refused."""

import pytest
from drivetrain_telemetry import StageTimer


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def test_stages_and_step_in_seconds_and_repeated_stages_add_up():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with timer.step():
        with timer.stage("rollout"):
            clock.pass_time(2.0)
        with timer.stage("update_actor"):
            clock.pass_time(1.0)
        clock.pass_time(0.5)
        with timer.stage("update_actor"):
            clock.pass_time(0.25)
    assert timer.metrics() == {"time/rollout": 2.0, "time/update_actor": 1.25, "time/step": 3.75}


def test_each_step_starts_from_nothing():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with timer.step(), timer.stage("rollout"):
        clock.pass_time(2.0)
    with timer.step(), timer.stage("values"):
        clock.pass_time(1.0)
    assert timer.metrics() == {"time/values": 1.0, "time/step": 1.0}


def test_the_device_is_waited_for_where_a_stage_begins_and_ends():
    clock = Clock()
    log: list[str] = []
    queued = {"seconds": 0.0}

    def synchronize() -> None:
        log.append("wait")
        clock.pass_time(queued["seconds"])
        queued["seconds"] = 0.0

    timer = StageTimer(clock=clock, synchronize=synchronize)
    with timer.step():
        with timer.stage("update_actor"):
            log.append("launch")
            queued["seconds"] = 4.0
        with timer.stage("weight_sync"):
            log.append("sync")
            clock.pass_time(1.0)
    assert timer.metrics() == {"time/update_actor": 4.0, "time/weight_sync": 1.0, "time/step": 5.0}
    assert log == ["wait", "wait", "launch", "wait", "wait", "sync", "wait", "wait"]


def test_a_stage_inside_a_stage_is_refused_and_the_outer_one_still_counts():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with timer.step(), timer.stage("rollout"):
        clock.pass_time(1.0)
        with pytest.raises(RuntimeError, match="'reward' inside stage 'rollout'"), timer.stage("reward"):
            pass
    assert timer.metrics() == {"time/rollout": 1.0, "time/step": 1.0}


def test_misuse_is_refused():
    timer = StageTimer()
    with pytest.raises(RuntimeError, match="no step"):
        timer.metrics()
    with pytest.raises(RuntimeError, match="outside a step"), timer.stage("rollout"):
        pass
    with timer.step(), pytest.raises(RuntimeError, match="inside step"), timer.step():
        pass


@pytest.mark.parametrize("name", ["step", "other", "Update actor", "time/rollout", ""])
def test_a_stage_name_that_makes_no_metric_is_refused(name):
    timer = StageTimer()
    with timer.step(), pytest.raises(ValueError, match="lower-case word"), timer.stage(name):
        pass


def test_a_step_that_raises_leaves_the_metrics_of_the_one_before():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with timer.step(), timer.stage("rollout"):
        clock.pass_time(1.0)
    with pytest.raises(KeyError), timer.step(), timer.stage("rollout"):
        clock.pass_time(9.0)
        raise KeyError("lost")
    assert timer.metrics() == {"time/rollout": 1.0, "time/step": 1.0}
    with timer.step(), timer.stage("values"):
        clock.pass_time(2.0)
    assert timer.metrics() == {"time/values": 2.0, "time/step": 2.0}
