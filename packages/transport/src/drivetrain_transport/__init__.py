"""Typed messages and tensors between processes: over ZeroMQ and in shared memory, no pickle.

Importing this package imports neither torch nor numpy; `drivetrain_transport.device`, for tensors between GPUs, needs
torch and is imported by its name.
"""

from drivetrain_transport._broadcasts.publisher import Published, Publisher
from drivetrain_transport._broadcasts.subscriber import Subscriber
from drivetrain_transport._codec.frames import decode, encode
from drivetrain_transport._endpoints.endpoint import Endpoint
from drivetrain_transport._endpoints.peer import Handler, Peer, PeerState
from drivetrain_transport._endpoints.protocol import Protocol
from drivetrain_transport._errors import (
    AlreadyHandled,
    FrameError,
    GroupBroken,
    JournalFailed,
    PeerLost,
    PeerRefused,
    RemoteError,
    StreamTaken,
)
from drivetrain_transport._keys import Keys, load_keys, make_keys
from drivetrain_transport._paths import PathChoice, Site, choose_path
from drivetrain_transport._rings.lease import Lease
from drivetrain_transport._rings.ring import Ring
from drivetrain_transport._stats import ChannelStats
from drivetrain_transport._streams.journal import Journal
from drivetrain_transport._streams.receiver import Delivery, WorkReceiver
from drivetrain_transport._streams.sender import Progress, WorkSender

__all__ = [
    "AlreadyHandled",
    "ChannelStats",
    "Delivery",
    "Endpoint",
    "FrameError",
    "GroupBroken",
    "Handler",
    "Journal",
    "JournalFailed",
    "Keys",
    "Lease",
    "PathChoice",
    "Peer",
    "PeerLost",
    "PeerRefused",
    "PeerState",
    "Progress",
    "Protocol",
    "Published",
    "Publisher",
    "RemoteError",
    "Ring",
    "Site",
    "StreamTaken",
    "Subscriber",
    "WorkReceiver",
    "WorkSender",
    "choose_path",
    "decode",
    "encode",
    "load_keys",
    "make_keys",
]
