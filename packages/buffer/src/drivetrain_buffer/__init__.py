"""What waits between sampling and training: bounded, staleness-aware, with a lossless sample ledger."""

from drivetrain_buffer._records import Outcome
from drivetrain_buffer.ledger import Ledger, LedgerCounts, LedgerMark, read_ledger
from drivetrain_buffer.rollout_buffer import BufferClosed, BufferCounts, RolloutBuffer

__all__ = [
    "BufferClosed",
    "BufferCounts",
    "Ledger",
    "LedgerCounts",
    "LedgerMark",
    "Outcome",
    "RolloutBuffer",
    "read_ledger",
]
