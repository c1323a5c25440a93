"""Addresses: `tcp://HOST:PORT`, `HOST:PORT` for short, and `ipc://PATH`."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from typing import Literal

_IPC_LIMIT = 107  # bytes; sockaddr_un has 108, the last one is the terminating zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address taken apart. `host` has no brackets; for ipc it is the path and `port` is 0."""

    scheme: Literal["tcp", "ipc"]
    host: str
    port: int

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: It is none of the forms above, the port is no number up to 65535, or the path is too long.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if scheme == "ipc":
        size = len(os.fsencode(rest))
        if not 0 < size <= _IPC_LIMIT:
            raise ValueError(f"{text!r}: the path has {size} bytes, choose one of 1 to {_IPC_LIMIT}")
        return Address(scheme="ipc", host=rest, port=0)
    if scheme == "inproc":
        raise ValueError(
            f"{text!r}: inproc has no connection whose end could be noticed: use ipc://PATH, within one process too"
        )
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write tcp://HOST:PORT, HOST:PORT or ipc://PATH")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is no address: put an IPv6 host in brackets, as in tcp://[::1]:5555")
    return Address(scheme="tcp", host=host, port=int(port))


def check_bind(address: Address, *, secured: bool) -> Address:
    """The address as it can be bound.

    Raises:
        ValueError: It can be reached from other hosts and there are no keys, or the path is a file that is no socket.
        OSError: Somebody listens on this ipc path.
    """
    if address.scheme == "ipc":
        _check_path_is_free(address.host)
        return address
    if address.host == "localhost":
        return Address(scheme="tcp", host="127.0.0.1", port=address.port)
    if not secured and not is_loopback(address.host):
        raise ValueError(
            f"{address} can be reached from other hosts, and there are no keys: "
            "bind to 127.0.0.1, or pass keys=make_keys(folder)"
        )
    return address


def check_connect(address: Address, *, secured: bool) -> Address:
    """The address as one can connect to it.

    Raises:
        ValueError: It is on another host and there are no keys, or it is no host or port one can connect to.
    """
    if address.scheme == "ipc":
        return address
    if address.host in ("0.0.0.0", "::", "*") or address.port == 0:
        raise ValueError(f"{address} is where one listens, not where one connects: name the host and its port")
    if not secured and not is_loopback(address.host):
        raise ValueError(f"{address} is not on this host, and there are no keys: pass keys=load_keys(folder)")
    return address


def is_loopback(host: str) -> bool:
    """Whether a host is this one, by an address that no other host can reach. A name counts when all of it does."""
    found = resolve(host)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def needs_ipv6(address: Address) -> bool:
    """Whether the host has IPv6 addresses only."""
    found = resolve(address.host) if address.scheme == "tcp" else ()
    return bool(found) and all(":" in item for item in found)


def resolve(host: str) -> tuple[str, ...]:
    """The numeric addresses of a host; none for a name that is not known (yet) and for `*`."""
    try:
        return (str(ipaddress.ip_address(host.partition("%")[0])),)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return ()
    return tuple(str(entry[4][0]).partition("%")[0] for entry in found)


def _check_path_is_free(path: str) -> None:
    # ZeroMQ removes whatever it finds at the path: somebody's file, a living server's socket.
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ValueError(f"ipc://{path}: there is a file that is no socket: choose another path")
    target = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(target)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise OSError(error.errno, f"cannot bind ipc://{path}: {error.strerror}") from error
    raise OSError(errno.EADDRINUSE, f"cannot bind ipc://{path}: somebody listens there")
