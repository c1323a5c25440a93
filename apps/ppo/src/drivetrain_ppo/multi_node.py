"""Many nodes: learner ranks in one torch process group, rollout workers that join rank 0 by address.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m drivetrain_ppo learner CONFIG     on each learner node
    drivetrain-ppo rollout-worker --join HOST:PORT --keys FOLDER                    on each rollout node

Rank 0 samples and shares what it collected; every rank trains on its part of it. `RUN` lies on a file system that all
learner nodes see.
"""

import contextlib
import datetime
import os
import pathlib
from collections.abc import Iterator

import torch.distributed as dist
from drivetrain_telemetry import Summary

from drivetrain_ppo.accelerator import Accelerator, choose
from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.parts import device_of
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.run import run_ranks


def run(config: RunConfig, resumed: pathlib.Path | None) -> Summary | None:
    """Run this rank's part of PPO. Rank 0 returns what the run achieved."""
    return run_on(choose(config.trainer.device, os.environ), config, resumed)


def run_on(accelerator: Accelerator, config: RunConfig, resumed: pathlib.Path | None) -> Summary | None:
    """The same on a given accelerator."""
    with process_group(accelerator, timeout=longest_wait(config)) as ranks:
        return run_ranks(config, resumed, accelerator=accelerator, ranks=ranks)


def longest_wait(config: RunConfig) -> float:
    """Seconds that a rank may rightly wait for rank 0: while workers join and load, or a step is sampled and scored."""
    return 120 + 2 * config.rollout.join_timeout + 2 * config.rollout.timeout


@contextlib.contextmanager
def process_group(accelerator: Accelerator, *, timeout: float) -> Iterator[Ranks]:
    """The group that torchrun describes, with gloo beside it for messages between hosts' memories.

    A rank that waits longer than `timeout` seconds for the others fails, and torchrun ends the rest.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start learner ranks with torchrun -m drivetrain_ppo learner CONFIG"
        )
    limit = datetime.timedelta(seconds=timeout)
    if accelerator.device != "cpu":
        import torch

        torch.cuda.set_device(device_of(accelerator))
    dist.init_process_group(accelerator.collectives, timeout=limit)
    try:
        control = (
            dist.group.WORLD if accelerator.collectives == "gloo" else dist.new_group(backend="gloo", timeout=limit)
        )
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD, control=control)
    finally:
        dist.destroy_process_group()
