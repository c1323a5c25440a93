"""One call of a reward function, made into an outcome. Nothing that it does wrong becomes a number."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from drivetrain_rewards._types import FailureReason, Outcome, RewardFunction, RewardRequest, Score, ScoreFailure


def judge(function: RewardFunction, request: RewardRequest) -> Outcome:
    """Call the function and check what it returns. Only KeyboardInterrupt passes through."""
    try:
        returned: Any = function(request)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a time-out or an exit that is no Exception is this sample's as well
        return _failure(request, "raised", f"{type(error).__name__}: {error}{_where(error)}")
    details: dict[str, Any] = {}
    if isinstance(returned, Score):
        if returned.sample_id != request.sample_id:
            return _failure(request, "wrong_type", f"the function returned the score of sample {returned.sample_id}")
        returned, details = returned.value, dict(returned.details)
    numbers = {}
    for name, number in {"value": returned, **{f"details[{key!r}]": item for key, item in details.items()}}.items():
        checked = as_float(number)
        if checked is None:
            return _failure(
                request, "wrong_type", f"the {name} is {_short(number)}, a {type(number).__name__}, no number"
            )
        if not math.isfinite(checked):
            return _failure(request, "not_finite", f"the {name} is {checked}")
        numbers[name] = checked
    value, *parts = numbers.values()
    return Score(sample_id=request.sample_id, value=value, details=dict(zip(details, parts, strict=True)))


def _where(error: BaseException) -> str:
    """The line of the function's own file at which it raised."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def as_float(number: object) -> float | None:
    """A real number of Python, numpy or torch as a float (infinite when too large for one); None for anything else."""
    if getattr(number, "shape", None) == ():  # a numpy scalar, or a tensor of no dimension
        number = cast(Any, number).item()
    if not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf


def path_of(function: str | Callable[..., Any]) -> str:
    """Where another process finds the function: `module:name`, or `/path/file.py:name` for one of the main script.

    Raises:
        ValueError: It cannot be found by a path: a lambda, a local function, a bound method, a partial.
    """
    if isinstance(function, str):
        location, _, name = function.rpartition(":")
        if not location or not name:
            raise ValueError(f"{function!r} names no function: write 'module:name' or '/path/file.py:name'")
        return function
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    location = module
    if module == "__main__":
        location = getattr(sys.modules["__main__"], "__file__", None) or ""
        location = str(Path(location).resolve()) if location else ""
    if not location or not name or _find(sys.modules.get(module), name) is not function:
        raise ValueError(
            f"{function!r} cannot be imported by another process: define it at the top level of a module, "
            "and pass it or its path 'module:name'"
        )
    return f"{location}:{name}"


def load_function(path: str) -> RewardFunction:
    """Import a function by its path.

    Raises:
        ValueError: The module cannot be imported, or has no such callable; says what went wrong.
    """
    location, _, name = path.rpartition(":")
    try:
        module = _load_file(location) if location.endswith(".py") else importlib.import_module(location)
        function = _find(module, name)
    except Exception as error:
        raise ValueError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"cannot import {path!r}: {location} has no function {name!r}")
    return cast(RewardFunction, function)


def _load_file(location: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("drivetrain_rewards_user", location)
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and msgspec look their module up
    spec.loader.exec_module(module)
    return module


def _find(module: object, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _failure(request: RewardRequest, reason: FailureReason, message: str) -> ScoreFailure:
    return ScoreFailure(sample_id=request.sample_id, reason=reason, message=message)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
