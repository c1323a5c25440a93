"""Work for a process that is killed halfway: nothing is lost, and nothing is handled twice.

    python examples/stream_killed_consumer.py

The consumer writes each result and the mark "handled" in one transaction of a journal. What it had not acknowledged
comes again, to the next one, and what the journal has is dropped there.
"""

import contextlib
import subprocess
import sys
import tempfile

from drivetrain_transport import AlreadyHandled, Journal, WorkReceiver, WorkSender

COUNT = 2000


def consume(folder: str) -> None:
    with Journal(f"{folder}/handled.sqlite") as journal:
        with journal.transaction() as database:
            database.execute("CREATE TABLE IF NOT EXISTS lengths (number, length)")
        with WorkReceiver.connect(f"ipc://{folder}/work", type=str, journal=journal, credit=64) as receiver:
            for delivery in receiver.deliveries(timeout=60):
                with contextlib.suppress(AlreadyHandled), journal.handling(delivery) as database:
                    database.execute("INSERT INTO lengths VALUES (?, ?)", (delivery.number, len(delivery.value)))


def produce(folder: str) -> None:
    command = [sys.executable, __file__, folder]
    with WorkSender.bind(f"ipc://{folder}/work") as sender, subprocess.Popen(command) as first:
        for number in range(COUNT // 2):
            sender.send("x" * number, timeout=60)
        first.kill()
        with subprocess.Popen(command) as second:
            for number in range(COUNT // 2, COUNT):
                sender.send("x" * number, timeout=60)
            sender.flush(timeout=60)
            second.kill()
        with Journal(f"{folder}/handled.sqlite") as journal, journal.transaction() as database:
            handled, different = database.execute("SELECT count(*), count(DISTINCT number) FROM lengths").fetchone()
        print(f"sent {COUNT}, again {sender.stats.redelivered}; handled {handled}, different {different}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own_folder:
        consume(sys.argv[1]) if sys.argv[1:] else produce(own_folder)
