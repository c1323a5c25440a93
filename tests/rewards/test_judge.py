"""One call, one outcome: what a reward function may return, and what becomes of everything else."""

import functools
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain_rewards import RewardRequest, Score, ScoreFailure, exact_match
from drivetrain_rewards._judge import judge, load_function, path_of

REQUEST = RewardRequest(sample_id=17, prompt="p", response="r", ground_truth="r")


def returning(value: object) -> Callable[[RewardRequest], Any]:
    return lambda request: value


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (0.25, 0.25),
        (3, 3.0),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
    ],
)
def test_numbers_are_scores(returned: object, value: float) -> None:
    assert judge(returning(returned), REQUEST) == Score(sample_id=17, value=value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "the value is None, a NoneType, no number"),
        ("1.0", "the value is '1.0', a str, no number"),
        ([1.0, 2.0], r"the value is \[1.0, 2.0\], a list, no number"),
        ((), r"the value is \(\), a tuple, no number"),
        ({"score": 1.0}, "a dict, no number"),
        (np.zeros(1), "a ndarray, no number"),
        (1j, "a complex, no number"),
        (np.array("one"), "a ndarray, no number"),
        (Score(sample_id=3, value=1.0), "the function returned the score of sample 3"),
        (Score(sample_id=17, value=None), "the value is None"),  # type: ignore[arg-type]
        (Score(sample_id=17, value=1.0, details={"a": "b"}), r"the details\['a'\] is 'b', a str"),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_number_is_a_failure_of_its_type(returned: object, says: str) -> None:
    outcome = judge(returning(returned), REQUEST)
    assert isinstance(outcome, ScoreFailure)
    assert (outcome.sample_id, outcome.reason) == (17, "wrong_type")
    assert re.search(says, outcome.message), outcome.message


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (float("nan"), "the value is nan"),
        (float("-inf"), "the value is -inf"),
        (np.float32("nan"), "the value is nan"),
        (10**400, "the value is inf"),
        (Score(sample_id=17, value=1.0, details={"a": float("nan")}), "the details['a'] is nan"),
    ],
)
def test_what_is_not_finite_is_a_failure(returned: object, says: str) -> None:
    assert judge(returning(returned), REQUEST) == ScoreFailure(sample_id=17, reason="not_finite", message=says)


def test_details_are_kept_as_floats() -> None:
    details = {"format": True, "length": np.int64(3), "value": 2}
    outcome = judge(returning(Score(sample_id=17, value=np.float64(0.5), details=details)), REQUEST)
    assert outcome == Score(sample_id=17, value=0.5, details={"format": 1.0, "length": 3.0, "value": 2.0})
    assert isinstance(outcome, Score)
    assert [type(value) for value in outcome.details.values()] == [float] * 3


class Timeout(BaseException):
    """As math-verify's: no Exception."""


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("bad"), Timeout("bad"), SystemExit("bad"), RecursionError("bad")]
)
def test_what_is_raised_is_a_failure_with_its_name_and_line(error: BaseException) -> None:
    def fails(request: RewardRequest) -> float:
        raise error

    outcome = judge(fails, REQUEST)
    line = fails.__code__.co_firstlineno + 1
    message = f"{type(error).__name__}: {error} (test_judge.py:{line})"
    assert outcome == ScoreFailure(sample_id=17, reason="raised", message=message)


def test_an_interrupt_is_not_the_samples() -> None:
    def interrupted(request: RewardRequest) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(interrupted, REQUEST)


def test_paths_lead_back_to_their_functions(tmp_path: Path) -> None:
    assert path_of(exact_match) == "drivetrain_rewards._functions:exact_match"
    assert load_function("drivetrain_rewards:exact_match") is exact_match
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n\ndef f(request):\n    return A(3).x\n"
    )
    assert judge(load_function(f"{file}:f"), REQUEST) == Score(sample_id=17, value=3.0)
    assert path_of(f"{file}:f") == f"{file}:f"


def test_a_function_of_the_main_script_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "def reward(request):\n    return 2.5\n\nif __name__ == '__main__':\n    raise SystemExit('ran')\n"
    )
    main = load_function(f"{script}:reward").__globals__  # type: ignore[attr-defined]
    module = type(sys)("__main__")
    module.__dict__.update(main, __file__=str(script))
    module.reward.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", module)
    path = path_of(module.reward)
    assert path == f"{script}:reward"
    assert load_function(path)(REQUEST) == 2.5


class Methods:
    def reward(self, request: RewardRequest) -> float:
        return 1.0


def test_functions_without_a_path_are_refused() -> None:
    def local(request: RewardRequest) -> float:
        return 1.0

    for function in (local, lambda request: 1.0, functools.partial(exact_match), Methods().reward, Methods()):
        with pytest.raises(ValueError, match=r"cannot be imported by another process"):
            path_of(function)  # type: ignore[arg-type]
    for text in ("", "module", ":name", "module:"):
        with pytest.raises(ValueError, match=r"names no function: write 'module:name'"):
            path_of(text)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:f", "cannot import 'no_such_module:f': ModuleNotFoundError"),
        ("drivetrain_rewards:no_such_function", "drivetrain_rewards has no function 'no_such_function'"),
        ("drivetrain_rewards:__all__", "has no function '__all__'"),
        ("/no/such/file.py:f", "FileNotFoundError"),
    ],
)
def test_what_cannot_be_imported_is_named(path: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_function(path)
