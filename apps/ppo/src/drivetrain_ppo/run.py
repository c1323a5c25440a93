"""One run on one rank or many: the pieces are made in order, then the loop has them."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import torch
from drivetrain_learner import PolicyModel
from drivetrain_rollout import EngineInfo
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_telemetry import StageTimer, Summary
from drivetrain_transport import Endpoint

from drivetrain_ppo import models
from drivetrain_ppo.accelerator import Accelerator, resolve, visible_devices
from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.launch import Child
from drivetrain_ppo.loop import Parts, train
from drivetrain_ppo.parts import (
    DTYPES,
    Task,
    build_learners,
    build_rewards,
    build_sampler,
    device_of,
    listen,
    load_task,
    start_workers,
    wait_for_engines,
)
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.run_dir import RunDirectory
from drivetrain_ppo.weights import Push, SharedWeights, gather


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutSide:
    """The address that workers join, and those of them that are our own children."""

    endpoint: Endpoint
    children: Sequence[Child]


@contextlib.contextmanager
def rollout_side(
    config: RunConfig, directory: RunDirectory, accelerator: Accelerator, ranks: Ranks
) -> Iterator[RolloutSide | None]:
    """On rank 0: listen, and start the workers of this machine; on leaving, say goodbye and see them end."""
    if not ranks.is_main:
        yield None
        return
    with contextlib.ExitStack() as stack:
        endpoint, children = listen(config), list[Child]()
        try:
            for child in start_workers(config, endpoint, directory.logs, accelerator):
                children.append(stack.enter_context(child))
            if not config.rollout.spawn:
                directory.say(f"waiting for {config.rollout.workers} rollout workers to join {endpoint.address}")
            yield RolloutSide(endpoint, children)
        except Exception as error:
            for child in children:
                child.explain(error)
            raise
        finally:
            endpoint.close()


def prepare(config: RunConfig, directory: RunDirectory, ranks: Ranks) -> tuple[str, Task | None]:
    """The model that all ranks start from, and rank 0's task."""
    task = load_task(config, directory.model, say=directory.say) if ranks.is_main else None
    return ranks.share(None if task is None else task.model, str), task


@contextlib.contextmanager
def weight_path(
    config: RunConfig, learner: PolicyModel, engines: Sequence[RemoteEngine], accelerator: Accelerator, ranks: Ranks
) -> Iterator[Callable[[PolicyModel, int], Push]]:
    """How weights reach the engines: those on our device read our memory, if they can; named tensors reach any.

    Raises ConfigError when shared memory is asked for and cannot be had.
    """
    dtype = DTYPES[config.model.dtype]
    obstacle = obstacle_to_sharing(config, [engine.info for engine in engines], accelerator, ranks)
    if obstacle is None:
        try:
            shared = SharedWeights(learner, [engine.info for engine in engines], dtype=dtype)
        except ValueError as error:
            obstacle = str(error)
        else:
            with contextlib.closing(shared):
                yield lambda _, version: shared.push(version)
            return
    if config.rollout.weight_sync == "shared":
        raise ConfigError(f"rollout.weight_sync: shared is not possible: {obstacle}")
    yield lambda module, version: gather(module, version, dtype=dtype, engines=len(engines))


def obstacle_to_sharing(
    config: RunConfig, engines: Sequence[EngineInfo], accelerator: Accelerator, ranks: Ranks
) -> str | None:
    """Why engines cannot read the learner's memory, if they cannot."""
    if config.rollout.weight_sync == "sent":
        return "the configuration says so"
    if ranks.size > 1:
        return f"the learner has {ranks.size} ranks"
    if not config.rollout.spawn:
        return "workers may be on other machines"
    if accelerator.device != "cpu" and len(visible_devices(accelerator, os.environ)) > 1:
        return "learner and engines have devices of their own"
    unable = sorted({f"{info.engine} on {info.device}" for info in engines if not info.can_write})
    return f"{', '.join(unable)} cannot be written in place" if unable else None


def run_ranks(
    config: RunConfig, resumed: pathlib.Path | None, *, accelerator: Accelerator, ranks: Ranks
) -> Summary | None:
    """Run this rank's part from start to end. Rank 0 returns what the run achieved.

    The workers are started first, so that they are there when the model is.
    """
    config = resolve(config, accelerator)
    models.silence_progress_bars()
    with (
        RunDirectory.open(config, resumed, ranks) as directory,
        build_rewards(config.reward) if ranks.is_main else contextlib.nullcontext() as rewards,
        rollout_side(config, directory, accelerator, ranks) as side,
    ):
        model, task = prepare(config, directory, ranks)
        learners = build_learners(config, model, accelerator, ranks)
        sampler, engines = None, list[RemoteEngine]()
        if side is not None and task is not None and rewards is not None:
            with directory.working(f"starting {config.rollout.engine}"):
                engines = wait_for_engines(config, task, side.endpoint, accelerator, side.children)
            sampler = build_sampler(config, task, engines, rewards, directory.ledger)
        timer = StageTimer(synchronize=torch.cuda.synchronize if accelerator.device != "cpu" else lambda: None)
        with weight_path(config, learners.actor.module, engines, accelerator, ranks) as push:
            parts = Parts(
                config=config,
                ranks=ranks,
                device=device_of(accelerator),
                actor=learners.actor,
                critic=learners.critic,
                reference=learners.reference,
                sampler=sampler,
                push=push,
                timer=timer,
                recorder=directory.recorder(timer, accelerator),
                start_step=directory.restore(learners, sampler),
            )
            asyncio.run(_train_and_close(parts))
        return directory.finish()


async def _train_and_close(parts: Parts) -> None:
    try:
        await train(parts)
    finally:
        if parts.sampler is not None:
            await parts.sampler.close()
