"""Waiting for what other threads and processes do, under a deadline."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20) -> float:
    """Seconds until the condition holds; fails, and says what was waited for, after `timeout` seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + timeout, f"waited {timeout} s for {what}"
        time.sleep(0.005)
    return time.monotonic() - start
