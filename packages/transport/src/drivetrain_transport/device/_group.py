"""Groups of processes that exchange tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from drivetrain_transport._stats import ChannelStats
from drivetrain_transport.device._accelerator import device_of
from drivetrain_transport.device._buckets import Batch, NamedTensors, checked
from drivetrain_transport.device._forming import Formed, form
from drivetrain_transport.device._links import Work
from drivetrain_transport.device._moving import Staging, read, write
from drivetrain_transport.device._pairs import unanimous
from drivetrain_transport.device._rendezvous import Rendezvous
from drivetrain_transport.device._rounds import Moves, Round, start
from drivetrain_transport.device._session import Session

_BUCKET_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}
# On a CPU, copying into a bucket costs as much as sending does; on a GPU, a message costs as much as copying 50 MiB.


class TensorGroup:
    """Processes that exchange tensors: between GPUs by NCCL or RCCL, between CPUs by gloo. A context manager.

    It is formed through a `Rendezvous` and uses nothing of torch's global process groups: any number of groups live
    side by side, and beside FSDP's. All members call the same operations in the same order:

        weights = dict(model.named_parameters())
        group.broadcast(weights, "trainer", timeout=60)        # at the trainer, and at each of the others

    A group does not outlive a member. When one dies, the others get `GroupBroken` from the operation under way, or
    from their next one, and `broken` says so meanwhile: within half a second on one host, whatever they wait for. An
    operation that is not done after its timeout breaks the group as well; who is asked where it is and says nothing
    has 1.5 s more. Either way the error names who was missing, nothing hangs, and what the tensors being received hold
    is undefined. Close the group then, and form the next generation; a restarted process simply forms the group
    anew, and that breaks the old generation of the others. Named lists that differ break the group too: their sender
    cannot take back what it sent. Ctrl-C, in whatever is waited for, is prompt, and breaks the group for all.

    Tensors of at least a bucket's size go from where they lie to where they lie. Smaller ones are packed into two
    buckets in turn, the only memory a group takes beside the library's own, so that packing, moving and unpacking
    overlap. On a GPU the host waits twice in an operation: for the comparison of the lists, and at the end.

    One thread uses a group at a time. What the members say to each other about the group goes through the
    rendezvous and is encrypted if that has keys; the tensors and their shapes are not, and gloo (between GPUs' members
    as well) and NCCL let in whoever reaches their ports while they connect. So members on one host connect over
    loopback (NCCL: over the interface that NCCL_SOCKET_IFNAME names), and members on several need
    `trusted_network=True`.
    """

    def __init__(
        self, members: Sequence[str], me: str, formed: Formed, rendezvous: Rendezvous, *, name: str,
        device: torch.device, bucket_bytes: int, owned: bool,
    ) -> None:  # fmt: skip
        """Use `form`."""
        self._members = tuple(members)
        self._me = me
        self._link = formed.link
        self._rendezvous = rendezvous
        self._name = name
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._owned = owned
        self._staging = Staging(device)
        self._session = Session(members, me, formed, rendezvous, name=name, staging=self._staging)

    @classmethod
    def form(
        cls,
        members: Sequence[str],
        me: str,
        rendezvous: Rendezvous | str,
        *,
        timeout: float,
        device: str | torch.device | None = "cpu",
        name: str = "tensors",
        bucket_bytes: int | None = None,
        trusted_network: bool = False,
    ) -> TensorGroup:
        """Form the next generation of a group; returns when all members are connected to each other.

        Args:
            members: The names of all members, the same list at each of them.
            me: This process's name in it. A process that takes the name of one that is still there replaces it.
            rendezvous: Where they meet; an address is joined for this group alone, and needs no keys then.
            timeout: Seconds until all must be there.
            device: Where this member's tensors lie: "cpu" for all, or a GPU of its own for each. None is the GPU in
                use, or the CPU where there is none.
            name: Tells groups of one rendezvous apart.
            bucket_bytes: The size of a bucket, a multiple of 16, the same at all members. By default 64 MiB for GPUs,
                1 MiB for CPUs.
            trusted_network: Members may be on several hosts, though tensors travel unencrypted.

        Raises:
            GroupBroken: A member did not come in time, came and died, or could not be connected; names it. Nothing is
                left of the attempt.
            ValueError: The list, the size or the device cannot be, or the members are on several hosts.
            RuntimeError: NCCL, or torch.distributed, is not there.
        """
        _check_members(members, me)
        if bucket_bytes is not None and (bucket_bytes < 16 or bucket_bytes % 16):
            raise ValueError(f"bucket_bytes is {bucket_bytes}: choose a positive multiple of 16")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout} s: it must be positive")
        place = device_of(device)
        bucket_bytes = bucket_bytes or _BUCKET_BYTES["cpu" if place.type == "cpu" else "gpu"]
        owned = isinstance(rendezvous, str)
        meeting = Rendezvous.join(rendezvous, timeout=timeout) if isinstance(rendezvous, str) else rendezvous
        try:
            formed = form(
                members, me, meeting, name=name, device=place, bucket_bytes=bucket_bytes,
                trusted_network=trusted_network, timeout=timeout,
            )  # fmt: skip
        except BaseException:
            if owned:
                meeting.close()
            raise
        return cls(
            members, me, formed, meeting, name=name, device=place, bucket_bytes=bucket_bytes, owned=owned
        )  # fmt: skip

    @property
    def members(self) -> tuple[str, ...]:
        return self._members

    @property
    def me(self) -> str:
        return self._me

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def generation(self) -> int:
        """Counts the groups formed at the rendezvous; the same number at all members."""
        return self._session.seat.number

    @property
    def broken(self) -> str:
        """Why the group cannot be used any more; empty while it can. Becomes true as soon as a member is lost."""
        ended = self._session.seat.ended
        return ended.why if ended else ""

    @property
    def stats(self) -> ChannelStats:
        """A message is an operation, at each member that takes part; waits are those of the host."""
        return self._session.counters.snapshot(f"{self._name} {self.generation} of {self._me}")

    def broadcast(self, tensors: NamedTensors, source: str, *, timeout: float) -> None:
        """Copy `source`'s tensors to all other members' tensors. Every member calls it, with the same list.

        Args:
            tensors: Names and tensors, on the group's device. The names, dtypes and shapes, and their order, are the
                same at all members; at all but the source the tensors are written.
            source: The member whose values all have afterwards.
            timeout: Seconds until it must be done; after that the group is broken.

        Raises:
            GroupBroken: A member was missing, or the lists differ; names it and says what it was doing instead.
            ValueError: A tensor cannot be sent or written; raised before anything is sent, the group is as it was.
            RuntimeError: The group is closed, or in use by another thread.
        """
        root = self._rank(source)
        batch = self._batch(tensors, written=source != self._me)
        everybody = dict.fromkeys(self._members, "broadcast")
        self._move(
            f"broadcast from {source}", everybody, timeout, batch,
            lambda flat, deadline: self._link.broadcast(flat, root, deadline), out=source == self._me,
        )  # fmt: skip

    def send(self, tensors: NamedTensors, to: str, *, timeout: float) -> None:
        """Copy tensors to another member, who calls `receive` with the same list. Arguments, errors: `broadcast`."""
        rank = self._rank(to, other=True)
        batch = self._batch(tensors, written=False)
        self._move(
            f"send to {to}", {to: f"{self._me} > {to}"}, timeout, batch,
            lambda flat, deadline: self._link.send(flat, rank, deadline), out=True,
        )  # fmt: skip

    def receive(self, tensors: NamedTensors, from_: str, *, timeout: float) -> None:
        """Fill tensors with those that another member sends. Arguments and errors as for `broadcast`."""
        rank = self._rank(from_, other=True)
        batch = self._batch(tensors, written=True)
        self._move(
            f"receive from {from_}", {from_: f"{from_} > {self._me}"}, timeout, batch,
            lambda flat, deadline: self._link.receive(flat, rank, deadline), out=False,
        )  # fmt: skip

    def start(
        self,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
        *,
        timeout: float,
    ) -> Round:
        """Start sending and receiving single tensors, in whatever order the others do; `wait` of the result ends it.

        Any number of rounds may be in flight, so that one is packed and another one unpacked while a third moves:

            this = group.start(sends, receives, timeout=60)
            fill(other_buffers)
            this.wait()

        Between two members, the tensors that one sends are those that the other receives: as many, in the same order,
        of the same dtypes and shapes. They tell each other first, so this waits until the members with whom something
        moves come to their `start` as well. Rounds between two members meet in the order in which each starts them.

        Args:
            sends: To whom, and the tensor: contiguous, on the group's device. It stays as it is until `wait` returns.
            receives: From whom, and the tensor that is filled.
            timeout: Seconds until all must be through, `wait` included; after that the group is broken.

        Raises:
            ValueError: The two sides of a pair of members differ; both get it, and it names the other member, the
                tensor's place in the list, and dtype and shape on both sides. Nothing moved between these two, what
                the others sent and were sent is through, and the group is as it was. Or a tensor cannot be moved.
            GroupBroken, RuntimeError: As for `broadcast`.
        """
        return self._start("exchange with {}", sends, receives, timeout)

    def exchange(
        self,
        sends: Sequence[tuple[str, torch.Tensor]],
        receives: Sequence[tuple[str, torch.Tensor]],
        *,
        timeout: float,
    ) -> None:
        """`start`, and wait: send and receive single tensors all at once. Nobody waits for a turn."""
        self.start(sends, receives, timeout=timeout).wait()

    def sender(self, *, timeout: float) -> Callable[[torch.Tensor, str], None]:
        """`send(tensor, to)` for one contiguous tensor, as code that moves single tensors takes it.

        Each call waits until the tensor may be changed, up to `timeout` seconds. Pairs with `receiver`; errors as for
        `start`.
        """
        return lambda tensor, to: self._start("send to {}", [(to, tensor)], [], timeout).wait()

    def receiver(self, *, timeout: float) -> Callable[[torch.Tensor, str], None]:
        """`receive(tensor, source)`: fills one contiguous tensor. See `sender`."""
        return lambda tensor, source: self._start("receive from {}", [], [(source, tensor)], timeout).wait()

    def agree(self, ok: bool, *, timeout: float) -> bool:
        """Whether all members say that it is ok, the same answer at all of them. Every member calls it.

        Raises:
            GroupBroken, RuntimeError: As for `broadcast`.
        """
        control, rank = self._link.control, self._rank(self._me)
        with self._session.whole("agree", dict.fromkeys(self._members, "agree"), timeout) as operation:
            deadline = operation.deadline
            return control.run(lambda: unanimous(ok, rank, self._members, control, deadline))

    def close(self) -> None:
        """Leave the group, which ends it for the others, and give its connections, threads and memory back.

        Waits up to five seconds for members who still need what this one sent; a broken group closes at once.
        Idempotent.
        """
        self._session.close()
        if self._owned:
            self._rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _move(
        self, what: str, channels: Mapping[str, str], timeout: float, batch: Batch,
        move: Callable[[torch.Tensor, float], Work], *, out: bool,
    ) -> None:  # fmt: skip
        """A named list, in or out."""
        with self._session.whole(what, channels, timeout) as operation:
            deadline = operation.deadline
            if out:
                self._link.run(lambda: write(batch, lambda flat: move(flat, deadline), self._staging))
            else:
                self._link.run(
                    lambda: read(
                        batch, lambda flat: move(flat, deadline), self._staging, lambda: self._link.finish(deadline)
                    )
                )
            self._link.finish(deadline)
        (self._session.counters.sent if out else self._session.counters.received)(batch.bytes)

    def _start(
        self, what: str,
        sends: Sequence[tuple[str, torch.Tensor]], receives: Sequence[tuple[str, torch.Tensor]], timeout: float,
    ) -> Round:  # fmt: skip
        moves = Moves(
            [(to, self._single(tensor, written=False)) for to, tensor in sends],
            [(source, self._single(tensor, written=True)) for source, tensor in receives],
        )
        with_whom = {name for name, _ in [*sends, *receives]}
        for name in with_whom:
            self._rank(name, other=True)
        others = [name for name in self._members if name in with_whom]
        channels = {name: " and ".join(sorted((self._me, name))) for name in others}
        what = what.format(", ".join(others) or "nobody")
        with self._session.begun(what, channels, timeout) as operation:
            begun, misfits = start(self._session, moves, self._members, operation)
        if misfits:
            begun.wait()
            raise ValueError(f"{self._me} was to {what}, and both sides must pass the same: {'; '.join(misfits)}")
        return begun

    def _batch(self, tensors: NamedTensors, *, written: bool) -> Batch:
        return Batch(tensors, device=self._device, bucket_bytes=self._bucket_bytes, written=written)

    def _single(self, tensor: torch.Tensor, *, written: bool) -> torch.Tensor:
        tensor = checked("the tensor", tensor, self._device, sys.maxsize, written)
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous: pass a contiguous one")
        return tensor

    def _rank(self, name: str, *, other: bool = False) -> int:
        if name not in self._members:
            raise ValueError(f"{name!r} is no member: the group has {', '.join(self._members)}")
        if other and name == self._me:
            raise ValueError(f"{name!r} is this member itself: name another one")
        return self._members.index(name)


def _check_members(members: Sequence[str], me: str) -> None:
    if len(set(members)) != len(members) or len(members) < 2 or not all(members):
        raise ValueError(f"members are {list(members)}: name two or more, each once")
    if me not in members:
        raise ValueError(f"{me!r} is not among the members {list(members)}: each process names itself")
