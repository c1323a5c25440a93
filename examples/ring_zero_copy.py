"""Arrays to another process through shared memory: written once, and read where they lie.

    python examples/ring_zero_copy.py

`send` copies into the ring, and that is the only copy. A record's bytes stay as they are while one of its arrays lives;
`lease.copy()` is for what is kept for long.
"""

import subprocess
import sys

import msgspec
import numpy as np
from drivetrain_transport import Ring

STEPS, SIZE = 5, 1 << 20


class Batch(msgspec.Struct):
    step: int
    values: np.ndarray


def read(address: str) -> None:
    with Ring.attach(address) as ring:
        for _ in range(STEPS):
            with ring.receive(Batch, timeout=60) as lease:
                batch = lease.message
                kind = "its own memory" if batch.values.flags.owndata else "the ring's memory"
                print(f"step {batch.step}: mean {batch.values.mean():g}, in {kind}")


def write() -> None:
    values = np.empty(SIZE, np.float32)
    with Ring.create("batches", 4 * values.nbytes) as ring, subprocess.Popen([sys.executable, __file__, ring.address]):
        for step in range(STEPS):
            values.fill(step)  # sent is sent: the array may be used again at once
            ring.send(Batch(step, values), timeout=60)


if __name__ == "__main__":
    if sys.argv[1:]:
        read(sys.argv[1])
    else:
        write()
