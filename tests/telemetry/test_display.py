"""RunDisplay: one line per step in a log, a live table on a terminal."""

import io

import pytest
from drivetrain_telemetry import Column, RunDisplay
from rich.console import Console

METRICS = {
    "reward/mean": 0.4375,
    "policy/approx_kl": 0.00321,
    "throughput/samples_per_s": 1234.6,
    "time/step": 2.0,
    "time/rollout": 0.5,
    "time/update_actor": 1.4,
    "weights/digest": "a1f0",
}


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False), file


def test_each_step_is_one_plain_line_without_a_terminal():
    out, file = console(terminal=False)
    with RunDisplay(title="ppo", steps=120, console=out) as display:
        display.step(7, METRICS)
        display.step(8, {"reward/mean": 0.5, "policy/entropy": None})
    assert file.getvalue() == (
        "step 7/120  reward 0.438  kl 0.0032  samples/s 1,235  seconds 2.00\n"
        "step 8/120  reward 0.500\n"
    )  # fmt: skip


def test_long_plain_lines_are_not_wrapped_and_markup_is_left_alone():
    out, file = console(terminal=False)
    with RunDisplay(title="ppo", steps=1, console=out) as display:
        display.note("run [bold] " + "x" * 300)
    assert file.getvalue() == "run [bold] " + "x" * 300 + "\n"


def test_lengthy_work_says_when_it_starts_and_how_long_it_took():
    out, file = console(terminal=False)
    times = iter([5.0, 8.5, 10.0, 11.0])
    display = RunDisplay(title="ppo", steps=1, console=out, clock=lambda: next(times))
    with display, display.working("starting the engine"):
        assert file.getvalue() == "starting the engine ...\n"
    with pytest.raises(OSError, match="gone"), display.working("loading the model"):
        raise OSError("gone")
    assert file.getvalue().splitlines()[1:] == [
        "starting the engine: done in 3.5 s",
        "loading the model ...",
        "loading the model: failed after 1.0 s",
    ]


def test_a_terminal_shows_the_table_the_progress_and_where_the_time_goes():
    out, file = console(terminal=True)
    with RunDisplay(title="ppo", steps=120, console=out) as display:
        for step in range(1, 31):
            display.step(step, {**METRICS, "reward/mean": step / 100})
        display.note("checkpoint written")
    shown = file.getvalue()
    assert "checkpoint written" in shown
    last = shown[shown.rindex("┏") :].splitlines()
    header, rows = last[1], [line for line in last if line.startswith("│")]
    titles = [cell.strip() for cell in header.strip("┃").split("┃")]
    assert titles == ["step", "reward", "kl", "samples/s", "seconds"]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[0] for row in cells] == [str(step) for step in range(21, 31)]
    assert cells[-1] == ["30", "0.300", "0.0032", "1,235", "2.00"]
    assert any(line.startswith("update_actor 70%  rollout 25%  other 5%") for line in last)
    assert any("30/120" in line for line in last)


def test_a_terminal_shows_what_is_under_way():
    out, file = console(terminal=True)
    with RunDisplay(title="ppo", steps=10, console=out) as display:
        with display.working("starting the engine"):
            display.note("vLLM 0.32")
        assert "starting the engine" in file.getvalue()
    assert "starting the engine: done in" in file.getvalue()


def test_columns_can_be_chosen():
    out, file = console(terminal=False)
    columns = (Column("held out", "reward/held_out", ".0%"),)
    with RunDisplay(title="ppo", steps=2, console=out, columns=columns) as display:
        display.step(1, {"reward/held_out": 0.5, "reward/mean": 0.1})
    assert file.getvalue() == "step 1/2  held out 50%\n"
