"""The pieces an assembly puts together: the task, the learners, the engines, the sampler."""

import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from drivetrain_buffer import Ledger, RolloutBuffer
from drivetrain_learner import Learner, PolicyModel, ValueModel, load_model
from drivetrain_rewards import InlineRewards, RewardPool, Rewards, exact_match
from drivetrain_rollout import EngineConfig, EnginePool, PoolConfig, Rollout, derive_seed
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine
from drivetrain_sharding import shard_model
from drivetrain_transport import Endpoint, load_keys

from drivetrain_ppo import embedded, models
from drivetrain_ppo.accelerator import Accelerator, device_variables, visible_devices
from drivetrain_ppo.config import RewardConfig, RunConfig
from drivetrain_ppo.data import PromptData, PromptSource, Tokenizer, load_prompts
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.launch import Child
from drivetrain_ppo.preflight import REWARDS
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.sampling import Sampler
from drivetrain_ppo.warm_start import warm_start

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REPORTS = 2.0
"""Seconds between a worker's reports of what its running responses have: that goes on elsewhere when it dies."""
Progress = Callable[[str], None]
Module = TypeVar("Module", bound=torch.nn.Module)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what."""

    model: str
    """Folder or Hugging Face id that learner and engine start from."""
    tokenizer: Tokenizer
    prompts: PromptData
    stop_token_ids: tuple[int, ...]


def load_task(config: RunConfig, folder: pathlib.Path, *, say: Progress) -> Task:
    """The model, its tokenizer and the prompts. The embedded model is made and warm-started in `folder` first."""
    made = config.model.source == "embedded"
    if made and not folder.is_dir():
        make_embedded(config, folder, say=say)
    source = str(folder) if made else models.resolve_source(config)
    tokenizer = models.load_tokenizer(source)
    prompts = load_prompts(config.data, tokenizer, seed=config.seed)
    if prompts.left_out:
        say(f"{prompts.left_out} prompts are empty or longer than {config.data.max_prompt_tokens} tokens and left out")
    return Task(model=source, tokenizer=tokenizer, prompts=prompts, stop_token_ids=models.stop_token_ids(source))


def make_embedded(config: RunConfig, folder: pathlib.Path, *, say: Progress) -> None:
    """Make the embedded model and warm-start it. `folder` appears when all is done, so that a kill leaves none."""
    draft = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    embedded.make_model(draft, seed=config.seed)
    tokenizer = models.load_tokenizer(str(draft))
    prompts = load_prompts(config.data, tokenizer, seed=config.seed)
    every = [*prompts.train, *prompts.held_out]
    embedded.check_letters(text for prompt in every for text in (prompt.text, prompt.example.ground_truth))
    accuracy = warm_start(
        draft,
        tokenizer,
        prompts.train,
        config.warm_start,
        stop_token_id=models.stop_token_ids(str(draft))[0],
        max_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
        progress=lambda step, accuracy: say(f"warm start: step {step}, greedy accuracy {accuracy:.2f}"),
    )
    say(f"warm-started: greedy accuracy {accuracy:.2f} on fresh training prompts")
    models.make_readable(draft)
    draft.rename(folder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    actor: Learner[PolicyModel]
    critic: Learner[ValueModel]
    reference: Learner[PolicyModel]


def build_learners(config: RunConfig, model: str, accelerator: Accelerator, ranks: Ranks) -> Learners:
    """Actor, critic and reference from one model; sharded over the ranks when there are several."""
    torch.manual_seed(config.seed)
    autocast = None if config.model.dtype == "float32" else DTYPES[config.model.dtype]
    device = device_of(accelerator)

    mesh = dist.device_mesh.init_device_mesh(accelerator.device, (ranks.size,)) if ranks.size > 1 else None

    def laid_out(module: Module) -> Module:
        return module if mesh is None else shard_model(module, mesh)

    # One after the other: no more than one model is whole on a device at a time.
    actor = laid_out(PolicyModel(load_model(model, device=device), autocast=autocast))
    reference = laid_out(PolicyModel(load_model(model, device=device), autocast=autocast).requires_grad_(False))
    critic = laid_out(ValueModel(load_model(model, device=device), autocast=autocast))
    return Learners(
        actor=Learner(actor, config.actor, process_group=ranks.group),
        critic=Learner(critic, config.critic, process_group=ranks.group),
        reference=Learner(reference, config.actor, process_group=ranks.group),
    )


def device_of(accelerator: Accelerator) -> str:
    """This rank's device: with one visible device a rank there is only number 0."""
    if accelerator.device == "cpu":
        return "cpu"
    return f"{accelerator.device}:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def start_workers(
    config: RunConfig, endpoint: Endpoint, logs: pathlib.Path, accelerator: Accelerator
) -> Iterator[Child]:
    """Rollout workers on this machine, each joining `endpoint` and seeing one device.

    They take the devices from the last one backwards, and the learner has the first: with one device they share it.
    """
    devices = visible_devices(accelerator, os.environ)
    keys = [] if config.rollout.keys is None else ["--keys", config.rollout.keys]
    for index in range(config.rollout.workers if config.rollout.spawn else 0):
        yield Child(
            "rollout-worker",
            ["--join", endpoint.address, *keys],
            log=logs / f"rollout-worker-{index}.log",
            environ={
                "OMP_WAIT_POLICY": "PASSIVE",
                "TOKENIZERS_PARALLELISM": "false",
                **(device_variables(accelerator, devices[-1 - index % len(devices)]) if devices else {}),
            },
        )


