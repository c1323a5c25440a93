"""What a run amounts to, once it has ended."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from drivetrain_telemetry.pace import verdict
from drivetrain_telemetry.records import TOKENS_OF_STAGE, Metric, number, stage_seconds


class StageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over all steps."""

    stage: str
    seconds: float
    share: float
    """Of the seconds of all steps, 0 to 1."""
    tokens_per_s: float | None
    """Tokens the stage worked through in a second; None where it works on no tokens."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Reward before and after, where the time went, what became of the samples, and the verdict."""

    run: str
    """Where the run wrote."""
    reward_before: float | None
    reward_after: float | None
    seconds: float
    """Of the whole run, from start to end."""
    steps: int
    stages: tuple[StageTotal, ...]
    """Longest first."""
    ledger: dict[str, int]
    """How many samples were issued, and how many ended in each way."""
    verdict: str

    @classmethod
    def of(
        cls,
        records: Sequence[Mapping[str, Metric]],
        *,
        run: str,
        reward_before: float | None,
        reward_after: float | None,
        seconds: float,
        ledger: Mapping[str, int],
    ) -> "Summary":
        """Sums up the records of a run's steps, as `read_metrics` gives them."""
        return cls(
            run=run,
            reward_before=reward_before,
            reward_after=reward_after,
            seconds=seconds,
            steps=len(records),
            stages=stage_totals(records),
            ledger=dict(ledger),
            verdict=verdict(records).text,
        )

    def to_json(self) -> str:
        """One line: run, reward_before, reward_after, seconds, steps, ledger and verdict."""
        names = ("run", "reward_before", "reward_after", "seconds", "steps", "ledger", "verdict")
        return msgspec.json.encode({name: getattr(self, name) for name in names}).decode()

    def print(self, console: Console) -> None:
        """Prints tables on a terminal, plain lines elsewhere."""
        if console.is_terminal:
            console.print(self._tables())
        else:
            for line in self.lines():
                console.print(line, soft_wrap=True, markup=False, highlight=False)

    def lines(self) -> Iterator[str]:
        """The summary as plain lines."""
        yield f"run      {self.run}"
        yield f"reward   {self._rewards()}"
        yield f"steps    {self.steps} in {self.seconds:.1f} s"
        for total in self.stages:
            yield f"stage    {total.stage}: {total.seconds:.2f} s, {total.share:.0%}{_tokens(total, ', ')}"
        yield f"samples  {_counts(self.ledger)}"
        yield f"verdict  {self.verdict}"

    def _tables(self) -> Group:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("reward", Text(self._rewards(), style="bold green"))
        facts.add_row("steps", f"{self.steps} in {self.seconds:.1f} s")
        facts.add_row("samples", _counts(self.ledger))
        facts.add_row("run", Text(self.run, overflow="fold"))
        stages = Table(
            "stage", "seconds", "share", "tokens/s", title="where the steps' time went", title_justify="left"
        )
        for column in stages.columns[1:]:
            column.justify = "right"
        for total in self.stages:
            stages.add_row(total.stage, f"{total.seconds:.2f}", f"{total.share:.0%}", _tokens(total))
        return Group("", facts, "", stages, "", Text(self.verdict, style="bold"), "")

    def _rewards(self) -> str:
        return f"{_reward(self.reward_before)} before, {_reward(self.reward_after)} after"


def stage_totals(records: Sequence[Mapping[str, Metric]]) -> tuple[StageTotal, ...]:
    """Each stage's seconds, share and tokens per second over all steps, the longest first."""
    seconds: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for record in records:
        for stage, elapsed in stage_seconds(record).items():
            seconds[stage] = seconds.get(stage, 0.0) + elapsed
            count = number(record, TOKENS_OF_STAGE[stage]) if stage in TOKENS_OF_STAGE else None
            if count is not None:
                tokens[stage] = tokens.get(stage, 0.0) + count
    whole = sum(seconds.values())
    return tuple(
        StageTotal(
            stage=stage,
            seconds=elapsed,
            share=elapsed / whole if whole else 0.0,
            tokens_per_s=tokens[stage] / elapsed if stage in tokens and elapsed else None,
        )
        for stage, elapsed in sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    )


def _reward(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _tokens(total: StageTotal, before: str = "") -> str:
    if total.tokens_per_s is None:
        return ""
    return f"{before}{total.tokens_per_s:,.0f}{' tokens/s' if before else ''}"


def _counts(ledger: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in ledger.items()) or "none"
