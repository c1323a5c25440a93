"""Life and death of a connection: killed and frozen processes, cut and slow wires, late starts, bounded exits."""

import asyncio
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from drivetrain_transport import Endpoint, Keys, Peer, PeerLost, Protocol, make_keys
from waiting import wait_until

WORKER = """
import sys, time, msgspec
from drivetrain_transport import Endpoint, Protocol, load_keys

class Ask(msgspec.Struct, tag=True):
    what: str
    data: bytes = b""

class Tell(msgspec.Struct, tag=True):
    size: int

async def answer(peer, request):
    if request.what == "hold the interpreter":
        start = time.monotonic()
        while time.monotonic() - start < 2.5:
            sum(range(20_000_000))  # one call of C code that never lets another thread run
        return Tell(size=-1)
    if request.what == "wait":
        import asyncio
        print("waiting\\n", end="", flush=True)
        await asyncio.sleep(60)
    return Tell(size=len(request.data))

protocol = Protocol(requests=Ask, replies=Tell)
keys = load_keys(sys.argv[2]) if sys.argv[2:] and not sys.argv[2].isdigit() else None
"""

CONNECT = (
    WORKER
    + """
with Endpoint.connect(sys.argv[1], protocol=protocol, handler=answer, name="worker", keys=keys) as endpoint:
    print("joined\\n", end="", flush=True)
    print(endpoint.wait_closed(), flush=True)
"""
)

BIND = (
    WORKER
    + """
with Endpoint.bind(sys.argv[1], protocol=protocol, handler=answer, keys=keys, liveness=1.0) as endpoint:
    print(endpoint.address, flush=True)
    sys.stdin.read()
"""
)


class Ask(msgspec.Struct, tag=True):
    what: str
    data: bytes = b""


class Tell(msgspec.Struct, tag=True):
    size: int


PROTOCOL = Protocol(requests=Ask, replies=Tell)


async def answer(peer: Peer, request: Ask) -> Tell:
    return Tell(size=len(request.data))


