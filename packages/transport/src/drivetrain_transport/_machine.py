"""Where this process runs: what tells one machine, and one container, from another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal


def boot_id() -> str:
    """The running kernel's own name: processes with the same one are on the same machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace(kind: Literal["net", "pid"]) -> str:
    """This process's network or process namespace, as containers have one each."""
    return os.readlink(f"/proc/self/ns/{kind}")
