"""Endpoints: two processes that call each other, over one address."""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Self

from drivetrain_transport._address import parse_address
from drivetrain_transport._codec.frames import MAX_BYTES
from drivetrain_transport._deadlines import check_timeout
from drivetrain_transport._endpoints.binding import Binding
from drivetrain_transport._endpoints.connecting import Connecting
from drivetrain_transport._endpoints.peer import Handler, Peer, PeerState
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._keys import Keys
from drivetrain_transport._stats import ChannelStats


class Endpoint:
    """One side of a conversation of typed requests and replies; either side may ask. A context manager.

    One side binds an address and takes any number of peers, the others connect to it:

        with Endpoint.bind(protocol=protocol) as endpoint:
            peer = endpoint.wait_for_peer(timeout=30)
            reply = peer.call(request, timeout=60)

        with Endpoint.connect(address, protocol=protocol, handler=answer) as endpoint:
            endpoint.wait_closed()

    An endpoint has a thread of its own, so it goes on while the owner's thread computes, and every method may be
    called from any thread. Messages between two endpoints arrive in order, once, or the peer is reported as lost;
    nothing is dropped silently. What is queued is bounded only by the calls that wait for their replies.

    A connection is a session. When it breaks, both sides call the peer lost; a process that comes back connects anew.
    Death of a process on the same host is noticed within a second, silence of a host within the liveness.
    """

    def __init__(self, core: Binding | Connecting) -> None:
        """Use `bind` or `connect`."""
        self._core = core

    @classmethod
    def bind(
        cls,
        address: str = "tcp://127.0.0.1:0",
        *,
        protocol: Protocol,
        handler: Handler | None = None,
        keys: Keys | None = None,
        liveness: float = 10.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Listen on an address.

        Args:
            address: `tcp://HOST:PORT`, `HOST:PORT` or `ipc://PATH`. Port 0 takes a free one, see `address`.
            protocol: What may be said.
            handler: Answers the peers' requests; without one they get a RemoteError.
            keys: Encrypt, and take only peers that hold the same keys. Required where other hosts reach the address.
            liveness: Seconds of silence after which a peer is lost, on either side. Between 0.5 and 3600. Messages and
                computations of any length are no silence.
            max_message_bytes: The largest message to send or receive, in bytes.

        Raises:
            ValueError: A malformed address, a reachable one without keys, or a limit out of its range.
            OSError: The address is taken or is not this host's; names it.
        """
        core = Binding(
            parse_address(address),
            protocol=protocol,
            handler=handler,
            keys=keys,
            max_bytes=max_message_bytes,
            liveness=liveness,
        )
        core.start()
        return cls(core)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        protocol: Protocol,
        handler: Handler | None = None,
        name: str = "",
        keys: Keys | None = None,
        timeout: float = 30.0,
        max_message_bytes: int = MAX_BYTES,
    ) -> Self:
        """Connect to a binding endpoint and meet it. It need not be there yet.

        Args:
            address: As for `bind`.
            protocol: What may be said; its version must be the other side's.
            handler: Answers the other side's requests; without one it gets a RemoteError.
            name: What the other side calls this one; by default host and process number.
            keys: The other side's keys. Required for another host.
            timeout: Seconds until the other side must have answered.
            max_message_bytes: The largest message to send or receive, in bytes.

        Raises:
            TimeoutError: Nobody answered at the address in time.
            PeerRefused: The other side has another protocol version, or only one of the two has keys. (Of two that have
                different ones, ZeroMQ tells neither: that is the TimeoutError, which asks whether they are the same,
                and a warning in the log as soon as it can be suspected.)
            PeerLost: The other side went away while we met.
            ValueError: A malformed address, one on another host without keys, or a timeout that is NaN or infinite.
        """
        core = Connecting(
            parse_address(address),
            protocol=protocol,
            handler=handler,
            keys=keys,
            max_bytes=max_message_bytes,
            name=name or f"{socket.gethostname()}:{os.getpid()}",
            timeout=timeout,
        )
        core.start()
        return cls(core)

    @property
    def address(self) -> str:
        """The address in full; for a binding endpoint the real one, with the port that was taken."""
        return self._core.address

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that can be called now, in the order in which they joined."""
        return self._core.peers

    @property
    def peer(self) -> Peer:
        """The other side of a connecting endpoint, also after it is gone.

        Raises:
            RuntimeError: This endpoint binds; it has `peers`.
        """
        return self._connecting("peer").peer

    @property
    def refused(self) -> int:
        """How many messages were refused: noise, unknown senders, wrong keys, other versions."""
        return self._core.refused

    @property
    def stats(self) -> ChannelStats:
        """The counts of all peers together, also of those that are gone. `queued_high_water` is a bound: the sum of
        theirs. `refused` counts the messages of strangers as well.
        """
        return self._core.stats

    def wait_for_peer(self, timeout: float) -> Peer:
        """Wait until a peer has joined, and return the first. TimeoutError after `timeout` seconds."""
        return self.wait_for_peers(1, timeout)[0]

    def wait_for_peers(self, count: int, timeout: float) -> tuple[Peer, ...]:
        """Wait until `count` peers are connected at once, and return all that are.

        Raises:
            TimeoutError: Fewer joined within `timeout` seconds; says how many.
            ConnectionError: The endpoint closed.
        """
        core = self._core
        check_timeout(timeout)
        with core.changed:
            enough = core.changed.wait_for(lambda: len(core.peers) >= count or core.closed, timeout)
            if len(core.peers) >= count:
                return core.peers
            if enough:
                raise ConnectionError(f"the endpoint at {core.address} closed with {len(core.peers)} of {count} peers")
            raise TimeoutError(f"{len(core.peers)} of {count} peers joined {core.address} within {timeout:g} s")

    def wait_closed(self, timeout: float | None = None) -> PeerState:
        """Wait until the other side of a connecting endpoint is gone.

        Returns:
            "goodbye" when it closed, "lost" when it broke off or fell silent, "closed" when this side closed.

        Raises:
            TimeoutError: It is still there after `timeout` seconds. None waits as long as it lives; its liveness is
                watched all the time.
            RuntimeError: This endpoint binds.
        """
        core = self._connecting("wait_closed")
        if timeout is not None:
            check_timeout(timeout)
        if not core.ended.wait(timeout):
            raise TimeoutError(f"{core.peer.name} is still there after {timeout:g} s")
        return core.peer.state

    def close(self) -> None:
        """Say goodbye, fail the calls that wait, close the sockets, end the thread. Idempotent; two seconds at most.

        Raises:
            RuntimeError: The endpoint had failed, a handler blocks its loop, or this is called from a handler.
        """
        if self._core.on_own_thread():
            raise RuntimeError("a handler cannot close its own endpoint: let it return, and close elsewhere")
        self._core.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connecting(self, what: str) -> Connecting:
        if not isinstance(self._core, Connecting):
            raise RuntimeError(f"{what} belongs to a connecting endpoint, this one binds {self.address}")
        return self._core
