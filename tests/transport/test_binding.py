"""Who is let in: versions, keys, noise, forged messages. The process lives and serves the others in every case."""

import pickle  # noqa: TID251  # to see that it is refused
import socket
import struct
from pathlib import Path

import msgspec
import pytest
import zmq
from drivetrain_transport import Endpoint, Keys, Peer, PeerRefused, Protocol, make_keys
from drivetrain_transport._endpoints.envelopes import Attach, Goodbye, Hello, Reply, Request, pack, unpack
from waiting import wait_until


class Ask(msgspec.Struct, tag=True):
    x: int


class Tell(msgspec.Struct, tag=True):
    x: int


PROTOCOL = Protocol(requests=Ask, replies=Tell, version="7")


async def answer(peer: Peer, request: Ask) -> Tell:
    return Tell(x=request.x + 1)


def assert_serves(server: Endpoint) -> None:
    with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
        assert client.peer.call(Ask(x=1), timeout=10) == Tell(x=2)


def test_another_version_is_refused_with_both_versions_named() -> None:
    other = Protocol(requests=Ask, replies=Tell, version="8")
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        with pytest.raises(PeerRefused, match=r"refused us: the protocol here is version '7', yours is '8'"):
            Endpoint.connect(server.address, protocol=other, timeout=10)
        wait_until(lambda: server.refused == 1, "the count, which follows the answer")
        assert server.peers == ()
        assert_serves(server)


def test_a_stranger_who_knows_the_public_key_is_refused(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "run")
    stranger = Keys(public=keys.public, secret=make_keys(tmp_path / "own").secret)
    with Endpoint.bind(protocol=PROTOCOL, handler=answer, keys=keys) as server:
        with pytest.raises(PeerRefused, match=r"you do not hold the keys of this run"):
            Endpoint.connect(server.address, protocol=PROTOCOL, keys=stranger, timeout=10)
        wait_until(lambda: server.refused == 1, "the count, which follows the answer")


def test_wrong_keys_end_in_a_timeout_that_asks_for_them_and_missing_ones_in_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, others = make_keys(tmp_path / "run"), make_keys(tmp_path / "other")
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        with pytest.raises(PeerRefused, match=f"{server.address} refused us: we have keys, and it has none"):
            Endpoint.connect(server.address, protocol=PROTOCOL, keys=keys, timeout=60)
        assert_serves(server)
    caplog.clear()
    with Endpoint.bind(protocol=PROTOCOL, handler=answer, keys=keys) as server:
        with pytest.raises(
            TimeoutError,
            match=rf"no endpoint answered at {server.address} within 0.5 s \(.* \d times so far: are the keys the same",
        ):
            Endpoint.connect(server.address, protocol=PROTOCOL, keys=others, timeout=0.5)
        assert caplog.text.count("the connection was made and broken: are the keys the same?") == 1
        with pytest.raises(PeerRefused, match=f"{server.address} refused us: it has keys, and we have none"):
            Endpoint.connect(server.address, protocol=PROTOCOL, timeout=60)
        with Endpoint.connect(server.address, protocol=PROTOCOL, keys=keys) as client:
            assert client.peer.call(Ask(x=1), timeout=10) == Tell(x=2)


class Touch:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_noise_and_pickles_are_refused_and_counted(tmp_path: Path) -> None:
    noise = [
        [b""],
        [bytes(range(256)) * 4],
        [b"DTE\x01"],
        [b"DTE\x01\x81\xa4type\xa5Hello"],
        [b"DTE\x02" + pack(Goodbye())[4:]],
        [pickle.dumps(Touch(tmp_path / "touched"))],
        [b"DTE\x01" + pickle.dumps(Touch(tmp_path / "touched"))],
        [pack(Request(call=1)), b"DT<\x01" + msgspec.msgpack.encode(Ask(x=1))],
        [pack(Reply(call=0)), b""],
        [pack(Goodbye())],
        [pack(Attach(session=b"guess"))],
    ]
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(server.address)
            for frames in noise:
                stranger.send_multipart(frames)
            wait_until(lambda: server.refused == len(noise), f"{len(noise)} refusals, there are {server.refused}")
            assert server.peers == ()
            assert_serves(server)
    assert not (tmp_path / "touched").exists()


def test_a_known_peer_that_sends_noise_stays_and_its_noise_is_counted() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as data, context.socket(zmq.DEALER) as life:
            for stranger in (data, life):
                stranger.linger = 0
                stranger.connect(server.address)
            data.send(pack(Hello(version="7", name="odd", session=b"s", token="", max_bytes=1 << 20)))
            assert data.poll(10_000)
            data.recv()
            life.send(pack(Attach(session=b"s")))
            assert server.wait_for_peer(timeout=10).name == "odd"

            data.send_multipart([pack(Request(call=5)), b"noise"])
            failure = None
            while failure is None:
                assert data.poll(10_000)
                envelope = unpack(data.recv_multipart()[0])
                failure = envelope if getattr(envelope, "call", None) == 5 else None
            assert failure.kind == "FrameError"  # type: ignore[attr-defined]
            data.send(b"more noise")
            wait_until(lambda: server.refused == 2, "two refusals")
            assert server.peers[0].stats.refused == server.stats.refused == 2
            assert [peer.name for peer in server.peers] == ["odd"]
            assert_serves(server)


def zmtp_connection(address: str) -> socket.socket:
    """A raw connection that has shaken hands as a DEALER."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    raw = socket.create_connection((host, int(port)), timeout=10)
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = (
        b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)
    )
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return raw


def read_to_the_end(raw: socket.socket) -> None:
    """Returns when the other side has closed; the socket's timeout bounds each read."""
    try:
        while raw.recv(4096):
            pass
    except ConnectionResetError:
        pass


def test_raw_noise_and_a_header_of_8_gib_close_that_connection_only() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(bytes(range(1, 256)) * 4)
            read_to_the_end(raw)
        with zmtp_connection(server.address) as raw:
            raw.sendall(b"\x02" + struct.pack(">Q", 8 << 30) + b"start")
            read_to_the_end(raw)
        assert_serves(server)


def test_a_bound_endpoint_listens_on_loopback_only() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server:
        port = int(server.address.rpartition(":")[2])
        lines = (
            Path("/proc/self/net/tcp").read_text().splitlines() + Path("/proc/self/net/tcp6").read_text().splitlines()
        )
        local = [line.split()[1] for line in lines[1:] if f":{port:04X} " in line and line.split()[3] == "0A"]
        assert local == [f"0100007F:{port:04X}"]


def test_eight_endpoints_at_once_take_eight_ports() -> None:
    servers = [Endpoint.bind(protocol=PROTOCOL) for _ in range(8)]
    assert len({server.address for server in servers}) == 8
    for server in servers:
        server.close()
