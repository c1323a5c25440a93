"""Which checkpoints are kept."""

import pathlib

from drivetrain_ppo.recorder import superseded


def test_the_newest_are_kept_and_those_of_undone_steps_are_not(tmp_path: pathlib.Path) -> None:
    for step in (2, 4, 6, 9):
        (tmp_path / f"step-{step:08d}").mkdir()
    saved = tmp_path / "step-00000006"
    gone = [path.name for path in superseded(tmp_path, saved, keep=2)]
    assert gone == ["step-00000009", "step-00000002"], "9 was undone by a resume; 4 and 6 are the newest two"
    assert [path.name for path in superseded(tmp_path, saved, keep=1)][1:] == ["step-00000002", "step-00000004"]
    assert [path.name for path in superseded(tmp_path, saved, keep=5)] == ["step-00000009"]
