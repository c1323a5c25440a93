"""TRP-07: pickles taken from a socket that listens on all interfaces: whoever reaches the port runs code.

vllm-project/vllm PR 17197 (CVE-2025-32444), vllm-project/vllm#12055, sgl-project/sglang PR 21435,
ModelTC/LightLLM#1413.

Here what a single-node run listens on is loopback or a path, a pickle is refused like any other noise, and the process
goes on serving.
"""

import os
import pickle  # noqa: TID251  # to see that it is refused
import random
import socket
import struct
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
from drivetrain_rollout import EngineConfig
from drivetrain_rollout.remote import PROTOCOL as ROLLOUT
from drivetrain_rollout.remote import RemoteEngine, serve
from drivetrain_rollout.testing import ScriptedEngine
from drivetrain_transport import Endpoint, FrameError, Peer, Protocol, decode
from waiting import wait_until


class Ask(msgspec.Struct, tag=True):
    x: int


class Tell(msgspec.Struct, tag=True):
    x: int


PROTOCOL = Protocol(requests=Ask, replies=Tell)


async def answer(_: Peer, request: Ask) -> Tell:
    return Tell(x=request.x + 1)


def assert_serves(server: Endpoint) -> None:
    with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
        assert client.peer.call(Ask(x=1), timeout=10) == Tell(x=2)


def listening() -> set[str]:
    """The hexadecimal addresses on which this process listens, ports left out."""
    sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_single_node_run_listens_on_loopback_only() -> None:
    with socket.socket() as everywhere:  # a control: the table shows what this test looks for
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        assert "00000000" in listening()
    before = listening()
    with Endpoint.bind(protocol=ROLLOUT) as controller, Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        worker = threading.Thread(
            target=serve,
            args=(controller.address,),
            kwargs={"factory": lambda _: ScriptedEngine(), "name": "worker"},
        )
        worker.start()
        engine = RemoteEngine(controller.wait_for_peer(timeout=30), EngineConfig(engine="scripted", model="none"))
        assert_serves(server)
        assert engine.info.vocab_size > 0
        assert listening() - before <= {"0100007F"}
        assert "0100007F" in listening()
        controller.close()
        worker.join(30)
        assert not worker.is_alive()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_listening_everywhere_takes_keys(address: str) -> None:
    with pytest.raises(ValueError, match=r"can be reached from other hosts, and there are no keys"):
        Endpoint.bind(address, protocol=PROTOCOL)


class Touch:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_executed(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    payload = pickle.dumps(Touch(touched), protocol=protocol)
    pickle.loads(payload).close()  # noqa: S301  # a control: it would do so
    touched.unlink()

    for frames in ([payload], [b"DT<\x01" + payload]):
        for kind in (Ask, object, msgspec.Raw):
            try:
                decode(frames, kind)
            except FrameError:
                continue
            assert kind is msgspec.Raw  # bytes that nobody has looked at
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(server.address)
            stranger.send(payload)
            stranger.send(b"DTE\x01" + payload)
            wait_until(lambda: server.refused == 2, "two refusals")
        assert_serves(server)
    assert not touched.exists()


def raw(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_to_the_end(connection: socket.socket) -> None:
    """Returns when the other side has closed; the socket's timeout bounds each read."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_noise_and_a_header_of_8_gib_are_refused_and_the_process_lives() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        for seed in range(10):
            with raw(server.address) as stranger:  # not even ZeroMQ's protocol
                stranger.sendall(random.Random(seed).randbytes(1000))
        assert_serves(server)
        refused = server.refused  # ZeroMQ may take the start of it for short messages of an old version

        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(server.address)
            stranger.send(random.Random(11).randbytes(1000))
            wait_until(lambda: server.refused > refused, "a refusal")

        before = resident_bytes()
        with raw(server.address) as stranger:
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            ready = (
                b"\x05READY\x0bSocket-Type" + struct.pack(">I6s", 6, b"DEALER") + b"\x08Identity" + struct.pack(">I", 0)
            )
            stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
            stranger.sendall(b"\x02" + struct.pack(">Q", 8 << 30) + b"start")
            read_to_the_end(stranger)
        assert resident_bytes() - before < 64 << 20
        assert_serves(server)
