"""ROCm: the same app with AMD's profile.

A HIP build of torch names its devices `cuda` and reaches RCCL as `nccl`, so nothing in the loop differs. What does is
in `accelerator.ROCM`: which variable chooses devices, how much of an MI300X's 192 GB the engine takes, and that
`rollout.engine=vllm_rocm` is accepted for vLLM.
"""

import os
import pathlib

from drivetrain_telemetry import Summary

from drivetrain_ppo import multi_node
from drivetrain_ppo.accelerator import ROCM, check_visible_devices, detect
from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.run import run_ranks


def run(config: RunConfig, resumed: pathlib.Path | None) -> Summary | None:
    """Run PPO on the AMD devices of one node."""
    check()
    return run_ranks(config, resumed, accelerator=ROCM, ranks=Ranks())


def run_learner(config: RunConfig, resumed: pathlib.Path | None) -> Summary | None:
    """Run the part of one of torchrun's ranks."""
    check()
    return multi_node.run_on(ROCM, config, resumed)


def check() -> None:
    """Refuse a torch that is not built for HIP, and device variables that contradict each other."""
    if detect() is not ROCM:
        raise ConfigError("trainer.device: rocm needs a HIP build of torch that sees an AMD device")
    check_visible_devices(ROCM, os.environ)
