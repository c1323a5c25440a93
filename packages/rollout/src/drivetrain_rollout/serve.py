"""A rollout worker: one engine in this process, for a controller that is somewhere else.

    python -m drivetrain_rollout.serve --join tcp://HOST:PORT [--keys FOLDER] [--digest MODULE:FUNCTION]

It joins the controller (an ``Endpoint`` bound with ``drivetrain_rollout.remote.PROTOCOL``), starts the engine that the
controller's ``RemoteEngine`` asks for, and ends when the controller says goodbye or is lost.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from drivetrain_rollout.start import start_engine


def named(text: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names."""
    module, _, function = text.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no function: {error}") from error
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain_rollout.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--join", required=True, metavar="ADDRESS", help="where the controller is bound")
    parser.add_argument("--keys", metavar="FOLDER", help="CURVE keys of the run; needed off this host")
    parser.add_argument("--digest", type=named, metavar="MODULE:FUNCTION", help="checks every weight update")
    parser.add_argument("--name", default=f"rollout-worker-{os.getpid()}", help="what the controller calls it")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until the controller must be there")
    found = parser.parse_args(arguments)

    from drivetrain_rollout.remote import load_keys, serve

    serve(
        found.join,
        factory=partial(start_engine, digest=found.digest),
        name=found.name,
        keys=None if found.keys is None else load_keys(found.keys),
        timeout=found.timeout,
    )


if __name__ == "__main__":
    main()
