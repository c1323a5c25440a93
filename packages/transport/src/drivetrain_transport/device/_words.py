"""What the members of a group and the host of their rendezvous say to each other."""

from __future__ import annotations

import msgspec

from drivetrain_transport._endpoints.protocol import Protocol


class Join(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Take part in the next generation of a group. Answered by Roster, or by Absent after `timeout`."""

    group: str
    members: tuple[str, ...]
    me: str
    machine: str
    terms: str
    """What all members must have in common beside the members: the backend, the size of buckets."""
    timeout: float


class Roster(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """All have joined: the generation's number, and each member's machine."""

    generation: int
    machines: tuple[str, ...]


class Absent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Not all have joined: what is known of those who have not."""

    absent: dict[str, str]


class Put(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leave a value for the generation's other members."""

    generation: int
    key: str
    value: bytes


class Get(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answered by Value once another member has put it, or by Ended."""

    generation: int
    key: str


class Value(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    value: bytes


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """This member can exchange tensors. Answered by Done when all can, or by Ended."""

    generation: int
    timeout: float


class Report(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An operation failed at this member: who was missing? Answered by Ended."""

    generation: int
    what: str
    error: str
    expected: dict[str, tuple[str, int]]
    """Who took part, and which operation each must have come to: its channel and number. Empty when it is known whose
    fault it was, and nobody need be asked."""


class Leave(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """This member takes no further part. Answered by Done once nobody needs what it did before."""

    generation: int
    entered: dict[str, int]


class Attend(msgspec.Struct, tag=True, frozen=True):
    """From the host, to each member: answered never. It breaks off when either process dies, and so both know."""

    generation: int


class Where(msgspec.Struct, tag=True, frozen=True):
    """From the host: answered by Position."""

    generation: int


class Position(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How many operations a member has begun and ended, by channel, and what it is doing."""

    entered: dict[str, int]
    finished: dict[str, int]
    now: str


class Ended(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The generation is over. From the host as a request as well."""

    generation: int
    why: str
    missing: tuple[str, ...] = ()


class Done(msgspec.Struct, tag=True, frozen=True):
    pass


PROTOCOL = Protocol(
    requests=Join | Put | Get | Ready | Report | Leave | Attend | Where | Ended,
    replies=Roster | Absent | Value | Done | Position | Ended,
    version="tensor-groups 2",
)
