"""Typed messages and tensors between processes: msgspec over ZeroMQ, no pickle.

Importing this package imports neither torch nor numpy.
"""

from drivetrain_transport._broadcast import Published, Publisher
from drivetrain_transport._broadcast_subscriber import Subscriber
from drivetrain_transport._endpoint import Endpoint
from drivetrain_transport._errors import (
    AlreadyHandled,
    FrameError,
    GroupBroken,
    PeerLost,
    PeerRefused,
    RemoteError,
    StreamTaken,
)
from drivetrain_transport._frames import decode, encode
from drivetrain_transport._journal import Journal
from drivetrain_transport._keys import Keys, load_keys, make_keys
from drivetrain_transport._paths import PathChoice, Site, choose_path
from drivetrain_transport._peer import Handler, Peer, PeerState
from drivetrain_transport._protocol import Protocol
from drivetrain_transport._ring import Ring
from drivetrain_transport._ring_lease import Lease
from drivetrain_transport._stats import ChannelStats
from drivetrain_transport._streams_receiver import Delivery, WorkReceiver
from drivetrain_transport._streams_sender import Progress, WorkSender

__all__ = [
    "AlreadyHandled",
    "ChannelStats",
    "Delivery",
    "Endpoint",
    "FrameError",
    "GroupBroken",
    "Handler",
    "Journal",
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
