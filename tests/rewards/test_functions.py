import subprocess
import sys

import pytest
from drivetrain_rewards import RewardRequest, exact_match, last_number, math_answer


def request(response: str, ground_truth: str | None) -> RewardRequest:
    return RewardRequest(sample_id=3, prompt="p", response=response, ground_truth=ground_truth)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [(" yes\n", "yes", 1.0), ("Yes", "yes", 0.0), ("yes.", "yes", 0.0), ("", "", 1.0), ("a b", " a b ", 1.0)],
)
def test_exact_match(response: str, truth: str, score: float) -> None:
    assert exact_match(request(response, truth)) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("It is $1,234.50.", "#### 1234.5", 1.0),
        ("40 and 2 make 42.", "42", 1.0),
        ("42 is what 40 and 2 make", "42", 0.0),
        ("the answer is -5", "-5", 1.0),
        ("x=-5", "-5", 1.0),
        ("8-5", "5", 1.0),
        ("8 - 5", "5", 1.0),
        ("(8)-5", "5", 1.0),
        ("-.5", "-0.5", 1.0),
        ("a 1e", "1", 1.0),
        ("007", "7", 1.0),
        ("12345678901234567890.1", "12345678901234567890.2", 0.0),
        ("I cannot say", "4", 0.0),
        ("", "4", 0.0),
        ("9" * 5000, "9", 0.0),
    ],
)
def test_last_number(response: str, truth: str, score: float) -> None:
    assert last_number(request(response, truth)) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        ("The answer is 1/2", r"\frac{2}{4}", 1.0),
        (r"$x^2 - 1$", "$(x-1)(x+1)$", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{42}", "43", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
    ],
)
def test_math_answer(response: str, truth: str, score: float) -> None:
    assert math_answer(request(response, truth)) == score


@pytest.mark.parametrize("function", [exact_match, last_number, math_answer])
def test_without_a_ground_truth_there_is_no_score(function: object) -> None:
    with pytest.raises(ValueError, match=r"sample 3 has no ground truth"):
        function(request("4", None))  # type: ignore[operator]


def test_a_ground_truth_that_is_none_is_the_datas_fault() -> None:
    with pytest.raises(ValueError, match=r"'four' of sample 3 holds no number"):
        last_number(request("4", "four"))
    with pytest.raises(ValueError, match=r"'' of sample 3 is no mathematical expression"):
        math_answer(request("4", ""))


def test_math_answer_outside_the_main_thread_is_an_error_and_no_zero() -> None:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match=r"works in a main thread only: use RewardPool"):
            pool.submit(math_answer, request("4", "4")).result(timeout=60)


def test_importing_the_package_imports_neither_sympy_nor_a_tensor_library() -> None:
    code = (
        "import sys, threading, drivetrain_rewards\n"
        "print([m for m in ('sympy', 'math_verify', 'torch', 'numpy') if m in sys.modules], threading.active_count())\n"
        "drivetrain_rewards.math_answer\n"
        "print('sympy' in sys.modules)\n"
        "try:\n"
        "    drivetrain_rewards.maths_answer\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "[] 1",
        "True",
        "module 'drivetrain_rewards' has no attribute 'maths_answer'",
    ], done.stderr


def test_without_math_verify_the_mend_is_named() -> None:
    code = (
        "import sys\nsys.modules['math_verify'] = None\n"
        "from drivetrain_rewards import exact_match\nfrom drivetrain_rewards import math_answer\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: math_answer needs math-verify: pip install 'drivetrain-rewards[math]'" in done.stderr
