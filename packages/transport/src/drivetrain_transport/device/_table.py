"""The host's side of a rendezvous: who waits for whom, and which generations are alive.

All of it runs on the loop of the host's endpoint; nothing is shared with other threads.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from drivetrain_transport._endpoints.peer import Peer
from drivetrain_transport._errors import PeerLost, RemoteError
from drivetrain_transport.device._words import (
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

_ANSWER_S = 1.5  # for a living process to say where it is
_AGAIN_S = 0.1  # a dead one's broken connection is noticed when something is sent to it, by the endpoint once a second
_WATCH_S, _PROBED_S = 0.25, 1.0
_WATCHES_PER_S = 2000  # of all members together
_DRAIN_S = 5.0
_FOREVER_S = 1e8
_REMEMBERED = 64
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Seat:
    """A member in the waiting room."""

    request: Join
    peer: Peer
    answer: asyncio.Future[Roster | Absent]


@dataclass(eq=False, slots=True)
class _Generation:
    number: int
    group: str
    peers: dict[str, Peer]
    """By member, in the group's order."""
    values: dict[str, bytes] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    attending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    judging: int = 0
    """Reports for which members are being asked where they are."""
    ended: Ended | None = None

    def member(self, peer: Peer) -> str:
        return next((name for name, seated in self.peers.items() if seated is peer), "")


