"""Where the members of tensor groups find each other."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from drivetrain_transport._address import parse_address
from drivetrain_transport._endpoints.endpoint import Endpoint
from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._errors import GroupBroken, PeerLost
from drivetrain_transport._keys import Keys
from drivetrain_transport._machine import boot_id, namespace
from drivetrain_transport.device._table import Table
from drivetrain_transport.device._words import (
    PROTOCOL,
    Absent,
    Attend,
    Done,
    Ended,
    Get,
    Join,
    Leave,
    Position,
    Put,
    Ready,
    Report,
    Roster,
    Value,
    Where,
)

_SLACK_S = 5.0  # for the host's answer to be on its way; the host itself keeps to the deadline


@dataclass(eq=False, slots=True)
class Seat:
    """One generation as a member sees it. Written by the group's thread, but for `ended`; read by the endpoint's."""

    number: int
    machines: tuple[str, ...] = ()
    entered: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    now: str = ""
    ended: Ended | None = None
    interrupt: Callable[[], None] | None = None
    """Called by the endpoint's thread when the generation has ended, so that nothing waits any longer."""

    def end(self, ended: Ended) -> None:
        if self.ended is None:
            self.ended = ended
            if self.interrupt is not None:
                self.interrupt()


class Rendezvous:
    """Where processes meet to form tensor groups, any number of times, while a run goes on. A context manager.

    One process hosts it, best one that outlives the others; all that take part, the host as well, form groups through
    it:

        with Rendezvous.host() as meeting:                           # says meeting.address to the others
            group = TensorGroup.form(["server", "trainer"], "server", meeting, timeout=60)

        with Rendezvous.join(address, timeout=30) as meeting:
            group = TensorGroup.form(["server", "trainer"], "trainer", meeting, timeout=60)

    It is an `Endpoint`: bound to loopback by default, and elsewhere only with keys, which encrypt it and let nobody
    else in. Through the same connections each member learns that another died: within half a second on one host,
    within the liveness elsewhere, whether or not an operation was under way. When the host dies, every group formed
    through it is broken by name, and its members join the next host. A member that dies while others wait for it frees
    its seat, and its successor takes it.
    """

    def __init__(self, address: str, *, keys: Keys | None, timeout: float, host: Endpoint | None) -> None:
        """Use `host` or `join`."""
        self._host = host
        self._seats: dict[int, Seat] = {}
        self._lock = threading.Lock()
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._endpoint = Endpoint.connect(
            address, protocol=PROTOCOL, handler=self._answer, name=name, keys=keys, timeout=timeout
        )

    @classmethod
    def host(
        cls, address: str = "tcp://127.0.0.1:0", *, keys: Keys | None = None, liveness: float = 10.0
    ) -> Rendezvous:
        """Open a rendezvous in this process, and join it.

        Args:
            address: As for `Endpoint.bind`; `address` is the one that others join.
            keys: Required where other hosts reach the address.
            liveness: Seconds of silence after which another host is lost.

        Raises:
            ValueError: A malformed address, or a reachable one without keys.
            OSError: The address is taken.
        """
        endpoint = Endpoint.bind(address, protocol=PROTOCOL, handler=Table().handle, keys=keys, liveness=liveness)
        try:
            bound = parse_address(endpoint.address)
            loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(bound.host)
            here = f"tcp://{loopback}:{bound.port}" if loopback else endpoint.address
            return cls(here, keys=keys, timeout=30.0, host=endpoint)
        except BaseException:
            endpoint.close()
            raise

    @classmethod
    def join(cls, address: str, *, keys: Keys | None = None, timeout: float = 30.0) -> Rendezvous:
        """Join the rendezvous at an address. It need not be open yet.

        Raises:
            TimeoutError: Nobody answered there within `timeout` seconds.
            PeerRefused: It has other keys, or is of another version.
            ValueError: A malformed address, or one on another host without keys.
        """
        return cls(address, keys=keys, timeout=timeout, host=None)

    @property
    def address(self) -> str:
        """Where others join."""
        return (self._host or self._endpoint).address

    def close(self) -> None:
        """Leave; the host's leaving ends it for all. Groups formed through it are broken. Idempotent, bounded."""
        self._endpoint.close()
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What follows is for groups.

    def take_seat(self, request: Join) -> Seat:
        """Wait for the other members; the seat in the generation that begins when all are there.

        Raises:
            GroupBroken: Not all joined in time; names who did not, and what is known of them.
        """
        answer = self._call(request, request.timeout + _SLACK_S, f"group {request.group!r} was not formed")
        if isinstance(answer, Absent):
            known = "; ".join(f"{name} {what}" for name, what in answer.absent.items())
            raise GroupBroken(
                f"group {request.group!r} was not formed within {request.timeout:g} s: {known}",
                missing=[name for name in request.members if name in answer.absent],
            )
        assert isinstance(answer, Roster)
        seat = self._seat(answer.generation)
        seat.machines = answer.machines
        return seat

    def put(self, seat: Seat, key: str, value: bytes, timeout: float) -> None:
        """Leave a value for the generation's other members. Raises GroupBroken when the generation is over."""
        request = Put(generation=seat.number, key=key, value=value)
        if not isinstance(self._call(request, timeout, f"{key} was not handed over"), Done):
            raise GroupBroken(f"{key} was not handed over: {self._why(seat)}", missing=self._missing(seat))

    def get(self, seat: Seat, key: str, timeout: float) -> bytes:
        """Wait for a value. Raises GroupBroken when the generation is over, or the value did not come in time."""
        answer = self._call(Get(generation=seat.number, key=key), timeout, f"{key} did not come")
        if not isinstance(answer, Value):
            raise GroupBroken(f"{key} did not come: {answer.why}", missing=answer.missing)
        return answer.value

    def ready(self, seat: Seat, timeout: float) -> None:
        """Wait until all members are connected. Raises GroupBroken, which names those who are not."""
        answer = self._call(
            Ready(generation=seat.number, timeout=timeout), timeout + _SLACK_S, "not all members got ready"
        )
        if isinstance(answer, Ended):
            seat.ended = answer
            raise GroupBroken(answer.why, missing=answer.missing)

    def report(self, seat: Seat, request: Report) -> Ended:
        """An operation failed: end the generation for all, and say who was missing. Never raises, bounded."""
        if seat.ended is None:
            try:
                answer = self._call(request, _SLACK_S, request.what)
                assert isinstance(answer, Ended)
                seat.ended = answer
            except GroupBroken as error:  # the host is gone, or says nothing
                why = f"{request.what} failed ({request.error}), and {error}"
                seat.ended = Ended(generation=seat.number, why=why)
        return seat.ended

    def leave(self, seat: Seat) -> None:
        """Take no further part; waits, bounded, for members who still need what this one did. Never raises."""
        if seat.ended is None:
            seat.ended = Ended(generation=seat.number, why="this member closed the group")
            with suppress(GroupBroken):  # nobody is there to be told
                self._call(Leave(generation=seat.number, entered=dict(seat.entered)), _SLACK_S, "leaving")
        with self._lock:
            self._seats.pop(seat.number, None)

    def _call(self, request: Any, timeout: float, failed: str) -> Any:
        try:
            return self._endpoint.peer.call(request, timeout=max(timeout, 0.0))
        except (PeerLost, TimeoutError) as error:
            raise GroupBroken(f"{failed}: the host of the rendezvous is lost: {error}") from error

    def _seat(self, number: int) -> Seat:
        with self._lock:  # the host's Attend may be here before the roster's receiver is awake
            return self._seats.setdefault(number, Seat(number))

    def _why(self, seat: Seat) -> str:
        return seat.ended.why if seat.ended else f"generation {seat.number} is over"

    def _missing(self, seat: Seat) -> tuple[str, ...]:
        return seat.ended.missing if seat.ended else ()

    async def _answer(self, host: Peer, request: Any) -> Done | Position:
        match request:
            case Attend(generation=number):
                await self._attend(self._seat(number), host)
                return Done()
            case Where(generation=number):
                if (seat := self._seats.get(number)) is None:
                    return Position(entered={}, finished={}, now="a generation that it left")
                return Position(entered=dict(seat.entered), finished=dict(seat.finished), now=seat.now)
            case Ended(generation=number):
                seat = self._seats.get(number)
                if seat is not None:
                    seat.end(request)
                return Done()
            case _:
                raise ValueError(f"{type(request).__name__} is for the host of the rendezvous, this is a member")

    async def _attend(self, seat: Seat, host: Peer) -> None:
        try:
            await asyncio.get_running_loop().create_future()  # until the host ends it, or dies
        finally:
            if host.state != "open":
                seat.end(Ended(generation=seat.number, why="the host of the rendezvous is lost"))
            with self._lock:
                self._seats.pop(seat.number, None)


def machine() -> str:
    """Names what shares loopback with this process: the running kernel, and the network namespace."""
    return f"{socket.gethostname()} {boot_id()} {namespace('net')}"
