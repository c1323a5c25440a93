"""One node: the learner in this process, each engine in a child process that joins over loopback."""

import os
import pathlib

from drivetrain_telemetry import Summary

from drivetrain_ppo.accelerator import choose
from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.run import run_ranks


def run(config: RunConfig, resumed: pathlib.Path | None) -> Summary | None:
    """Run PPO to its end and return what it achieved."""
    return run_ranks(config, resumed, accelerator=choose(config.trainer.device, os.environ), ranks=Ranks())
