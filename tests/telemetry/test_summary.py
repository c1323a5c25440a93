"""Summary: totals by hand, the JSON line, plain lines and tables."""

import io
import json

import pytest
from drivetrain_telemetry import Summary, verdict
from rich.console import Console

RECORDS = [
    {
        "step": step,
        "time/rollout": 1.0 * step,
        "time/update_actor": 3.0,
        "time/step": 3.0 + step + 0.5,
        "rollout/tokens": 600,
        "rollout/response_tokens": 300,
    }
    for step in (1, 2)
]


def summary(**changes: object) -> Summary:
    fields = {
        "run": "runs/ppo-1",
        "reward_before": 0.1,
        "reward_after": 0.875,
        "seconds": 12.34,
        "ledger": {"issued": 512, "trained": 510, "failed": 2},
        **changes,
    }
    return Summary.of(RECORDS, **fields)


def test_stage_totals_by_hand():
    totals = {total.stage: total for total in summary().stages}
    assert list(totals) == ["update_actor", "rollout", "other"]
    assert [total.seconds for total in totals.values()] == [6.0, 3.0, 1.0]
    assert [total.share for total in totals.values()] == [0.6, 0.3, 0.1]
    assert [total.tokens_per_s for total in totals.values()] == [200.0, 200.0, None]


def test_the_json_line_has_the_promised_fields():
    line = summary().to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "run": "runs/ppo-1",
        "reward_before": 0.1,
        "reward_after": 0.875,
        "seconds": 12.34,
        "steps": 2,
        "ledger": {"issued": 512, "trained": 510, "failed": 2},
        "verdict": verdict(RECORDS).text,
    }


def test_plain_lines_without_a_terminal():
    file = io.StringIO()
    summary(reward_before=None).print(Console(file=file, force_terminal=False, width=40))
    assert file.getvalue().splitlines() == [
        "run      runs/ppo-1",
        "reward   unknown before, 0.875 after",
        "steps    2 in 12.3 s",
        "stage    update_actor: 6.00 s, 60%, 200 tokens/s",
        "stage    rollout: 3.00 s, 30%, 200 tokens/s",
        "stage    other: 1.00 s, 10%",
        "samples  512 issued, 510 trained, 2 failed",
        f"verdict  {verdict(RECORDS).text}",
    ]


def test_tables_on_a_terminal():
    file = io.StringIO()
    summary().print(Console(file=file, force_terminal=True, width=100, color_system=None))
    shown = file.getvalue()
    assert "0.100 before, 0.875 after" in shown
    row = next(line for line in shown.splitlines() if "update_actor" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["update_actor", "6.00", "60%", "200"]
    assert "update_actor sets the pace" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_without_steps_has_a_summary_as_well(terminal):
    file = io.StringIO()
    empty = Summary.of([], run="runs/x", reward_before=0.5, reward_after=0.5, seconds=0.0, ledger={})
    empty.print(Console(file=file, force_terminal=terminal, width=100, color_system=None))
    assert "No step was timed" in file.getvalue()
    assert (empty.steps, empty.stages) == (0, ())
