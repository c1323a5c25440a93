"""The endpoint's own words, one per message, ahead of the frames that a request or a reply adds.

A connecting endpoint opens two connections to the same address. The handshake:

    connecting                                   binding
        |---- Hello, on the data connection ------->|    version and keys are checked
        |<--- Welcome(liveness) or Refused ---------|
        |---- Attach, on the life connection ------>|    the peer has joined
        |<--- Attached -----------------------------|

From then on requests, replies and goodbyes travel on the data connection, in order. The life connection carries
nothing but heartbeats, so that a message of any size on the data connection never delays them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from drivetrain_transport._errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAGIC = b"DTE\x01"  # the last byte is the version of this file's structs


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    version: str
    """The protocol's version."""
    name: str
    session: bytes
    """Random; it ties the two connections together."""
    token: str
    """Proves that the caller holds the keys; empty without keys."""
    max_bytes: int
    """The largest message that this side takes."""


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    liveness: float
    max_bytes: int
    """As in Hello."""


class Refused(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    reason: str


class Attach(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    session: bytes


class Attached(msgspec.Struct, tag=True, frozen=True):
    pass


class Probe(msgspec.Struct, tag=True, frozen=True):
    """Says nothing: that it can be sent proves that the connection stands."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The sender closes; it is answered with the same, and then both know that everything before it has arrived."""

    reason: str = ""
    """Why this connection ends, where that is the other side's doing."""

    @property
    def text(self) -> str:
        return f"said goodbye: {self.reason}" if self.reason else "said goodbye"


class Request(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The frames behind it hold the request."""

    call: int
    pieces: tuple[int, ...] = ()
    """How many pieces each frame comes in; empty when every frame is whole."""


class Reply(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The frames behind it hold the reply."""

    call: int
    pieces: tuple[int, ...] = ()
    """As for a request."""


class Failure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The handler raised."""

    call: int
    kind: str
    message: str


class Cancel(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Nobody waits for the reply any more."""

    call: int


Envelope = Hello | Welcome | Refused | Attach | Attached | Probe | Goodbye | Request | Reply | Failure | Cancel

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def pack(envelope: Envelope) -> bytes:
    return _MAGIC + _encoder.encode(envelope)


def unpack(frame: Buffer) -> Envelope:
    """Read an envelope; FrameError when it is none."""
    view = memoryview(frame)
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise FrameError(f"not an envelope: it starts with {bytes(view[:8])!r}")
    try:
        return _decoder.decode(view[len(_MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not an envelope: {error}") from error
