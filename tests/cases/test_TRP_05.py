"""TRP-05: a process never ends, because its sockets wait for messages that nobody takes.

zeromq/pyzmq#102, #537, #1002, #991: after an exception or Ctrl-C the interpreter stayed in `context.term()` for ever,
and kept its GPUs.

Here each process ends within seconds, with the exit code and the traceback of what went wrong in it.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

SECONDS = 6.0  # two of which an endpoint's goodbye may take; the rest is a loaded machine's

COMMON = """
import asyncio, os, signal, subprocess, sys, threading, time
import msgspec
from drivetrain_transport import Endpoint, PeerLost, Protocol

class Ask(msgspec.Struct, tag=True):
    data: bytes = b""

class Tell(msgspec.Struct, tag=True):
    size: int

protocol = Protocol(requests=Ask, replies=Tell)

async def never(peer, request):
    await asyncio.sleep(600)

def leave():
    print(time.monotonic(), flush=True)
    raise KeyError("the original error")
"""

PEER = (
    COMMON
    + """
with Endpoint.connect(sys.argv[1], protocol=protocol, handler=never) as endpoint:
    endpoint.wait_closed()
"""
)


def ends(script: str, *arguments: str) -> tuple[int, str]:
    """The exit code and the errors of a script that calls `leave()`; it must end soon after that."""
    code = COMMON + textwrap.dedent(script)
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        try:
            out, errors = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
        end = time.monotonic()
    assert out, errors
    assert end - float(out.splitlines()[-1]) < SECONDS
    return running.returncode, errors


def test_a_message_to_a_peer_that_does_not_exist() -> None:
    code, errors = ends(
        """
        def forgotten():
            try:
                Endpoint.connect("tcp://127.0.0.1:9", protocol=protocol, timeout=600)
            except Exception:
                pass

        threading.Thread(target=forgotten, daemon=True).start()
        server = Endpoint.bind(protocol=protocol)
        client = Endpoint.connect(server.address, protocol=protocol, handler=never)
        peer = server.wait_for_peer(timeout=30)
        client.close()
        try:
            peer.call(Ask(data=bytes(50 << 20)), timeout=30)
        except PeerLost:
            leave()
        """
    )
    assert code == 1
    assert "KeyError: 'the original error'" in errors


def test_a_peer_that_dies_with_a_full_queue() -> None:
    code, errors = ends(
        """
        server = Endpoint.bind(protocol=protocol)
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1], server.address])
        peer = server.wait_for_peer(timeout=30)
        os.kill(child.pid, signal.SIGSTOP)
        failures = []

        def send():
            try:
                peer.call(Ask(data=bytes(32 << 20)), timeout=600)
            except PeerLost as error:
                failures.append(error)

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        while peer.stats.queued < 8:
            time.sleep(0.01)
        child.kill()
        child.wait()
        for thread in threads:
            thread.join(30)
        assert len(failures) == 8, failures
        leave()
        """,
        PEER,
    )
    assert code == 1, errors
    assert "KeyError: 'the original error'" in errors


def test_a_queue_that_is_full_at_the_end() -> None:
    code, errors = ends(
        """
        server = Endpoint.bind(protocol=protocol)
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1], server.address])
        try:
            peer = server.wait_for_peer(timeout=30)
            os.kill(child.pid, signal.SIGSTOP)
            for _ in range(8):
                call = lambda: peer.call(Ask(data=bytes(32 << 20)), timeout=600)
                threading.Thread(target=call, daemon=True).start()
            while peer.stats.queued < 8:
                time.sleep(0.01)
            leave()
        finally:
            child.kill()
            child.wait()
        """,
        PEER,
    )
    assert code == 1, errors
    assert "KeyError: 'the original error'" in errors


def test_an_exception_in_an_asyncio_task() -> None:
    code, errors = ends(
        """
        async def main():
            server = Endpoint.bind(protocol=protocol)
            Endpoint.connect(server.address, protocol=protocol, handler=never)
            peer = server.wait_for_peer(timeout=30)

            async def fail():
                while peer.stats.queued < 3:
                    await asyncio.sleep(0.01)
                leave()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(peer.call_async(Ask(data=bytes(1 << 20)), timeout=600))
                tasks.create_task(fail())

        asyncio.run(main())
        """
    )
    assert code == 1
    assert "KeyError: 'the original error'" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_during_a_call(number: signal.Signals) -> None:
    script = COMMON + textwrap.dedent(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        server = Endpoint.bind(protocol=protocol)
        Endpoint.connect(server.address, protocol=protocol, handler=never)
        peer = server.wait_for_peer(timeout=30)
        threading.Thread(target=lambda: (time.sleep(0.2), print("calling", flush=True)), daemon=True).start()
        peer.call(Ask(), timeout=600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "calling\n"
        start = time.monotonic()
        os.kill(running.pid, number)
        try:
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
        assert time.monotonic() - start < SECONDS
    if number == signal.SIGINT:
        assert running.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in errors
    else:
        assert (running.returncode, errors) == (143, "")
