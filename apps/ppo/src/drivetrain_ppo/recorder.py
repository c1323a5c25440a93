"""Where the loop's results go: metrics, events, the display, checkpoints."""

import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import msgspec
from drivetrain_buffer import Ledger, LedgerMark
from drivetrain_learner import save_checkpoint
from drivetrain_telemetry import EventLog, Metric, MetricsWriter, RunDisplay, StageTimer, throughput

from drivetrain_ppo.loop import Parts
from drivetrain_ppo.sampling import Collected, Evaluation, SamplerState


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps beside the tensors of actor and critic."""

    sampler: SamplerState
    ledger: LedgerMark
    reward_before: float
    identity: dict[str, Any]
    seconds: float
    """Of all sessions so far."""


class CheckpointRecorder:
    """A rank that writes nothing: it only takes part in gathering what rank 0 saves."""

    def started(self, step: int, evaluation: Evaluation) -> None: ...

    def stepped(
        self, step: int, metrics: dict[str, Metric], collected: Collected, evaluation: Evaluation | None
    ) -> None: ...

    def checkpoint(self, step: int, parts: Parts) -> None:  # noqa: ARG002
        parts.actor.state_dict()
        parts.critic.state_dict()
        parts.ranks.barrier()


class RunRecorder:
    """Rank 0's recorder."""

    def __init__(
        self,
        *,
        metrics: MetricsWriter,
        events: EventLog,
        display: RunDisplay,
        ledger: Ledger,
        checkpoints: pathlib.Path,
        keep_checkpoints: int,
        timer: StageTimer,
        memory: Callable[[], int],
        identity: dict[str, Any],
        before: State | None,
        began: float,
    ) -> None:
        """`memory` gives this process's peak bytes; `before` is the checkpoint's state if the run is resumed."""
        self.reward_before = None if before is None else before.reward_before
        self._seconds_before = 0.0 if before is None else before.seconds
        self._began = began
        self.reward_after: float | None = None
        self._metrics = metrics
        self._events = events
        self._display = display
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._keep = keep_checkpoints
        self._timer = timer
        self._memory = memory
        self._identity = identity

    def seconds(self) -> float:
        """Of this session and those before it, up to the checkpoint it went on from."""
        return self._seconds_before + time.monotonic() - self._began

    def started(self, step: int, evaluation: Evaluation) -> None:
        if self.reward_before is None:
            self.reward_before = evaluation.reward
        self.reward_after = evaluation.reward
        self._display.note(f"held-out reward {_said(evaluation)}")
        if step == 0:
            self._metrics.write(0, _evaluated(evaluation))

    def stepped(
        self, step: int, metrics: dict[str, Metric], collected: Collected, evaluation: Evaluation | None
    ) -> None:
        record: dict[str, Metric] = {**metrics, **self._timer.metrics()}
        record |= throughput(record) | {"memory/learner_gb": self._memory() / 2**30}
        record |= {f"ledger/{outcome}": count for outcome, count in ledger_counts(self._ledger).items()}
        if evaluation is not None:
            self.reward_after = evaluation.reward
            record |= _evaluated(evaluation)
        self._metrics.write(step, record)
        self._display.step(step, record)
        for reason, count in collected.failed.items():
            self._events.write("samples_failed", step=step, reason=reason, count=count)
            self._display.note(f"step {step}: {count} samples failed: {reason}")
        if evaluation is not None:
            self._display.note(f"step {step}: held-out reward {_said(evaluation)}; sampled {collected.example}")

    def checkpoint(self, step: int, parts: Parts) -> None:
        """Write a checkpoint, and keep the newest `keep_checkpoints`."""
        assert parts.sampler is not None
        assert self.reward_before is not None
        tensors = {f"actor/{name}": tensor for name, tensor in parts.actor.state_dict().items()}
        tensors |= {f"critic/{name}": tensor for name, tensor in parts.critic.state_dict().items()}
        state = State(
            sampler=parts.sampler.state(),
            ledger=self._ledger.mark(),
            reward_before=self.reward_before,
            identity=self._identity,
            seconds=self.seconds(),
        )
        saved = save_checkpoint(self._checkpoints, step, tensors, msgspec.to_builtins(state))
        for gone in superseded(self._checkpoints, saved, keep=self._keep):
            shutil.rmtree(gone)
        self._events.write("checkpoint", step=step, path=str(saved))
        parts.ranks.barrier()


def superseded(checkpoints: pathlib.Path, saved: pathlib.Path, *, keep: int) -> list[pathlib.Path]:
    """The checkpoints to delete now that `saved` is complete: all of later steps, which a resume has undone, and of the
    earlier ones what exceeds `keep`. `saved` itself is never among them."""
    others = sorted(path for path in checkpoints.glob("step-*") if path != saved)
    later = [path for path in others if path.name > saved.name]
    earlier = others[: len(others) - len(later)]
    return later + earlier[: max(len(earlier) - (keep - 1), 0)]


def ledger_counts(ledger: Ledger) -> dict[str, int]:
    """Samples issued, and how many ended in each way or have not yet."""
    counts: dict[str, int] = msgspec.to_builtins(ledger.counts())
    return counts


def _said(evaluation: Evaluation) -> str:
    failed = f", {evaluation.failed} more failed" if evaluation.failed else ""
    return f"{evaluation.reward:.3f} (greedy, {evaluation.samples} prompts{failed})"


def _evaluated(evaluation: Evaluation) -> dict[str, Metric]:
    return {"eval/reward": evaluation.reward, "eval/samples": evaluation.samples, "eval/failed": evaluation.failed}
