"""The reward function for mathematics. Importing this module imports math-verify and sympy, which takes a second."""

from __future__ import annotations

import threading

from drivetrain_rewards._functions import truth_of
from drivetrain_rewards._types import RewardRequest

try:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
except ImportError as error:
    raise ImportError("math_answer needs math-verify: pip install 'drivetrain-rewards[math]'") from error

_SECONDS = 5


def math_answer(request: RewardRequest) -> float:
    r"""1.0 when the response's answer is mathematically equal to the ground truth; else 0.0.

    The answer is found, parsed and compared by math-verify: `\boxed{...}`, LaTeX or a plain expression. The ground
    truth may be LaTeX with or without delimiters.

    Raises:
        ValueError: There is no ground truth, or it cannot be parsed: the data is wrong, not the response.
        TimeoutError: The answer takes longer than 5 seconds to parse or to compare.
        RuntimeError: Called outside the main thread, where math-verify's time limit does not work. `RewardPool`'s
            workers call it in theirs.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_answer works in a main thread only: use RewardPool, whose workers have one each")
    truth = truth_of(request)
    try:
        gold = parse(truth if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=_SECONDS)
        answers = parse(request.response, parsing_timeout=_SECONDS)
    except TimeoutException:
        raise TimeoutError(f"math-verify could not parse the answer within {_SECONDS} s") from None
    if not gold:
        raise ValueError(f"the ground truth {truth!r} of sample {request.sample_id} is no mathematical expression")
    timed_out = False
    for one in gold:
        for answer in answers:
            try:
                if verify(one, answer, timeout_seconds=_SECONDS, raise_on_error=True):
                    return 1.0
            except TimeoutException:
                timed_out = True
            except Exception:  # noqa: BLE001  # sympy cannot compare the two, so they are not equal
                continue
    if timed_out:
        raise TimeoutError(f"math-verify could not compare the answer within {_SECONDS} s")
    return 0.0
