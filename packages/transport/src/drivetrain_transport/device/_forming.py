"""How a generation of a group is formed: meet, connect, and go on only if all could."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from drivetrain_transport._address import parse_address
from drivetrain_transport._errors import GroupBroken
from drivetrain_transport.device._accelerator import has_collectives
from drivetrain_transport.device._links import Link, LinkFailed
from drivetrain_transport.device._nccl import NcclLink
from drivetrain_transport.device._rendezvous import Rendezvous, Seat, machine
from drivetrain_transport.device._words import Join, Report


class Formed(NamedTuple):
    seat: Seat
    link: Link


def form(
    members: Sequence[str],
    me: str,
    rendezvous: Rendezvous,
    *,
    name: str,
    device: torch.device,
    bucket_bytes: int,
    trusted_network: bool,
    timeout: float,
) -> Formed:
    """One generation, connected at all members. Errors as `TensorGroup.form` says."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise RuntimeError("this torch was built without torch.distributed, or without gloo: install one that has them")
    if device.type != "cpu" and not has_collectives():
        raise RuntimeError("the library for GPUs' collectives (NCCL, or RCCL) is not there: install torch with it")
    deadline = time.monotonic() + timeout
    terms = f"{'gloo' if device.type == 'cpu' else 'nccl'}, buckets of {bucket_bytes} bytes"
    request = Join(group=name, members=tuple(members), me=me, machine=machine(), terms=terms, timeout=timeout)
    seat = rendezvous.take_seat(request)
    link: Link | None = None
    try:
        alone = len(set(seat.machines)) == 1
        if not alone and not trusted_network:
            hosts = ", ".join(sorted({item.partition(" ")[0] for item in seat.machines}))
            raise ValueError(
                f"the members of {name!r} are on several hosts ({hosts}), and tensors travel unencrypted: "
                "pass trusted_network=True if nobody else can reach the network between them"
            )
        link = _connect(members.index(me), len(members), rendezvous, seat, device, alone, deadline)
        seat.interrupt = link.interrupt
        rendezvous.ready(seat, max(deadline - time.monotonic(), 0.001))
    except LinkFailed as error:
        what = f"connecting the members of {name!r}"
        # Number 0: whoever answers at all is not missing.
        expected = dict.fromkeys(members, ("connect", 0))
        report = Report(generation=seat.number, what=what, error=str(error), expected=expected)
        ended = rendezvous.report(seat, report)
        rendezvous.leave(seat)
        raise GroupBroken(ended.why, missing=ended.missing) from None
    except BaseException:
        if link is not None:
            link.abort()
        rendezvous.leave(seat)
        raise
    return Formed(seat, link)


def _connect(
    rank: int, size: int, rendezvous: Rendezvous, seat: Seat, device: torch.device, alone: bool, deadline: float
) -> Link:
    def put(key: str, value: bytes) -> None:
        rendezvous.put(seat, key, value, deadline - time.monotonic())

    def get(key: str) -> bytes:
        return rendezvous.get(seat, key, deadline - time.monotonic())

    def over() -> str:
        return seat.ended.why if seat.ended else ""

    from drivetrain_transport.device._gloo import GlooLink  # a torch without torch.distributed has no gloo

    host = "127.0.0.1" if alone else _own_address(rendezvous.address)
    control = GlooLink(rank, size, put=put, get=get, host=host, deadline=deadline)
    if device.type == "cpu":
        return control
    try:
        return NcclLink(rank, size, device=device, control=control, put=put, get=get, over=over, deadline=deadline)
    except BaseException:
        control.abort()
        raise


def _own_address(rendezvous: str) -> str:
    """This host's address on the way to the rendezvous: the others have a way there too."""
    target = parse_address(rendezvous)
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
        probe.connect((target.host, target.port))
        return str(probe.getsockname()[0])
