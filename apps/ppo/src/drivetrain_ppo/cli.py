"""The command line. Only what a command needs is imported when it runs: `--help` and mistakes are answered at once."""

import argparse
import importlib.resources
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence

from drivetrain_ppo.errors import ConfigError

PRESETS = ("quickstart", "smollm2")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.version:
        from importlib.metadata import version

        print(version("drivetrain-ppo"))
        return 0
    if arguments.command is None:
        _parser().print_help()
        return 0
    try:
        return COMMANDS[arguments.command](arguments)
    except ConfigError as error:
        print(f"drivetrain-ppo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("drivetrain-ppo: interrupted", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes positional arguments in one run only; overrides may stand anywhere between the options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    stray = [word for word in rest if word.startswith("-") or "=" not in word]
    if stray or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(stray or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain-ppo", description="PPO for language models: sampling with vLLM, training with torch."
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    quickstart = commands.add_parser("quickstart", help="train the embedded default, or another model, on this machine")
    quickstart.add_argument(
        "--model", default="embedded", help="embedded, smollm2, a local folder or a Hugging Face id"
    )
    quickstart.add_argument("--seed", type=int)
    quickstart.add_argument("--steps", type=int)
    quickstart.add_argument("--device", help="auto, cpu, or the accelerator's name")
    quickstart.add_argument("--json", action="store_true", help="end with one line of JSON")
    _add_run_arguments(quickstart)

    run = commands.add_parser("run", help="run a configuration")
    run.add_argument("config", help="a YAML file")
    run.add_argument("--json", action="store_true", help="end with one line of JSON")
    _add_run_arguments(run)

    learner = commands.add_parser("learner", help="one learner rank; torchrun starts as many as there are")
    learner.add_argument("config", help="a YAML file")
    learner.add_argument("--json", action="store_true", help="rank 0 ends with one line of JSON")
    _add_run_arguments(learner)

    worker = commands.add_parser("rollout-worker", help="host an engine for a run, on this host or another")
    worker.add_argument("--join", required=True, metavar="HOST:PORT", help="the address the run listens on")
    worker.add_argument("--keys", help="folder of CURVE keys; needed off this host")
    worker.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the run to be there")
    worker.add_argument("--parent", type=int, help=argparse.SUPPRESS)

    keys = commands.add_parser("keys", help="make CURVE keys for a run whose workers are on other hosts")
    keys.add_argument("folder")

    export = commands.add_parser("export", help="a checkpoint's policy as a Hugging Face folder")
    export.add_argument("checkpoint", help="a folder under RUN/checkpoints, or RUN for its newest")
    export.add_argument("folder")

    show = commands.add_parser("config", help="print a configuration with every default filled in")
    show.add_argument("config", nargs="?", help=f"a YAML file or a preset ({', '.join(PRESETS)})")
    show.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the last checkpoint of RUN, or of the newest run of this name",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings to change, e.g. trainer.steps=50"
    )


def _quickstart(arguments: argparse.Namespace) -> int:
    overrides = [*arguments.overrides]
    if arguments.model != "embedded":
        overrides.insert(0, f"model.source={arguments.model}")
    named = {"seed": arguments.seed, "trainer.steps": arguments.steps, "trainer.device": arguments.device}
    overrides += [f"{key}={value}" for key, value in named.items() if value is not None]
    preset = "quickstart" if arguments.model == "embedded" else "smollm2"
    return _start(preset_path(preset), overrides, arguments)


def _run(arguments: argparse.Namespace) -> int:
    return _start(config_path(arguments.config), arguments.overrides, arguments)


def _start(path: pathlib.Path, overrides: Sequence[str], arguments: argparse.Namespace) -> int:
    sys.path.append(os.getcwd())  # for a reward function of one's own
    from rich.console import Console

    from drivetrain_ppo.accelerator import check_names
    from drivetrain_ppo.config import differences, load_config
    from drivetrain_ppo.models import check_source
    from drivetrain_ppo.preflight import check_address, check_data_source, check_reward, find_run

    if arguments.resume is not None and "=" in arguments.resume:
        arguments.resume, overrides = "", [arguments.resume, *overrides]
    config = load_config(path, overrides)
    resumed = None
    if arguments.resume is not None:
        resumed = find_run(arguments.resume, config)
        asked, config = config, load_config(resumed / "config.yaml", [*overrides, f"run_dir={resumed}"])
        if changed := differences(asked, config):
            print(f"{path} differs from the run's own config.yaml, which is used, in: {', '.join(changed)}")
    check_names(config.trainer.device, config.rollout.engine, spawn=config.rollout.spawn)
    check_source(config)
    check_data_source(config.data.source)
    check_reward(config.reward.function)
    if os.environ.get("RANK", "0") == "0":
        check_address(config.rollout.listen, keys=config.rollout.keys)
    _heed_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from drivetrain_ppo.launch import die_with_parent

        die_with_parent(os.getppid())
    # Learner and engine take turns on the same cores: a thread that waits must not spin. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from drivetrain_ppo.assemblies import choose_assembly

    summary = choose_assembly(arguments.command, config, os.environ)(config, resumed)
    if summary is not None:
        summary.print(Console())
        if arguments.json:
            print(summary.to_json(), flush=True)
    return 0


def _heed_signals() -> None:
    """SIGINT and SIGTERM end a command in order, children first.

    Python's own handler is put back because a shell starts processes in the background with SIGINT ignored. While the
    loop runs, asyncio cancels it where it next awaits: an exception at any other place could leave a lock held.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: signal.raise_signal(signal.SIGINT))


def _rollout_worker(arguments: argparse.Namespace) -> int:
    from drivetrain_ppo.launch import die_with_parent

    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    _heed_signals()
    from drivetrain_ppo.worker import run_worker

    try:
        run_worker(arguments.join, keys=arguments.keys, timeout=arguments.timeout)
    except (ValueError, OSError) as error:
        raise ConfigError(f"rollout-worker: {' '.join(str(error).split())}") from None
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from drivetrain_transport import make_keys

    try:
        make_keys(arguments.folder)
    except OSError as error:
        raise ConfigError(f"{arguments.folder}: {error.strerror or error}") from None
    print(f"{arguments.folder}: copy this folder to each host and name it in rollout.keys and --keys")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from drivetrain_ppo.export import export

    print(export(pathlib.Path(arguments.checkpoint), pathlib.Path(arguments.folder)))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from drivetrain_ppo.config import load_config, to_yaml

    named, overrides = arguments.config, arguments.overrides
    if named is not None and "=" in named:
        named, overrides = None, [named, *overrides]
    print(to_yaml(load_config(None if named is None else config_path(named), overrides)), end="")
    return 0


def config_path(name: str) -> pathlib.Path:
    """A YAML file, or a preset by its bare name."""
    return preset_path(name) if name in PRESETS and not pathlib.Path(name).exists() else pathlib.Path(name)


def preset_path(name: str) -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("drivetrain_ppo") / "presets" / f"{name}.yaml"))


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "quickstart": _quickstart,
    "run": _run,
    "learner": _run,
    "rollout-worker": _rollout_worker,
    "keys": _keys,
    "export": _export,
    "config": _config,
}
