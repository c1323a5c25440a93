"""What can go wrong between two processes, by name."""


class FrameError(ValueError):
    """Frames that are no message: truncated, too large, of another version, or not of the type that was asked for."""


class PeerLost(ConnectionError):
    """The other process is gone: its connection broke, it fell silent, or one of the two sides closed.

    The text names the peer, what happened to it and, when a call was waiting, that call.
    """


class PeerRefused(ConnectionError):
    """The other process answered and turned us away; the text says why (another protocol version, wrong keys)."""


class RemoteError(RuntimeError):
    """The other side's handler raised. `kind` is the exception's class name there, `message` its text."""

    def __init__(self, kind: str, message: str, *, peer: str = "") -> None:
        super().__init__(f"{peer}: {kind}: {message}" if peer else f"{kind}: {message}")
        self.kind = kind
        self.message = message
