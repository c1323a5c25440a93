"""Typed messages and tensors between processes: msgspec over ZeroMQ, no pickle.

Importing this package imports neither torch nor numpy.
"""

from drivetrain_transport._endpoint import Endpoint
from drivetrain_transport._errors import FrameError, PeerLost, PeerRefused, RemoteError
from drivetrain_transport._frames import decode, encode
from drivetrain_transport._keys import Keys, load_keys, make_keys
from drivetrain_transport._peer import Handler, Peer, PeerState
from drivetrain_transport._protocol import Protocol

__all__ = [
    "Endpoint",
    "FrameError",
    "Handler",
    "Keys",
    "Peer",
    "PeerLost",
    "PeerRefused",
    "PeerState",
    "Protocol",
    "RemoteError",
    "decode",
    "encode",
    "load_keys",
    "make_keys",
]
