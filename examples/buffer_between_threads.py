"""Sampling and training at the same time: a bounded buffer between two threads, and a ledger of every sample.

    python examples/buffer_between_threads.py

The producer runs ahead until the buffer is full. What the learner has left behind by more than `MAX_STALENESS` versions
is dropped, and the ledger shows it: at the end every sample has been accounted for.
"""

import dataclasses
import itertools
import tempfile
import threading

from drivetrain_buffer import BufferClosed, Ledger, RolloutBuffer

CAPACITY, BATCH, STEPS, MAX_STALENESS = 32, 8, 10, 1


@dataclasses.dataclass(frozen=True)
class Sample:
    sample_id: int
    policy_version: int


class Learner:
    version = samples = 0

    def train(self, batch: list[Sample]) -> None:
        """Stands for an optimizer step."""
        self.samples += len(batch)
        self.version += 1


def produce(buffer: RolloutBuffer[Sample], ledger: Ledger, learner: Learner) -> None:
    for sample_id in itertools.count():
        ledger.issue(sample_id)
        try:
            buffer.add(Sample(sample_id, learner.version), timeout=10.0)
        except BufferClosed:
            ledger.end(sample_id, "filtered", reason="the run is over")
            return


def main(ledger: Ledger) -> None:
    learner = Learner()
    buffer: RolloutBuffer[Sample] = RolloutBuffer(
        CAPACITY,
        policy_version=lambda sample: sample.policy_version,
        max_staleness=MAX_STALENESS,
        on_stale=lambda sample: ledger.end(sample.sample_id, "stale"),
    )
    producer = threading.Thread(target=produce, args=(buffer, ledger, learner))
    producer.start()
    for _ in range(STEPS):
        batch = buffer.take(BATCH, learner_version=learner.version, timeout=10.0)
        learner.train(batch)
        for sample in batch:
            ledger.end(sample.sample_id, "trained")
    buffer.close()
    producer.join()
    for sample in buffer.drain():
        ledger.end(sample.sample_id, "filtered", reason="the run is over")
    print(ledger.check())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/ledger") as ledger:
        main(ledger)
