"""Objects that a child process by fork must let go of."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """Holds something that is one process's alone, such as a lock."""

    def forget(self) -> None:
        """Called in the child, before anything else runs there."""


_watched: weakref.WeakSet[Forgetful] = weakref.WeakSet()
_watching = False


def forget_in_children(subject: Forgetful) -> None:
    """Have it forget in every child that is forked from now on, for as long as it lives."""
    global _watching
    _watched.add(subject)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for subject in list(_watched):
        subject.forget()
