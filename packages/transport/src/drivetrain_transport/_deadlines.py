"""Seconds to wait, as they come from outside."""

from __future__ import annotations

import threading


def check_timeout(seconds: float) -> float:
    """The seconds again, if one can wait for so long.

    Raises:
        ValueError: It is NaN, infinite, or beyond what a wait of this system can take (centuries).
    """
    if not -threading.TIMEOUT_MAX <= seconds <= threading.TIMEOUT_MAX:  # nothing holds of a NaN
        raise ValueError(
            f"timeout is {seconds}: every wait has an end, so give a number of seconds, 3600 or 86400 where it may last"
        )
    return seconds
