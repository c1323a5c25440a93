import socket
from pathlib import Path

import pytest
from drivetrain_transport._address import Address, check_bind, check_connect, is_loopback, needs_ipv6, parse_address


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("node-7:5555", "tcp://node-7:5555"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("*:80", "tcp://*:80"),
        ("ipc:///tmp/socket", "ipc:///tmp/socket"),
    ],
)
def test_addresses_in_their_full_form(text: str, full: str) -> None:
    assert str(parse_address(text)) == full


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":5555", "host:", "host:port", "host:65536", "host:-1", "::1:5555", "udp://host:1", "host:٣"],
)
def test_malformed_addresses_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address"):
        parse_address(text)


def test_inproc_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match=r"'inproc://x': inproc has no connection .* use ipc://PATH"):
        parse_address("inproc://x")


def test_a_path_too_long_for_a_socket_is_named_with_its_size() -> None:
    assert parse_address("ipc://" + "p" * 107).host == "p" * 107
    with pytest.raises(ValueError, match=r"the path has 108 bytes, choose one of 1 to 107"):
        parse_address("ipc://" + "é" * 54)
    with pytest.raises(ValueError, match=r"the path has 0 bytes"):
        parse_address("ipc://")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "10.0.0.1", "192.0.2.1", "no-such-host.invalid"])
def test_other_hosts_need_keys(host: str) -> None:
    address = Address(scheme="tcp", host=host, port=5555)
    assert not is_loopback(host)
    with pytest.raises(ValueError, match=r"can be reached from other hosts, and there are no keys"):
        check_bind(address, secured=False)
    assert check_bind(address, secured=True) == address


def test_connecting_to_another_host_needs_keys_and_a_host() -> None:
    with pytest.raises(ValueError, match=r"tcp://10.0.0.1:5555 is not on this host, and there are no keys"):
        check_connect(parse_address("10.0.0.1:5555"), secured=False)
    assert check_connect(parse_address("10.0.0.1:5555"), secured=True).port == 5555
    for text in ("0.0.0.0:5555", "*:5555", "[::]:5555", "127.0.0.1:0"):
        with pytest.raises(ValueError, match=r"not where one connects"):
            check_connect(parse_address(text), secured=True)


def test_a_name_with_ipv6_addresses_only_is_connected_to_by_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"six": ["fd00::7"], "both": ["fd00::7", "10.0.0.7"], "four": ["10.0.0.7"]}

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(None, None, None, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert [host for host in known if needs_ipv6(parse_address(f"{host}:1"))] == ["six"]
    assert needs_ipv6(parse_address("[::1]:1"))
    assert not needs_ipv6(parse_address("ipc://path"))


def test_a_name_with_one_address_elsewhere_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0)), (0, 0, 0, "", ("10.0.0.7", 0))]
    )
    assert not is_loopback("node-7")


def test_localhost_is_bound_as_a_number() -> None:
    assert str(check_bind(parse_address("localhost:0"), secured=False)) == "tcp://127.0.0.1:0"


def test_a_file_at_an_ipc_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"there is a file that is no socket"):
        check_bind(parse_address(f"ipc://{path}"), secured=False)
    assert path.read_text() == "mine"


def test_an_ipc_path_in_use_is_named_and_a_dead_one_is_free(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    address = parse_address(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(OSError, match=f"cannot bind ipc://{path}: somebody listens there"):
            check_bind(address, secured=False)
    assert check_bind(address, secured=False) == address
