"""A child by fork has none of the threads of its parent's channels: it is told so, and at once."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from drivetrain_transport import Publisher, WorkReceiver, WorkSender

receiver = WorkReceiver.bind(f"ipc://{sys.argv[1]}/work", type=int)
sender = WorkSender.connect(receiver.address)
publisher = Publisher.bind(f"ipc://{sys.argv[1]}/news")
uses = {
    "send": lambda: sender.send(1, timeout=30),
    "receive": lambda: receiver.receive(timeout=30),
    "publish": lambda: publisher.publish(1),
}
if not (child := os.fork()):
    start = time.monotonic()
    try:
        uses[sys.argv[2]]()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0 if time.monotonic() - start < 5 else 1)
assert os.waitpid(child, 0)[1] == 0
sender.send(7, timeout=30)
with receiver.receive(timeout=30) as delivery:
    print(delivery.value, flush=True)
for channel in (sender, receiver, publisher):
    channel.close()
"""


@pytest.mark.parametrize("use", ["send", "receive", "publish"])
def test_a_forked_child_is_told_and_the_parent_goes_on(tmp_path: Path, use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, tmp_path, use], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told, value = done.stdout.splitlines()
    assert "from which this one was forked: make one here" in told
    assert value == "7"
