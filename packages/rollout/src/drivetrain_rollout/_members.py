"""The engines of a pool: which of them serve, how much each has, and who gets the next request."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain_rollout._jobs import Reply, settle
from drivetrain_rollout.control import LimitConfig, SawtoothLimit
from drivetrain_rollout.engine import RolloutEngine
from drivetrain_rollout.types import GenerateRequest

MemberState = Literal["serving", "draining", "stale", "failed"]

REMEMBERED = 4096
"""Groups, and beginnings of prompts, of which it is known who has had them."""
PREFIX = 64
"""Tokens of a prompt by which it is known again."""
FULLER = 1.5
"""A request goes to an engine that has had its prompt's beginning if that has up to so many times the requests of the
emptiest. So a beginning that all prompts share is soon known to all, and decides nothing."""
ALMOST_EMPTY = 8
"""Requests that do not count for that."""


@dataclass(eq=False, slots=True)
class Member:
    """An engine in a pool."""

    name: str
    engine: RolloutEngine
    limit: SawtoothLimit
    state: MemberState = "serving"
    error: Exception | None = None
    """Why it is not serving."""
    running: int = 0
    """Requests it has from this pool."""
    bound: deque[Waiter] = field(default_factory=deque)
    """Requests that wait for this member, since their group is here."""

    @property
    def load(self) -> float:
        """How full it is, 0 to 1."""
        return self.running / self.limit.value

    @property
    def has_room(self) -> bool:
        return self.state == "serving" and self.running < self.limit.value


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that wants a member. Made on its own event loop."""

    request: GenerateRequest
    reply: Reply[Member] = field(default_factory=Reply)
    member: Member | None = None


class Members:
    """Gives requests to engines, first come first served; may be called in any thread."""

    def __init__(self, limits: LimitConfig) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._waiting: deque[Waiter] = deque()
        self._groups: OrderedDict[int, Member] = OrderedDict()
        self._prefixes: OrderedDict[tuple[int, ...], set[Member]] = OrderedDict()

    def __iter__(self) -> Iterator[Member]:
        with self._lock:
            return iter(list(self._members.values()))

    def get(self, name: str) -> Member:
        """By its name; ValueError if there is none."""
        with self._lock:
            if name not in self._members:
                raise ValueError(f"no engine {name!r} in the pool: it has {', '.join(self._members) or 'none'}")
            return self._members[name]

    def add(self, name: str, engine: RolloutEngine, state: MemberState) -> Member:
        """A new member; ValueError if the name is taken."""
        with self._lock:
            if name in self._members:
                raise ValueError(f"the pool has an engine {name!r} already: give this one another name")
            member = self._members[name] = Member(name, engine, SawtoothLimit(self._limits), state)
            self._hand_out()
            return member

    def remove(self, member: Member) -> None:
        """Forget a member; what waits for it waits for any."""
        with self._lock:
            self._members.pop(member.name, None)
            member.state = "failed" if member.state == "serving" else member.state
            self._unbind(member)
            self._hand_out()

    def set_state(self, member: Member, state: MemberState, error: Exception | None = None) -> None:
        """Take a member out of service, or back into it."""
        with self._lock:
            member.state, member.error = state, error
            if state != "serving":
                self._unbind(member)
            self._hand_out()

    def wait(self, waiter: Waiter) -> None:
        """Give the waiter's reply a member, now or once there is room."""
        with self._lock:
            self._waiting.append(waiter)
            self._hand_out()

    def give_up(self, waiter: Waiter) -> None:
        """Nobody waits any more; a member that it was given meanwhile has room again."""
        with self._lock:
            if waiter.member is not None:
                self._release(waiter.member)
                return
            for queue in (self._waiting, *(member.bound for member in self._members.values())):
                if waiter in queue:
                    queue.remove(waiter)

    def release(self, member: Member) -> None:
        """A request at the member has ended."""
        with self._lock:
            self._release(member)

    def grew(self) -> None:
        """A limit has changed."""
        with self._lock:
            self._hand_out()

    @property
    def waiting(self) -> int:
        """Requests that no member has yet."""
        with self._lock:
            return len(self._waiting) + sum(len(member.bound) for member in self._members.values())

    def _release(self, member: Member) -> None:
        member.running -= 1
        self._hand_out()

    def _unbind(self, member: Member) -> None:
        self._waiting.extendleft(reversed(member.bound))
        member.bound.clear()

    def _hand_out(self) -> None:
        given = []
        for member in self._members.values():
            while member.bound and member.has_room:
                given.append(self._give(member.bound.popleft(), member))
        while self._waiting and any(member.has_room for member in self._members.values()):
            waiter = self._waiting.popleft()
            member = self._choose(waiter.request)
            if member.has_room:
                given.append(self._give(waiter, member))
            else:
                member.bound.append(waiter)
        settle(given)

    def _give(self, waiter: Waiter, member: Member) -> tuple[Reply[Member], Member]:
        waiter.member = member
        member.running += 1
        return waiter.reply, member

    def _choose(self, request: GenerateRequest) -> Member:
        """The member for a request; its group's own even if that has no room."""
        emptiest = min((member for member in self._members.values() if member.has_room), key=lambda m: m.load)
        chosen = emptiest
        if request.group_id is not None:
            with_group = self._groups.get(request.group_id)
            if with_group is not None and with_group.state == "serving":
                return with_group
        prefix = request.prompt_token_ids[:PREFIX]
        knowing = self._prefixes.get(prefix, set())
        closest = min((member for member in knowing if member.has_room), key=lambda m: m.load, default=emptiest)
        if closest.running <= FULLER * max(emptiest.running, ALMOST_EMPTY):
            chosen = closest
        if request.group_id is not None:
            _remember(self._groups, request.group_id, chosen)
        _remember(self._prefixes, prefix, knowing | {chosen})
        return chosen


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
