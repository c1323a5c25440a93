"""Which assembly runs a configuration."""

import pathlib
from collections.abc import Callable, Mapping

from drivetrain_telemetry import Summary

from drivetrain_ppo import multi_node, rocm, single_node
from drivetrain_ppo.accelerator import ROCM, choose
from drivetrain_ppo.config import RunConfig

Assembly = Callable[[RunConfig, pathlib.Path | None], Summary | None]

ASSEMBLIES: dict[str, Assembly] = {
    "single_node": single_node.run,
    "multi_node": multi_node.run,
    "rocm": rocm.run,
    "rocm_multi_node": rocm.run_learner,
}


def choose_assembly(command: str, config: RunConfig, environ: Mapping[str, str]) -> Assembly:
    """`learner`, which torchrun starts, means many nodes, all else one; a HIP build of torch takes the ROCm profile."""
    profile = "rocm" if choose(config.trainer.device, environ) is ROCM else ""
    if command == "learner":
        return ASSEMBLIES["rocm_multi_node" if profile else "multi_node"]
    return ASSEMBLIES[profile or "single_node"]
