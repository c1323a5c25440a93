"""What a run leaves on disk, and how it is taken up again.

RUN/config.yaml     the configuration, every default filled in
RUN/metrics.jsonl   one object a step
RUN/events.jsonl    what happened when
RUN/ledger          what became of each sample
RUN/checkpoints/    the newest complete ones
RUN/model/          the embedded model as it was before PPO
RUN/logs/           the output of the run's child processes
"""

import contextlib
import dataclasses
import datetime
import fcntl
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from drivetrain_buffer import Ledger
from drivetrain_learner import Checkpoint, latest_checkpoint, load_checkpoint
from drivetrain_telemetry import EventLog, MetricsWriter, RunDisplay, StageTimer, Summary, read_metrics

from drivetrain_ppo.accelerator import Accelerator, environment
from drivetrain_ppo.config import RunConfig, to_yaml
from drivetrain_ppo.errors import ConfigError
from drivetrain_ppo.parts import Learners
from drivetrain_ppo.preflight import RUNS
from drivetrain_ppo.ranks import Ranks
from drivetrain_ppo.recorder import CheckpointRecorder, RunRecorder, State, ledger_counts
from drivetrain_ppo.sampling import Sampler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What rank 0 holds open while a run goes on."""

    ledger: Ledger
    metrics: MetricsWriter
    events: EventLog
    display: RunDisplay


class RunDirectory:
    """One run's folder, seen by one rank. Rank 0 writes it; all ranks read checkpoints and take part in saving them."""

    def __init__(self, path: pathlib.Path, config: RunConfig, ranks: Ranks) -> None:
        self.path = path
        self.model = path / "model"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self._config = config
        self._ranks = ranks
        self._began = time.monotonic()
        self._resuming = False
        self._made = False
        self._checkpoint: Checkpoint | None = None
        self._files: Files | None = None
        self._recorder: RunRecorder | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: RunConfig, resumed: pathlib.Path | None, ranks: Ranks) -> "Iterator[RunDirectory]":
        """Make the folder of a new run, or go on with an existing one from its last complete checkpoint.

        Raises ConfigError if another process has it open, or if a new run would write into an old one.
        """
        path = ranks.share(str(resumed or _new_path(config)) if ranks.is_main else None, str)
        directory = cls(pathlib.Path(path), config, ranks)
        with contextlib.ExitStack() as stack:
            if ranks.is_main:
                directory._made = not directory.path.exists()
                stack.enter_context(_locked(directory.path, new=resumed is None))
                if resumed is None:
                    directory._write_config()
            ranks.barrier()
            if resumed is not None:
                directory._resuming = True
                found = latest_checkpoint(directory.checkpoints)
                directory._checkpoint = None if found is None else load_checkpoint(found)
            if ranks.is_main:
                directory._files = directory._open_files(stack, resumed=resumed is not None)
            try:
                yield directory
            except BaseException as error:
                directory._stopped(error)
                raise

    @property
    def ledger(self) -> Ledger:
        """Rank 0's ledger, gone back to the checkpoint's mark when the run is resumed."""
        assert self._files is not None, "only rank 0 keeps the ledger"
        return self._files.ledger

    def say(self, text: str) -> None:
        """A line for whoever watches; rank 0 speaks for all."""
        if self._files is not None:
            self._files.display.note(text)

    def working(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show, on rank 0, that something lengthy is under way."""
        return contextlib.nullcontext() if self._files is None else self._files.display.working(text)

    def restore(self, learners: Learners, sampler: Sampler | None) -> int:
        """Bring everything to where the checkpoint left it, and return its step; 0 for a run from the start."""
        if self._checkpoint is None:
            if self._resuming:
                self.say("the run has no checkpoint: it begins anew")
            return 0
        _check_same_run(_state(self._checkpoint), self._config)
        for name, learner in (("actor/", learners.actor), ("critic/", learners.critic)):
            learner.load_state_dict(
                {k.removeprefix(name): v for k, v in self._checkpoint.tensors.items() if k.startswith(name)}
            )
        if sampler is not None:
            sampler.restore(_state(self._checkpoint).sampler)
        step, self._checkpoint = self._checkpoint.step, dataclasses.replace(self._checkpoint, tensors={})
        if self._ranks.is_main:
            self._write_config()
        self.say(f"resumed from the checkpoint of step {step}")
        if step >= self._config.trainer.steps:
            self.say(f"nothing is left to do: the run has had its {self._config.trainer.steps} steps (trainer.steps)")
        return step

    def recorder(self, timer: StageTimer, accelerator: Accelerator) -> RunRecorder | CheckpointRecorder:
        """What the loop reports to on this rank."""
        if self._files is None:
            return CheckpointRecorder()
        self._recorder = RunRecorder(
            metrics=self._files.metrics,
            events=self._files.events,
            display=self._files.display,
            ledger=self._files.ledger,
            checkpoints=self.checkpoints,
            keep_checkpoints=self._config.trainer.keep_checkpoints,
            timer=timer,
            memory=accelerator.peak_memory,
            identity=identity(self._config),
            before=None if self._checkpoint is None else _state(self._checkpoint),
            began=self._began,
        )
        return self._recorder

    def finish(self) -> Summary | None:
        """Prove that the ledger adds up, and sum up the run. None on ranks other than 0."""
        if self._files is None or self._recorder is None:
            return None
        self._files.ledger.check()
        summary = Summary.of(
            [record for record in read_metrics(self.path / "metrics.jsonl") if record["step"] > 0],
            run=str(self.path),
            reward_before=self._recorder.reward_before,
            reward_after=self._recorder.reward_after,
            seconds=self._recorder.seconds(),
            ledger=ledger_counts(self._files.ledger),
        )
        self._files.events.write("finished", **msgspec.json.decode(summary.to_json()))
        return summary

    def _stopped(self, error: BaseException) -> None:
        """Say how to go on. A folder made for a run that a mistake in its configuration
        ended before it began is taken away."""
        if self._files is None:
            return
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._files.events.write(kind, error=f"{type(error).__name__}: {error}")
        if isinstance(error, ConfigError) and self._made and self._recorder is None:
            shutil.rmtree(self.path)
        elif any(self.checkpoints.glob("step-*")):
            self.say(f"{kind}; go on from the last checkpoint with --resume {self.path}")

    def _write_config(self) -> None:
        draft = self.path / "config.yaml.new"
        draft.write_text(to_yaml(self._config))
        draft.replace(self.path / "config.yaml")

    def _open_files(self, stack: contextlib.ExitStack, *, resumed: bool) -> Files:
        checkpoint = self._checkpoint
        ledger_path, metrics_path = self.path / "ledger", self.path / "metrics.jsonl"
        if resumed:
            mark = None if checkpoint is None else _state(checkpoint).ledger
            ledger = Ledger.resume(ledger_path, mark)
            metrics = MetricsWriter.resume(metrics_path, -1 if checkpoint is None else checkpoint.step)
        else:
            ledger, metrics = Ledger(ledger_path), MetricsWriter(metrics_path)
        files = Files(
            ledger=stack.enter_context(ledger),
            metrics=stack.enter_context(metrics),
            events=stack.enter_context(EventLog(self.path / "events.jsonl")),
            display=stack.enter_context(RunDisplay(title=self._config.name, steps=self._config.trainer.steps)),
        )
        files.events.write(
            "resumed" if resumed else "started",
            step=0 if checkpoint is None else checkpoint.step,
            command=sys.argv,
            environment=environment(),
        )
        files.display.note(f"run: {self.path}")
        return files


def _state(checkpoint: Checkpoint) -> State:
    return msgspec.convert(checkpoint.state, State)


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that make a run the one it is: with others, what a checkpoint holds would mean something else."""
    return {
        "seed": config.seed,
        "model.source": config.model.source,
        "data.source": config.data.source,
        "rollout.samples_per_prompt": config.rollout.samples_per_prompt,
    }


def _check_same_run(state: State, config: RunConfig) -> None:
    now = identity(config)
    changed = [
        f"{key} was {before!r}, now {now[key]!r}" for key, before in state.identity.items() if now[key] != before
    ]
    if changed:
        raise ConfigError(f"--resume: {'; '.join(changed)}: a run keeps these, begin a new one for others")


def _new_path(config: RunConfig) -> pathlib.Path:
    if config.run_dir is not None:
        return pathlib.Path(config.run_dir)
    return RUNS / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


@contextlib.contextmanager
def _locked(path: pathlib.Path, *, new: bool) -> Iterator[None]:
    """Hold a run's folder; the lock ends with the process, however that ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir: {path}: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run_dir: {path} is in use by another process") from None
        metrics = path / "metrics.jsonl"
        if new and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(f"run_dir: {path} holds a run; go on with it by --resume, or choose another run_dir")
        yield
