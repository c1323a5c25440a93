"""Checks that cost nothing and need nothing heavy, made before a run imports or starts anything."""

import importlib.util
import pathlib
import re
import socket
from urllib.parse import urlsplit

from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.errors import ConfigError

RUNS = pathlib.Path("runs")


def find_run(named: str, config: RunConfig) -> pathlib.Path:
    """The run to resume: the one named, the configuration's, or the newest of the configuration's name.

    Of those by name, one with a checkpoint comes before one that never got so far.
    """
    if named or config.run_dir is not None:
        found = pathlib.Path(named or str(config.run_dir))
        if not (found / "config.yaml").is_file():
            raise ConfigError(f"--resume: {found} holds no run (no config.yaml)")
        return found
    stamped = re.compile(re.escape(config.name) + r"-\d{8}-\d{6}")
    runs = sorted(path.parent for path in RUNS.glob("*/config.yaml") if stamped.fullmatch(path.parent.name))
    if not runs:
        raise ConfigError(f"--resume: there is no run {RUNS}/{config.name}-*; name one")
    return next((run for run in reversed(runs) if any(run.glob("checkpoints/step-*"))), runs[-1])


def check_address(address: str, *, keys: str | None) -> None:
    """Refuse an address that cannot be listened on: malformed, taken, or open to the network without keys."""
    if address.startswith("ipc://"):
        return
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"rollout.listen: {address!r}: {error}") from None
    if parts.scheme != "tcp" or host is None or port is None:
        raise ConfigError(f"rollout.listen: {address!r} is not tcp://HOST:PORT (port 0 takes a free one)")
    if keys is not None:
        from drivetrain_transport import load_keys

        try:
            load_keys(keys)
        except (ValueError, OSError) as error:
            raise ConfigError(f"rollout.keys: {keys}: {error}; `drivetrain-ppo keys FOLDER` makes them") from None
    if keys is None and not (host == "localhost" or host == "::1" or host.startswith("127.")):
        raise ConfigError(
            f"rollout.listen: {address} can be reached from other hosts and needs keys: "
            "`drivetrain-ppo keys FOLDER`, then rollout.keys=FOLDER"
        )
    if port:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"rollout.listen: {address}: {error.strerror or error} (port 0 takes a free one)"
                ) from None


def check_data_source(source: str) -> None:
    """Refuse a word that names no task and a file that is not there."""
    if source == "sort_letters" or source.startswith("reasoning_gym:"):
        return
    path = pathlib.Path(source)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"data.source: {source!r} is neither sort_letters, reasoning_gym:NAME nor a .jsonl or .parquet file"
        )
    if not path.is_file():
        raise ConfigError(f"data.source: {path}: no such file ({path.absolute()})")


REWARDS = {
    "exact_match": "drivetrain_rewards:exact_match",
    "math_answer": "drivetrain_rewards:math_answer",
    "reasoning_gym": "drivetrain_ppo.scorers:reasoning_gym",
}
"""Words for `reward.function` -> where the function lies."""


def check_reward(function: str) -> None:
    """Refuse a word that names no reward, and a file or module that is not there. Nothing is imported."""
    if function in REWARDS:
        return
    place, colon, _ = function.rpartition(":")
    if not colon:
        raise ConfigError(
            f"reward.function: {function!r} is unknown; choose {', '.join(REWARDS)}, module:function or "
            "file.py:function"
        )
    if place.endswith(".py"):
        if not pathlib.Path(place).is_file():
            raise ConfigError(f"reward.function: {place}: no such file")
        return
    package = place.partition(".")[0]
    if not package.isidentifier() or importlib.util.find_spec(package) is None:
        raise ConfigError(f"reward.function: there is no module {package!r} here or among the installed packages")