@contextmanager
def process(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A second Python process; it is gone when the block ends."""
    running = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def line(running: "subprocess.Popen[str]") -> str:
    assert running.stdout is not None
    text = running.stdout.readline()
    assert text, "the process ended: " + (running.stderr.read() if running.stderr else "")
    return text.strip()


def test_a_killed_worker_is_noticed_at_once_and_its_call_fails() -> None:
    with Endpoint.bind(protocol=PROTOCOL, liveness=30) as server, process(CONNECT, server.address) as worker:
        peer = server.wait_for_peer(timeout=30)
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                peer.call(Ask(what="wait"), timeout=60)
            except PeerLost as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert {line(worker), line(worker)} == {"joined", "waiting"}
        worker.send_signal(signal.SIGKILL)
        thread.join(timeout=5)  # far below the liveness: the broken connection is the sign
        assert [str(error) for error in failed] == [
            "worker was lost (its connection broke, or it was silent for 30 s): Ask gets no reply"
        ]
        assert peer.state == "lost"
        assert server.peers == ()


def test_a_killed_controller_is_noticed_at_once_and_its_successor_is_joined_anew(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    for _ in range(2):
        with process(BIND, address) as controller:
            assert line(controller) == address
            with Endpoint.connect(address, protocol=PROTOCOL, handler=answer, timeout=30) as endpoint:
                assert endpoint.peer.call(Ask(what="count", data=b"abc"), timeout=10).size == 3
                controller.send_signal(signal.SIGKILL)
                assert endpoint.wait_closed(timeout=5) == "lost"
                with pytest.raises(PeerLost, match=f"^{re.escape(address)} was lost .*: Ask gets no reply$"):
                    endpoint.peer.call(Ask(what="count"), timeout=10)


def test_a_frozen_worker_is_lost_within_the_liveness() -> None:
    with Endpoint.bind(protocol=PROTOCOL, liveness=1.0) as server, process(CONNECT, server.address) as worker:
        peer = server.wait_for_peer(timeout=30)
        joined = time.monotonic()
        while time.monotonic() < joined + 0.5:  # the first heartbeat is sent a quarter of a second after joining
            peer.call(Ask(what="count"), timeout=10)
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"silent for 1 s"):
            while True:  # it may answer once more before the signal reaches it
                peer.call(Ask(what="count"), timeout=20)
        worker.send_signal(signal.SIGCONT)
        assert (line(worker), line(worker)) == ("joined", "lost")  # it learns of it when it comes back


def test_a_frozen_controller_is_lost_within_the_liveness(tmp_path: Path) -> None:
    with process(BIND, f"ipc://{tmp_path}/s") as controller:
        address = line(controller)
        with Endpoint.connect(address, protocol=PROTOCOL, timeout=30) as endpoint:
            controller.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            assert endpoint.wait_closed(timeout=20) == "lost"
            assert 0.5 < time.monotonic() - start < 10


def test_a_held_interpreter_is_no_death() -> None:
    with Endpoint.bind(protocol=PROTOCOL, liveness=0.5) as server, process(CONNECT, server.address):
        peer = server.wait_for_peer(timeout=30)
        assert peer.call(Ask(what="hold the interpreter"), timeout=60).size == -1
        assert peer.state == "open"


def test_the_worker_process_ends_by_itself_when_the_controller_says_goodbye() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server, process(CONNECT, server.address) as worker:
        server.wait_for_peer(timeout=30)
        server.close()
        assert (line(worker), line(worker)) == ("joined", "goodbye")
        assert worker.wait(timeout=10) == 0


class Proxy:
    """A wire between two endpoints that can be slow, silent or cut. Bytes per second hold for each connection."""

    def __init__(self, target: str, *, rate: float = float("inf")) -> None:
        self.target = target.removeprefix("tcp://").rpartition(":")
        self.rate = rate
        self.silent = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(ready,))
        self.thread.start()
        assert ready.wait(10)

    def run(self, ready: threading.Event) -> None:
        async def main() -> None:
            self.stopped = asyncio.Event()
            server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
            self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await self.stopped.wait()
            server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        self.loop.run_until_complete(main())
        self.loop.close()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.target[0], int(self.target[2]), limit=1 << 16)
        self.writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self.forward(source, sink))
            self.tasks.add(task)

    async def forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                while self.silent.is_set():
                    await asyncio.sleep(0.01)
                sink.write(data)
                await sink.drain()
                await asyncio.sleep(len(data) / self.rate)
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()

    def cut(self) -> None:
        self.loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self.writers])

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join(10)


@contextmanager
def over_a_proxy(
    *, liveness: float, rate: float = float("inf"), keys: Keys | None = None
) -> Iterator[tuple[Endpoint, Endpoint, Proxy]]:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer, liveness=liveness, keys=keys) as server:
        proxy = Proxy(server.address, rate=rate)
        try:
            with Endpoint.connect(proxy.address, protocol=PROTOCOL, handler=answer, name="far", keys=keys) as client:
                yield server, client, proxy
        finally:
            proxy.close()


def test_a_message_that_travels_longer_than_the_liveness_is_no_silence() -> None:
    with over_a_proxy(liveness=0.5, rate=4 << 20) as (server, client, _):
        peer = server.wait_for_peer(timeout=10)
        start = time.monotonic()
        assert peer.call(Ask(what="count", data=bytes(6 << 20)), timeout=60).size == 6 << 20
        assert time.monotonic() - start > 1.0  # twice the liveness on the wire
        assert client.peer.call(Ask(what="count", data=bytes(6 << 20)), timeout=60).size == 6 << 20
        assert (peer.state, client.peer.state) == ("open", "open")


def test_a_large_encrypted_message_is_no_silence(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    with Endpoint.bind(protocol=PROTOCOL, liveness=1.0, keys=keys) as server:
        with process(CONNECT, server.address, str(tmp_path)):
            peer = server.wait_for_peer(timeout=30)
            # As one frame it would keep each side's input and output busy for longer than the liveness.
            assert peer.call(Ask(what="count", data=bytes(400 << 20)), timeout=100).size == 400 << 20
            assert peer.state == "open"


def test_a_cut_wire_loses_both_sides_and_a_new_connection_is_a_new_peer() -> None:
    with over_a_proxy(liveness=30) as (server, client, proxy):
        first = server.wait_for_peer(timeout=10)
        proxy.cut()
        assert client.wait_closed(timeout=5) == "lost"
        wait_until(lambda: first.state == "lost", "the binding side to notice", timeout=5)
        with Endpoint.connect(proxy.address, protocol=PROTOCOL, handler=answer, name="far") as again:
            assert again.peer.call(Ask(what="count", data=b"ab"), timeout=10).size == 2
            second = server.wait_for_peer(timeout=10)
            assert second is not first
            assert second.call(Ask(what="count", data=b"abc"), timeout=10).size == 3


def test_a_silent_wire_loses_both_sides_within_the_liveness() -> None:
    with over_a_proxy(liveness=0.6) as (server, client, proxy):
        peer = server.wait_for_peer(timeout=10)
        proxy.silent.set()
        assert client.wait_closed(timeout=10) == "lost"
        wait_until(lambda: peer.state == "lost", "the binding side to notice", timeout=5)
        proxy.silent.clear()


def test_connecting_first_is_fine(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    joined: list[int] = []

    def early() -> None:
        with Endpoint.connect(address, protocol=PROTOCOL, timeout=30) as client:
            joined.append(client.peer.call(Ask(what="count", data=b"abc"), timeout=10).size)

    thread = threading.Thread(target=early)
    thread.start()
    wait_until(lambda: any(t.name.startswith("drivetrain-transport") for t in threading.enumerate()), "the client", 10)
    with Endpoint.bind(address, protocol=PROTOCOL, handler=answer) as server:
        server.wait_for_peer(timeout=10)
        thread.join(timeout=10)
    assert joined == [3]


def test_nobody_there_is_a_timeout_that_names_the_address() -> None:
    with pytest.raises(TimeoutError, match=r"^no endpoint answered at tcp://127.0.0.1:9 within 0.3 s"):
        Endpoint.connect("127.0.0.1:9", protocol=PROTOCOL, timeout=0.3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain-transport")]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
def test_a_wait_without_an_end_is_refused(seconds: float) -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
            for use in (
                lambda: Endpoint.connect(server.address, protocol=PROTOCOL, timeout=seconds),
                lambda: server.wait_for_peer(timeout=seconds),
                lambda: server.wait_for_peers(2, timeout=seconds),
                lambda: client.wait_closed(timeout=seconds),
                lambda: client.peer.call(Ask(what="count"), timeout=seconds),
                lambda: asyncio.run(client.peer.call_async(Ask(what="count"), timeout=seconds)),
            ):
                with pytest.raises(ValueError, match=rf"timeout is {seconds}: every wait has an end"):
                    use()
            assert client.peer.call(Ask(what="count", data=b"ab"), timeout=10).size == 2


def exits(script: str, *arguments: str) -> tuple[float, int, str]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WORKER + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return time.monotonic() - start, done.returncode, done.stderr


def test_a_process_that_raises_exits_soon_with_its_own_error_whatever_is_unsent() -> None:
    seconds, code, errors = exits("Endpoint.connect('127.0.0.1:9', protocol=protocol, timeout=0.3)")
    assert (code, "TimeoutError: no endpoint answered at tcp://127.0.0.1:9" in errors) == (1, True)
    assert seconds < 10

    seconds, code, errors = exits("endpoint = Endpoint.bind(protocol=protocol)\nraise KeyError('the first error')")
    assert (code, "KeyError: 'the first error'" in errors) == (1, True)
    assert seconds < 10


def test_a_process_with_a_full_queue_to_a_frozen_peer_exits_soon(tmp_path: Path) -> None:
    with process(BIND, f"ipc://{tmp_path}/s") as frozen:
        seconds, code, errors = exits(
            """
            import os, signal, threading
            endpoint = Endpoint.connect(sys.argv[1], protocol=protocol, handler=answer)
            os.kill(int(sys.argv[2]), signal.SIGSTOP)
            for _ in range(4):
                call = lambda: endpoint.peer.call(Ask(what="count", data=bytes(50 << 20)), timeout=60)
                threading.Thread(target=call, daemon=True).start()
            try:
                while True:
                    endpoint.peer.call(Ask(what="count"), timeout=0.5)
            except (TimeoutError, ConnectionError):
                raise KeyError("the first error") from None
            """,
            line(frozen),
            str(frozen.pid),
        )
        frozen.send_signal(signal.SIGCONT)
    assert (code, "KeyError: 'the first error'" in errors) == (1, True), errors
    assert seconds < 15