class Table:
    """Answers the members' requests.

    A member sits in the waiting room as long as its call stands, so a process that dies or gives up frees its seat by
    that. A generation begins when all seats of one member list are taken, and lives while the calls `Attend` to all
    of its members stand.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, dict[str, _Seat]] = {}
        self._departed: dict[tuple[str, str], tuple[str, float]] = {}
        self._live: dict[int, _Generation] = {}
        self._past: dict[int, Ended] = {}  # the last few, for members who ask late
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count(1)

    async def handle(self, peer: Peer, request: Any) -> Any:
        match request:
            case Join():
                return await self._join(peer, request)
            case Put(generation=number, key=key, value=value):
                generation = self._of(number, peer)
                if isinstance(generation, Ended):
                    return generation
                async with generation.changed:
                    generation.values[key] = value
                    generation.changed.notify_all()
                return Done()
            case Get(generation=number, key=key):
                generation = self._of(number, peer)
                if isinstance(generation, Ended):
                    return generation
                await self._until(generation, lambda: key in generation.values)
                return generation.ended or Value(value=generation.values[key])
            case Ready():
                return await self._ready(peer, request)
            case Report():
                return await self._judge(peer, request)
            case Leave():
                return await self._leave(peer, request)
            case _:
                raise ValueError(f"{type(request).__name__} is for members, this is the host of the rendezvous")

    async def _join(self, peer: Peer, request: Join) -> Roster | Absent:
        group, me = request.group, request.me
        for old in [item for item in self._live.values() if item.group == group]:
            if me in old.peers:
                again = "forms the next generation" if old.peers[me] is peer else "came back as a new process"
                self._end(old, f"{me} {again}", missing=(me,))
        room = self._rooms.setdefault(group, {})
        if (before := room.pop(me, None)) is not None:
            before.answer.set_result(Absent(absent={me: "took this seat again, from another process or thread"}))
        seat = room[me] = _Seat(request, peer, asyncio.get_running_loop().create_future())
        self._seal(room, request)
        try:
            async with asyncio.timeout(request.timeout):
                return await seat.answer
        except TimeoutError:
            return Absent(absent={name: self._absence(request, name) for name in self._others(room, request)})
        except asyncio.CancelledError:
            gone = "gave up waiting" if peer.state == "open" else "its process ended while it waited"
            self._departed[group, me] = (gone, time.monotonic())
            raise
        finally:
            if room.get(me) is seat:
                del room[me]

    def _others(self, room: dict[str, _Seat], request: Join) -> list[str]:
        return [name for name in request.members if name not in room or not _agree(room[name].request, request)]

    def _absence(self, request: Join, name: str) -> str:
        seat = self._rooms[request.group].get(name)
        if seat is not None:
            return f"waits for {', '.join(seat.request.members)} with {seat.request.terms} instead"
        gone, when = self._departed.get((request.group, name), ("", 0.0))
        return f"{gone}, {time.monotonic() - when:.1f} s ago" if gone else "did not come"

    def _seal(self, room: dict[str, _Seat], request: Join) -> None:
        if self._others(room, request):
            return
        seats = [room.pop(name) for name in request.members]
        peers = {seat.request.me: seat.peer for seat in seats}
        generation = _Generation(next(self._numbers), request.group, peers)
        self._live[generation.number] = generation
        for name in request.members:
            self._departed.pop((request.group, name), None)
        roster = Roster(generation=generation.number, machines=tuple(seat.request.machine for seat in seats))
        for seat in seats:
            seat.answer.set_result(roster)
            attending = self._start(self._attend(generation, seat.request.me, seat.peer))
            generation.attending[seat.request.me] = attending

    async def _attend(self, generation: _Generation, name: str, peer: Peer) -> None:
        why = f"{name} ended its part"
        watching = self._start(self._watch(generation, peer))
        try:
            await peer.call_async(Attend(generation.number), timeout=_FOREVER_S)
        except (PeerLost, RemoteError) as error:
            why = f"{name} is gone: {error}"
        finally:
            watching.cancel()
        if name not in generation.left:
            self._end(generation, why, missing=(name,))

    async def _watch(self, generation: _Generation, peer: Peer) -> None:
        """Notice a member's death while nobody asks for it. One that does not answer is left in peace, by and by."""
        pause = 0.0
        while True:
            pause = max(pause, _WATCH_S, len(self._tasks) / _WATCHES_PER_S)
            await asyncio.sleep(pause)
            pause = 0.0 if await self._touch(generation, peer) else min(2 * pause, _PROBED_S)

    async def _ready(self, peer: Peer, request: Ready) -> Done | Ended:
        generation = self._of(request.generation, peer)
        if isinstance(generation, Ended):
            return generation
        async with generation.changed:
            generation.ready.add(generation.member(peer))
            generation.changed.notify_all()
        try:
            async with asyncio.timeout(request.timeout):
                await self._until(generation, lambda: len(generation.ready) == len(generation.peers))
        except TimeoutError:
            missing = [name for name in generation.peers if name not in generation.ready]
            why = f"{', '.join(missing)} joined, but was not connected to the others within {request.timeout:.1f} s"
            return self._end(generation, why, missing=missing)
        return generation.ended or Done()

    async def _judge(self, peer: Peer, request: Report) -> Ended:
        generation = self._of(request.generation, peer)
        if isinstance(generation, Ended):
            return generation
        me = generation.member(peer)
        judging = asyncio.ensure_future(self._find(generation, request, me))
        ending = asyncio.ensure_future(self._until(generation, lambda: False))
        try:
            await asyncio.wait((judging, ending), return_when=asyncio.FIRST_COMPLETED)
            if generation.ended is None and request.expected and not judging.result():
                # A link that fails at one member fails at others too, and who was missing is known to the first.
                await asyncio.wait((ending,), timeout=_AGAIN_S)
                while generation.judging and generation.ended is None:
                    await asyncio.wait((ending,), timeout=_AGAIN_S)
            if generation.ended is not None:
                return generation.ended
            found = judging.result()
        finally:
            judging.cancel()
            ending.cancel()
        missing = [name for name in generation.peers if name in found]
        known = "; ".join(f"{name} {found[name]}" for name in missing) or request.error
        why = f"{request.what} at {me} failed: {known}"
        if missing and request.error:
            why += f" ({request.error})"
        return self._end(generation, why, missing=missing)

    async def _find(self, generation: _Generation, request: Report, me: str) -> dict[str, str]:
        """Who was not where an operation expected them, and what they do instead."""
        found = {}
        others = [name for name in request.expected if name in generation.peers and name != me]
        generation.judging += 1
        try:
            asked = await asyncio.gather(*(self._ask(generation, name) for name in others))
        finally:
            generation.judging -= 1
        for name, position in zip(others, asked, strict=True):
            channel, number = request.expected[name]
            if isinstance(position, str):
                found[name] = position
            elif position.entered.get(channel, 0) < number:
                found[name] = f"did not arrive, it is in {position.now or 'no operation'}"
        return found

    async def _ask(self, generation: _Generation, name: str) -> Position | str:
        peer = generation.peers[name]
        asked = asyncio.ensure_future(peer.call_async(Where(generation.number), timeout=_ANSWER_S))
        try:
            while not (await asyncio.wait((asked,), timeout=_AGAIN_S))[0]:
                self._start(self._touch(generation, peer))
            position = asked.result()
        except TimeoutError:
            return f"says nothing for {_ANSWER_S:g} s: it is stopped, or holds its interpreter"
        except (PeerLost, RemoteError) as error:
            return f"is gone: {error}"
        finally:
            asked.cancel()
        assert isinstance(position, Position)
        return position

    async def _touch(self, generation: _Generation, peer: Peer) -> bool:
        """Send a member something, and take it back: by that a connection is noticed that its process's death broke."""
        with suppress(TimeoutError, PeerLost, RemoteError):
            await peer.call_async(Where(generation.number), timeout=_AGAIN_S)
            return True
        return False

    async def _leave(self, peer: Peer, request: Leave) -> Done:
        generation = self._live.get(request.generation)
        if generation is None or peer not in generation.peers.values():
            return Done()
        me = generation.member(peer)
        generation.left.add(me)
        deadline = time.monotonic() + _DRAIN_S
        while generation.ended is None and time.monotonic() < deadline:
            others = [name for name in generation.peers if name not in generation.left]
            positions = await asyncio.gather(*(self._ask(generation, name) for name in others))
            if not any(isinstance(item, Position) and _owes(item, request.entered) for item in positions):
                break
            await asyncio.sleep(0.005)
        self._end(generation, f"{me} left", missing=(me,))
        return Done()

    def _of(self, number: int, peer: Peer) -> _Generation | Ended:
        generation = self._live.get(number)
        if generation is None or peer not in generation.peers.values():
            return self._past.get(number) or Ended(generation=number, why=f"generation {number} is over")
        return generation

    async def _until(self, generation: _Generation, true: Callable[[], bool]) -> None:
        async with generation.changed:
            await generation.changed.wait_for(lambda: generation.ended is not None or true())

    def _end(self, generation: _Generation, why: str, *, missing: list[str] | tuple[str, ...] = ()) -> Ended:
        if generation.ended is None:
            generation.ended = Ended(generation=generation.number, why=why, missing=tuple(missing))
            del self._live[generation.number]
            self._past[generation.number] = generation.ended
            if len(self._past) > _REMEMBERED:
                del self._past[next(iter(self._past))]
            for name in generation.peers:
                self._start(self._tell(generation, name, generation.ended))
            self._start(self._wake(generation))
        return generation.ended

    async def _tell(self, generation: _Generation, name: str, ended: Ended) -> None:
        try:
            if name not in generation.left:
                await generation.peers[name].call_async(ended, timeout=_ANSWER_S)
        except (TimeoutError, PeerLost, RemoteError):
            pass  # it is dead, or finds out at its next call
        finally:
            generation.attending[name].cancel()

    async def _wake(self, generation: _Generation) -> None:
        async with generation.changed:
            generation.changed.notify_all()

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _agree(one: Join, other: Join) -> bool:
    return one.members == other.members and one.terms == other.terms


def _owes(position: Position, entered: dict[str, int]) -> bool:
    """Whether a member is still busy with operations that the leaving one has done its part of."""
    return any(
        position.finished.get(channel, 0) < min(count, position.entered.get(channel, 0))
        for channel, count in entered.items()
    )