def listen(config: RunConfig) -> Endpoint:
    keys = None if config.rollout.keys is None else load_keys(config.rollout.keys)
    return Endpoint.bind(config.rollout.listen, protocol=PROTOCOL, keys=keys)


def wait_for_engines(
    config: RunConfig, task: Task, endpoint: Endpoint, accelerator: Accelerator, children: Sequence[Child]
) -> list[RemoteEngine]:
    """Engines of the workers that have joined, each started with this run's model.

    Raises RuntimeError with the end of its log when a worker of ours dies, TimeoutError when too few join in time.
    """
    deadline = time.monotonic() + config.rollout.join_timeout
    while len(endpoint.peers) < config.rollout.workers:
        for child in children:
            child.check()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(endpoint.peers)} of {config.rollout.workers} rollout workers joined {endpoint.address} "
                f"within {config.rollout.join_timeout:g} s"
            )
        time.sleep(0.05)
    settings = engine_config(config, task, accelerator)
    pool = concurrent.futures.ThreadPoolExecutor(config.rollout.workers)
    try:
        starts = [
            pool.submit(
                RemoteEngine,
                peer,
                msgspec.structs.replace(settings, seed=derive_seed(config.seed, index) % 2**32),
                progress=REPORTS,
            )
            for index, peer in enumerate(endpoint.peers[: config.rollout.workers])
        ]
        while concurrent.futures.wait(starts, timeout=0.5, return_when="FIRST_EXCEPTION").not_done:
            for child in children:
                child.check()
        return [start.result() for start in starts]
    except ValueError as error:
        raise ConfigError(f"rollout: {' '.join(str(error).split())}") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a thread that still waits ends with the endpoint


def engine_config(config: RunConfig, task: Task, accelerator: Accelerator) -> EngineConfig:
    rollout = config.rollout
    wanted, most = config.data.max_prompt_tokens + rollout.max_response_tokens, models.max_positions(task.model)
    if rollout.max_model_len is not None and most is not None and rollout.max_model_len > most:
        raise ConfigError(f"rollout.max_model_len: {rollout.max_model_len} is more than the {most} the model can take")
    return EngineConfig(
        engine=rollout.engine,
        model=str(pathlib.Path(task.model).resolve()) if pathlib.Path(task.model).is_dir() else task.model,
        dtype=config.model.dtype,
        device=accelerator.device,
        max_model_len=rollout.max_model_len or min(wanted, most or wanted),
        max_num_seqs=rollout.max_num_seqs,
        memory_fraction=rollout.memory_fraction or accelerator.memory_fraction,
        kv_cache_bytes=rollout.kv_cache_bytes if rollout.engine == "vllm" else None,
        enforce_eager=rollout.enforce_eager,
        engine_args=rollout.engine_args,
        start_timeout=rollout.join_timeout,
    )


def build_rewards(config: RewardConfig) -> Rewards:
    """Exact match is a comparison and runs here; anything else runs in workers that can be killed at the deadline.

    Raises ConfigError when the function cannot be imported. Failures are judged by the sampler, over whole steps.
    """
    if config.function == "exact_match":
        return InlineRewards(exact_match, max_failure_rate=1.0)
    function = REWARDS.get(config.function, config.function)
    try:
        return RewardPool(function, num_workers=config.workers, deadline=config.deadline, max_failure_rate=1.0)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"reward.function: {' '.join(str(error).split())}") from error


def build_sampler(
    config: RunConfig, task: Task, engines: Sequence[RemoteEngine], rewards: Rewards, ledger: Ledger
) -> Sampler:
    def on_stale(rollout: Rollout) -> None:
        ledger.end(rollout.sample_id, "stale")

    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return Sampler(
        pool=EnginePool(
            {str(index): engine for index, engine in enumerate(engines)},
            # Workers do not join later, so there is nobody to wait for.
            PoolConfig(no_engine_timeout=1.0, seed=config.seed),
        ),
        prompts=PromptSource(task.prompts.train, seed=config.seed, shuffle=config.data.shuffle),
        held_out=task.prompts.held_out,
        rewards=rewards,
        buffer=RolloutBuffer(
            samples,
            policy_version=lambda rollout: rollout.min_policy_version,
            max_staleness=config.trainer.max_staleness,
            on_stale=on_stale,
        ),
        ledger=ledger,
        tokenizer=task.tokenizer,
        config=config.rollout,
        stop_token_ids=task.stop_token_ids,
        seed=config.seed,
        max_failure_rate=config.trainer.max_failure_rate,
    )
