"""Which assembly runs a configuration."""

import pathlib
from collections.abc import Callable, Mapping

from drivetrain_telemetry import Summary

from drivetrain_ppo import multi_node, rocm, single_node
from drivetrain_ppo.accelerator import ROCM, choose
from drivetrain_ppo.config import RunConfig

Assembly = Callable[[RunConfig, pathlib.Path | None], Summary | None]

ASSEMBLIES: dict[str, Assembly] = {"single_node": single_node.run, "multi_node": multi_node.run, "rocm": rocm.run}


def choose_assembly(command: str, config: RunConfig, environ: Mapping[str, str]) -> Assembly:
    """ROCm's profile on a HIP build of torch; else `learner`, which torchrun starts, means many nodes."""
    if choose(config.trainer.device, environ) is ROCM:
        return ASSEMBLIES["rocm"]
    return ASSEMBLIES["multi_node" if command == "learner" else "single_node"]
