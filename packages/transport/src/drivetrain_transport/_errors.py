"""What can go wrong between two processes, by name."""

from collections.abc import Sequence


class FrameError(ValueError):
    """Frames that are no message: truncated, too large, of another version, or not of the type that was asked for."""


class PeerLost(ConnectionError):
    """The other process is gone: its connection broke, it fell silent, or one of the two sides closed.

    The text names the peer, what happened to it and, when a call was waiting, that call.
    """


class PeerRefused(ConnectionError):
    """The other process answered and turned us away; the text says why (another protocol version, wrong keys).

    Of several addresses: all of them did.
    """


class RemoteError(RuntimeError):
    """The other side's handler raised. `kind` is the exception's class name there, `message` its text."""

    def __init__(self, kind: str, message: str, *, peer: str = "") -> None:
        super().__init__(f"{peer}: {kind}: {message}" if peer else f"{kind}: {message}")
        self.kind = kind
        self.message = message


class GroupBroken(ConnectionError):
    """A tensor group can no longer exchange tensors, or was not formed: close it, and form the next one.

    `missing` names the members who were not there, in the group's order; it is empty when all were, and the text says
    what else went wrong.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class AlreadyHandled(RuntimeError):
    """Another receiver has handled this message; the journal that they share says so."""


class JournalFailed(OSError):
    """A journal's file cannot be read or written: its disk is full, or it is damaged, locked away or gone.

    The text has the path, what SQLite says, and the mend; SQLite's own error is the cause. Nothing was recorded.
    """


class StreamTaken(RuntimeError):
    """Another sender has taken over the stream under whose name this one sends. Only one may speak for it."""
