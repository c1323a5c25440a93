"""Metrics, stage timing, the verdict, and the live display of a run."""

from drivetrain_telemetry.display import COLUMNS, Column, RunDisplay
from drivetrain_telemetry.events import EventLog, read_events
from drivetrain_telemetry.metrics import MetricsWriter, read_metrics
from drivetrain_telemetry.pace import RULES, Rule, Verdict, verdict
from drivetrain_telemetry.records import Metric, throughput
from drivetrain_telemetry.summary import StageTotal, Summary
from drivetrain_telemetry.timing import StageTimer

__all__ = [
    "COLUMNS",
    "RULES",
    "Column",
    "EventLog",
    "Metric",
    "MetricsWriter",
    "Rule",
    "RunDisplay",
    "StageTimer",
    "StageTotal",
    "Summary",
    "Verdict",
    "read_events",
    "read_metrics",
    "throughput",
    "verdict",
]
