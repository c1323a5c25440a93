"""The ledger's file: one JSON object a line, and which of its lines count.

The first line names the ledger, every other one is an event. A `rewind` says that from here on the ledger is what its
first `to` bytes had made of it, so that a resumed run leaves the history it went back on in the file. A line without
its newline was being written when the process died: nobody was told of it, and it does not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import BinaryIO, Literal

import msgspec

Outcome = Literal["trained", "filtered", "stale", "failed"]
"""How a sample ends: in an optimizer step, left out on purpose, too old to train on, or lost to an error."""

FORMAT_VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ledger"):
    ledger_id: str
    version: int


class Issue(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="issue"):
    sample_id: int


class End(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="end"):
    sample_id: int
    outcome: Outcome
    reason: str = ""


class Rewind(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="rewind"):
    to: int


Record = Header | Issue | End | Rewind

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_HEADER_BEGINS = _ENCODER.encode(Header(ledger_id="", version=FORMAT_VERSION)).partition(b',"ledger_id"')[0]
_REWIND_BEGINS = _ENCODER.encode(Rewind(to=0)).partition(b',"to"')[0]


def encode(record: Record) -> bytes:
    """The line of a record."""
    return _ENCODER.encode(record) + b"\n"


def read_header(path: str) -> Header:
    """The first line, or a `ValueError` if this is no ledger, or one of another version."""
    with open(path, "rb") as file:
        line = file.readline()
    try:
        header = _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no sample ledger: its first line is {line[:80]!r}") from error
    if not isinstance(header, Header):
        raise ValueError(f"{path} is no sample ledger: its first line is {line[:80]!r}")
    if header.version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {header.version} of the ledger's format; this library reads {FORMAT_VERSION}"
        )
    return header


def require_beginning(path: str) -> None:
    """A `ValueError` unless a file without a complete line is empty, or the beginning of a ledger."""
    with open(path, "rb") as file:
        begun = file.read(len(_HEADER_BEGINS))
    if not _HEADER_BEGINS.startswith(begun):
        raise ValueError(f"{path} is no sample ledger: it begins with {begun!r}")


def complete_size(path: str) -> int:
    """The number of bytes up to and with the last newline."""
    with open(path, "rb") as file:
        position = file.seek(0, 2)
        while position > 0:
            begin = max(0, position - 4096)
            file.seek(begin)
            newline = file.read(position - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            position = begin
    return 0


def live_records(path: str) -> Iterator[tuple[int, Issue | End]]:
    """The events that count, with their positions in the file."""
    read_header(path)
    stop = complete_size(path)
    with open(path, "rb") as file:
        for begin, end in _live_ranges(file, path, stop):
            for position, line in _lines(file, begin, end):
                record = _decode(line, path, position)
                if isinstance(record, Issue | End):
                    yield position, record


def _live_ranges(file: BinaryIO, path: str, stop: int) -> list[tuple[int, int]]:
    # A branch begins after a rewind and stands on the ranges that the rewind went back to.
    begins: list[int] = [0]
    bases: list[list[tuple[int, int]]] = [[]]

    def ranges_at(offset: int) -> list[tuple[int, int]]:
        branch = bisect_right(begins, offset) - 1
        return [*bases[branch], (begins[branch], offset)]

    for position, line in _lines(file, 0, stop):
        if line.startswith(_REWIND_BEGINS):
            rewind = _decode(line, path, position)
            assert isinstance(rewind, Rewind)
            base = ranges_at(rewind.to)
            begins.append(position + len(line))
            bases.append(base)
    return ranges_at(stop)


def _lines(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    file.seek(begin)
    position = begin
    while position < end:
        line = file.readline()
        yield position, line
        position += len(line)


def _decode(line: bytes, path: str, position: int) -> Record:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is damaged at byte {position}: {line[:80]!r} is no ledger record ({error})"
        ) from error
