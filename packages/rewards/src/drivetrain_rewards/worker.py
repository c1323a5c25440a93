"""The worker process of a `RewardPool`: `python -m drivetrain_rewards.worker READER WRITER`, two inherited pipe ends.

It is told which function to import, and then calls it for one request after the other, in its main thread. Its
standard output is not the channel, so the function may print what it likes. It ends when the pipe does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

from drivetrain_rewards._channel import Channel, Ready, Setup
from drivetrain_rewards._judge import judge, load_function
from drivetrain_rewards._types import RewardRequest

_PR_SET_PDEATHSIG = 1


def main(reader: int, writer: int) -> None:
    """Serve until the pool closes its end."""
    for descriptor in (reader, writer):
        os.set_inheritable(descriptor, False)
    _die_with_the_pool()
    channel = Channel(reader, writer)
    try:
        setup = msgspec.json.decode(channel.receive(None), type=Setup)
        sys.path[:] = setup.sys_path
        try:
            function = load_function(setup.function)
        except ValueError as error:
            channel.send(msgspec.json.encode(Ready(error=str(error))), None)
            return
        channel.send(msgspec.json.encode(Ready()), None)
        decoder = msgspec.json.Decoder(RewardRequest)
        while True:
            request = decoder.decode(channel.receive(None))
            outcome = judge(function, request)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was left behind is not the next sample's
            channel.send(msgspec.json.encode(outcome), None)
    except (EOFError, BrokenPipeError):
        return  # the pool is gone


def _die_with_the_pool() -> None:
    # A worker in an endless loop does not see that its pipe has ended; the kernel does (Linux).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
