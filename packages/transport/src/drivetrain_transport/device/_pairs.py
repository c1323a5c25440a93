"""What members tell each other in few bytes: what is to move between two of them, and whether all agree.

Before single tensors move between two members, each says what it sends and what it expects, so that both find out
whether that fits, and both the same:

    a   header ──────► b      digests of both lists, and the bytes of their text
    a   ◄────── header b
    a   text  ◄──────► text b      only if the digests differ
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from drivetrain_transport.device._buckets import HEADER_BYTES
from drivetrain_transport.device._links import Link
from drivetrain_transport.device._moving import Refused

_HEADER = struct.Struct("<16s16sQ16x8s")
_SINGLE, _VOTE = b"single.1", b"vote...1"  # where the header of a named list is zero
assert _HEADER.size == HEADER_BYTES


class Pair(NamedTuple):
    """What moves between this member and another one, in order."""

    sends: Sequence[torch.Tensor]
    receives: Sequence[torch.Tensor]

    def texts(self) -> tuple[bytes, bytes]:
        return _text(self.sends), _text(self.receives)


def misfits(pairs: Mapping[int, Pair], names: Sequence[str], link: Link, deadline: float) -> dict[int, str]:
    """Compare this member's side of each pair with the other's, at the same time with all of them, who do likewise.

    Args:
        pairs: By the other member's rank.
        names: Of all members, by rank.

    Returns:
        The pairs whose sides differ, and how.

    Raises:
        Refused: The other member does something else.
    """
    texts = {rank: pair.texts() for rank, pair in pairs.items()}
    headers = {rank: _pack(*mine) for rank, mine in texts.items()}
    differ: dict[int, int] = {}

    def compare(rank: int, header: bytes) -> None:
        sends, receives, size = _unpack(header, _SINGLE, names[rank])
        if (receives, sends) != tuple(map(_digest, texts[rank])):
            differ[rank] = size

    _swap(headers, dict.fromkeys(pairs, HEADER_BYTES), compare, link, deadline)
    found = {}

    def explain(rank: int, text: bytes) -> None:
        found[rank] = _difference(names[rank], *texts[rank], *text.split(b"\0"))

    if differ:
        _swap({rank: b"\0".join(texts[rank]) for rank in differ}, differ, explain, link, deadline)
    return found


def unanimous(ok: bool, rank: int, names: Sequence[str], link: Link, deadline: float) -> bool:
    """Whether all members say that it is ok. The first one asks, and tells. Raises Refused."""
    votes = {rank: ok}

    def count(voter: int, header: bytes) -> None:
        votes[voter] = bool(_unpack(header, _VOTE, names[voter])[2])

    def vote(ok: bool) -> bytes:
        return _HEADER.pack(b"", b"", ok, _VOTE)

    if rank != 0:
        _swap({0: vote(ok)}, {0: HEADER_BYTES}, count, link, deadline)
        return votes[0]
    others = range(1, len(names))
    _swap({}, dict.fromkeys(others, HEADER_BYTES), count, link, deadline)
    verdict = all(votes.values())
    _swap(dict.fromkeys(others, vote(verdict)), {}, count, link, deadline)
    return verdict


def _swap(
    out: Mapping[int, bytes], sizes: Mapping[int, int], look: Callable[[int, bytes], None], link: Link, deadline: float
) -> None:
    """Give each of the members bytes, and look at the bytes of the given size that each gives."""
    into = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}
    with link.together():
        taken = {rank: link.receive(flat, rank, deadline) for rank, flat in into.items()}
        given = [
            link.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank, deadline)
            for rank, text in out.items()
        ]
    for rank, work in taken.items():
        work.join()
        look(rank, bytes(into[rank].tolist()))  # before the others are waited for, who may do something else
    for work in given:
        work.join()


def _pack(sends: bytes, receives: bytes) -> bytes:
    return _HEADER.pack(_digest(sends), _digest(receives), len(sends) + 1 + len(receives), _SINGLE)


def _unpack(header: bytes, mark: bytes, name: str) -> tuple[bytes, bytes, int]:
    first, second, number, found = _HEADER.unpack(header)
    if found != mark:
        raise Refused(f"{name} does something else meanwhile: all call the same operations in the same order")
    return first, second, number


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _text(tensors: Sequence[torch.Tensor]) -> bytes:
    return "\n".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors).encode()


def _difference(name: str, sends: bytes, receives: bytes, their_sends: bytes, their_receives: bytes) -> str:
    """The first tensor that differs, seen from here."""
    for (mine, theirs), text in (
        ((sends, their_receives), "tensor {} to {}: {} is sent, and {} is expected there"),
        ((receives, their_sends), "tensor {} from {}: {} is expected, and {} is sent there"),
    ):
        both = itertools.zip_longest(mine.decode().splitlines(), theirs.decode().splitlines(), fillvalue="nothing")
        for number, (here, there) in enumerate(both):
            if here != there:
                return text.format(number, name, here, there)
    raise AssertionError("the digests differ, and the texts do not")
