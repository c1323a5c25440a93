"""The connections of a channel that outlives them: one address where it listens, or several that it connects to."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain_transport._address import check_connect, parse_address
from drivetrain_transport._endpoints.binding import Binding
from drivetrain_transport._endpoints.connecting import Connecting
from drivetrain_transport._endpoints.core import Core
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._errors import PeerRefused
from drivetrain_transport._keys import Keys

_ATTEMPT_S = 5.0
"""For one meeting; several round trips of a slow network fit in it."""

_BACKOFF_S = (0.05, 2.0)
_JOIN_S = 15.0

log = logging.getLogger("drivetrain_transport")


class Owner(ABC):
    """Who has the connections. All but `disturbed` is called on the loop of the endpoint that the peer belongs to."""

    @abstractmethod
    async def answer(self, peer: Peer, request: Any) -> Any:
        """Handle a request."""

    @abstractmethod
    def joined(self, core: Core, peer: Peer) -> None:
        """A peer can be called."""

    @abstractmethod
    def left(self, peer: Peer) -> None:
        """A peer is gone, for good."""

    @abstractmethod
    def disturbed(self) -> None:
        """The peers have changed, or an attempt to connect has failed. Called on any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a channel's endpoints are made."""

    protocol: Protocol
    keys: Keys | None
    max_bytes: int
    name: str = ""


class Links:
    """The endpoints of one channel. A connection that breaks is made again, with a growing pause between attempts."""

    def __init__(self, owner: Owner, terms: Terms) -> None:
        """Starts nothing: `bind` or `connect` once."""
        self.addresses: tuple[str, ...] = ()
        self._trouble: dict[str, str] = {}  # how the last attempt at an address, or the last connection there, ended
        self._refusals: dict[str, PeerRefused] = {}  # of addresses whose last attempt ended so
        self._owner = owner
        self._terms = terms
        self._name = terms.name or f"{socket.gethostname()}:{os.getpid()}"
        self._cores: dict[str, Core] = {}
        self._peers: dict[Core, tuple[Peer, ...]] = {}
        self._keepers: list[threading.Thread] = []
        self._gate = threading.Lock()
        self._closing = threading.Event()
        self._process = os.getpid()

    def bind(self, address: str, liveness: float) -> None:
        """Listen. Raises what `Endpoint.bind` does."""
        terms = self._terms
        core = Binding(
            parse_address(address),
            protocol=terms.protocol,
            handler=self._owner.answer,
            keys=terms.keys,
            max_bytes=terms.max_bytes,
            liveness=liveness,
        )
        self._watch(core)
        core.start()
        self._cores[core.address] = core
        self.addresses = (core.address,)

    def connect(self, addresses: Sequence[str]) -> None:
        """Begin to connect to each address, and return at once.

        Raises:
            ValueError: There is none, one is malformed or given twice, or one is on another host and there are no keys.
        """
        targets = [
            str(check_connect(parse_address(address), secured=self._terms.keys is not None)) for address in addresses
        ]
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(f"the addresses are {list(addresses)}: give one or more, each of them once")
        self.addresses = tuple(targets)
        atexit.register(self.close)
        for target in targets:
            keeper = threading.Thread(
                target=self._keep, args=(target,), name=f"drivetrain-transport keeps {target}", daemon=True
            )
            self._keepers.append(keeper)
            keeper.start()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Who is connected now."""
        return tuple(peer for core in self._cores.copy().values() for peer in core.peers)

    @property
    def refusal(self) -> PeerRefused | None:
        """That every address we connect to turned us away, and how; None while somebody may still come at one."""
        refusals = self._refusals.copy()
        if not refusals or len(refusals) < len(self.addresses):
            return None
        return PeerRefused("; ".join(str(refusal) for refusal in refusals.values()))

    def drop(self, core: Core, peer: Peer, why: str) -> None:
        """End the connection to a peer that failed a call: who connects makes another. Called on the core's loop."""
        log.warning("the connection to %s is ended, to be made again: %s", peer.name, why)
        core.drop(peer, why)
        core.trouble = f"{peer.name} was left: {why}"  # also where the other side was the first to leave

    def core_here(self) -> Core:
        """The endpoint on whose loop this is called."""
        return next(core for core in self._peers.copy() if core.on_own_thread())

    def close(self) -> None:
        """Say goodbye to all, end the threads. Idempotent, bounded; RuntimeError when a thread does not end."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        with self._gate:
            self._closing.set()
            cores = list(self._cores.values())
        failures = [failure for core in cores if (failure := _stop(core)) is not None]
        deadline = time.monotonic() + _JOIN_S
        for keeper in self._keepers:
            keeper.join(max(deadline - time.monotonic(), 0.0))
            if keeper.is_alive():
                failures.append(RuntimeError(f"{keeper.name} is not closed after {_JOIN_S:g} s"))
        if failures:
            raise failures[0]

    def describe(self) -> str:
        """Where it looked for somebody and what happened there, for errors."""
        return ", ".join(self._describe(address) for address in self.addresses)

    def _describe(self, address: str) -> str:
        core = self._cores.get(address)
        trouble = (core.trouble if core is not None else "") or self._trouble.get(address, "")
        return f"{address} ({trouble})" if trouble else address

    def _watch(self, core: Core) -> None:
        self._peers[core] = ()

        def changed(peers: tuple[Peer, ...]) -> None:
            before, self._peers[core] = self._peers[core], peers
            for peer in before:
                if peer not in peers:
                    self._owner.left(peer)
            for peer in peers:
                if peer not in before:
                    self._owner.joined(core, peer)
            self._owner.disturbed()

        core.watch = changed

    def _keep(self, target: str) -> None:
        pause = _BACKOFF_S[0]
        while not self._closing.is_set():
            start = time.monotonic()
            self._once(target)
            if time.monotonic() - start > _ATTEMPT_S:
                pause = _BACKOFF_S[0]
            self._closing.wait(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _BACKOFF_S[1])

    def _once(self, target: str) -> None:
        """One connection, from its making to its end."""
        try:
            core = self._make(target)
        except ValueError as error:  # the name means another host now
            self._note(target, error)
            return
        if core is None:
            return
        try:
            core.start()
            self._refusals.pop(target, None)
            core.ended.wait()
        except OSError as error:  # nobody there (yet), lost, refused: no reason to give up
            self._note(target, error)
        except asyncio.CancelledError:
            pass  # closed while it met the other side
        finally:
            if core.peer.state == "closed":
                self._closing.set()  # closed here, if not by us then at the interpreter's exit
            failure = _stop(core)
            if core.peer.state not in ("open", "closed"):
                self._trouble[target] = core.trouble
            if failure is not None:
                self._note(target, failure)
                log.error("the connection to %s failed", target, exc_info=failure)
            with self._gate:
                del self._cores[target], self._peers[core]

    def _make(self, target: str) -> Connecting | None:
        terms = self._terms
        with self._gate:
            if self._closing.is_set():
                return None
            core = Connecting(
                parse_address(target),
                protocol=terms.protocol,
                handler=self._owner.answer,
                keys=terms.keys,
                max_bytes=terms.max_bytes,
                name=self._name,
                timeout=_ATTEMPT_S,
            )
            self._watch(core)
            self._cores[target] = core
        return core

    def _note(self, target: str, error: Exception) -> None:
        self._trouble[target] = str(error)
        if isinstance(error, PeerRefused):
            self._refusals[target] = error
        else:
            self._refusals.pop(target, None)
        self._owner.disturbed()


def _stop(core: Core) -> RuntimeError | None:
    """End an endpoint; what had gone wrong with it."""
    try:
        core.stop()
    except RuntimeError as error:
        return error
    return None
