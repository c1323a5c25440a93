"""Groups of processes that exchange tensors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from drivetrain_transport._errors import GroupBroken
from drivetrain_transport._stats import ChannelStats, Counters
from drivetrain_transport.device._accelerator import device_of
from drivetrain_transport.device._buckets import Batch, NamedTensors, as_bytes, checked
from drivetrain_transport.device._forming import Formed, form
from drivetrain_transport.device._links import LinkFailed
from drivetrain_transport.device._moving import Move, Refused, Staging, read, write
from drivetrain_transport.device._rendezvous import Rendezvous
from drivetrain_transport.device._words import Report

_BUCKET_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}
# On a CPU, copying into a bucket costs as much as sending does; on a GPU, a message costs as much as copying 50 MiB.


class TensorGroup:
    """Processes that exchange tensors: between GPUs by NCCL or RCCL, between CPUs by gloo. A context manager.

    It is formed through a `Rendezvous` and uses nothing of torch's global process groups: any number of groups live
    side by side, and beside FSDP's. All members call the same operations in the same order:

        weights = dict(model.named_parameters())
        group.broadcast(weights, "trainer", timeout=60)        # at the trainer, and at each of the others

    A group does not outlive a member. When one dies, the others get `GroupBroken` from the operation under way, or
    from their next one, and `broken` says so meanwhile; an operation that is not done after its timeout breaks the
    group as well. Either way the error names who was missing, nothing hangs, and what the tensors being received hold
    is undefined. Close the group then, and form the next generation; a restarted process simply forms the group
    anew, and that breaks the old generation of the others. Operations in which nothing is missing, but the
    two sides' lists differ, break the group too: the sender cannot take back what it sent.

    Tensors of at least a bucket's size go from where they lie to where they lie. Smaller ones are packed into two
    buckets in turn, the only memory a group takes beside the library's own, so that packing, moving and unpacking
    overlap. On a GPU the host waits twice in an operation: for the comparison of the lists, and at the end.

    One thread uses a group at a time. What the members say to each other about the group goes through the
    rendezvous and is encrypted if that has keys; the tensors are not, and gloo and NCCL let in whoever reaches their
    ports while they connect. So members on one host connect over loopback (NCCL: over the interface that
    NCCL_SOCKET_IFNAME names), and members on several need `trusted_network=True`.
    """

    def __init__(
        self, members: Sequence[str], me: str, formed: Formed, rendezvous: Rendezvous, *, name: str,
        device: torch.device, bucket_bytes: int, owned: bool,
    ) -> None:  # fmt: skip
        """Use `form`."""
        self._members = tuple(members)
        self._me = me
        self._seat, self._link = formed
        self._rendezvous = rendezvous
        self._name = name
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._owned = owned
        self._staging = Staging(device)
        self._counters = Counters()
        self._busy = threading.Lock()
        self._closed = False
        self._released = False

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
        return self._seat.number

    @property
    def broken(self) -> str:
        """Why the group cannot be used any more; empty while it can. Becomes true as soon as a member is lost."""
        return self._seat.ended.why if self._seat.ended else ""

    @property
    def stats(self) -> ChannelStats:
        """A message is an operation, at each member that takes part; waits are those of the host."""
        return self._counters.snapshot(f"{self._name} {self.generation} of {self._me}")

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
        with self._operation("broadcast", f"broadcast from {source}", self._members, timeout) as deadline:
            if source == self._me:
                write(batch, lambda flat: self._link.broadcast(flat, root, deadline), self._staging)
                self._counters.sent(batch.bytes)
            else:
                self._read(batch, lambda flat: self._link.broadcast(flat, root, deadline), deadline)
                self._counters.received(batch.bytes)
            self._link.finish(deadline)

    def send(self, tensors: NamedTensors, to: str, *, timeout: float) -> None:
        """Copy tensors to another member, who calls `receive` with the same list. Arguments, errors: `broadcast`."""
        rank = self._rank(to, other=True)
        batch = self._batch(tensors, written=False)
        with self._operation(f"{self._me} > {to}", f"send to {to}", (to,), timeout) as deadline:
            write(batch, lambda flat: self._link.send(flat, rank, deadline), self._staging)
            self._link.finish(deadline)
            self._counters.sent(batch.bytes)

    def receive(self, tensors: NamedTensors, from_: str, *, timeout: float) -> None:
        """Fill tensors with those that another member sends. Arguments and errors as for `broadcast`."""
        rank = self._rank(from_, other=True)
        batch = self._batch(tensors, written=True)
        with self._operation(f"{from_} > {self._me}", f"receive from {from_}", (from_,), timeout) as deadline:
            self._read(batch, lambda flat: self._link.receive(flat, rank, deadline), deadline)
            self._link.finish(deadline)
            self._counters.received(batch.bytes)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, str]],
        receives: Sequence[tuple[torch.Tensor, str]],
        *,
        timeout: float,
    ) -> None:
        """Send and receive single tensors all at once, in whatever order the others do: nobody waits for a turn.

        All members call it, also one that has nothing to move. Between two members, the tensors that one sends are
        those that the other receives, in the same order and of the same sizes. Nothing compares them: of a tensor that
        is too large a part stays unwritten, and one that is too small ends the process, in gloo. All must be
        contiguous. Errors as for `broadcast`.
        """
        out = [(self._flat(tensor, written=False), to) for tensor, to in sends if tensor.numel()]
        into = [(self._flat(tensor, written=True), source) for tensor, source in receives if tensor.numel()]
        peers = {name: self._rank(name, other=True) for _, name in [*out, *into]}
        others = tuple(name for name in self._members if name in peers)
        with self._operation("exchange", f"exchange with {', '.join(others) or 'nobody'}", others, timeout) as deadline:
            with self._link.together():
                begun = [self._link.receive(flat, peers[name], deadline) for flat, name in into]
                begun += [self._link.send(flat, peers[name], deadline) for flat, name in out]
            for work in begun:
                work.join()
            self._link.finish(deadline)
            self._counters.sent(sum(flat.nbytes for flat, _ in out))
            self._counters.received(sum(flat.nbytes for flat, _ in into))

    def sender(self, *, timeout: float) -> Callable[[torch.Tensor, str], None]:
        """`send(tensor, to)` for one contiguous tensor, as code that moves single tensors takes it.

        Each call waits until the tensor may be changed, up to `timeout` seconds. Pairs with `receiver`; as for
        `exchange`, nothing compares the two sides' tensors. Errors as for `broadcast`.
        """

        def send(tensor: torch.Tensor, to: str) -> None:
            flat, rank = self._flat(tensor, written=False), self._rank(to, other=True)
            with self._operation(f"{self._me} > {to}", f"send to {to}", (to,), timeout) as deadline:
                self._link.send(flat, rank, deadline).join()
                self._link.finish(deadline)
                self._counters.sent(flat.nbytes)

        return send

    def receiver(self, *, timeout: float) -> Callable[[torch.Tensor, str], None]:
        """`receive(tensor, source)`: fills one contiguous tensor. See `sender`."""

        def receive(tensor: torch.Tensor, source: str) -> None:
            flat, rank = self._flat(tensor, written=True), self._rank(source, other=True)
            with self._operation(f"{source} > {self._me}", f"receive from {source}", (source,), timeout) as deadline:
                self._link.receive(flat, rank, deadline).join()
                self._link.finish(deadline)
                self._counters.received(flat.nbytes)

        return receive

    def close(self) -> None:
        """Leave the group, which ends it for the others, and give its connections, threads and memory back.

        Waits up to five seconds for members who still need what this one sent; a broken group closes at once.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        orderly = self._seat.ended is None
        self._rendezvous.leave(self._seat)
        self._release(orderly=orderly)
        if self._owned:
            self._rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _operation(self, channel: str, what: str, others: tuple[str, ...], timeout: float) -> Iterator[float]:
        """Counts the operation, so that others can be told where this member is, and turns failure into its name."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{what}: another thread uses the group: let its operation end, or form a second group")
        try:
            if self._closed:
                raise RuntimeError(f"{what}: the group is closed: form the next one")
            if self._seat.ended is not None:
                self._release(orderly=False)
                raise self._gone(what)
            number = self._seat.entered.get(channel, 0) + 1
            self._seat.now = f"{what} (number {number})"
            self._seat.entered[channel] = number
            start = time.monotonic()
            try:
                with torch.no_grad():
                    yield start + timeout
            except (LinkFailed, Refused) as error:
                asked = channel if isinstance(error, LinkFailed) else ""
                self._fail(f"{what} (timeout {timeout:g} s)", str(error), asked, number, others)
                raise self._gone(what) from None
            except BaseException as error:
                self._fail(what, f"it was interrupted by {type(error).__name__}: {error}", "", number, others)
                raise
            self._seat.finished[channel] = number
            self._seat.now = ""
            self._counters.waited(time.monotonic() - start)
        finally:
            self._busy.release()

    def _fail(self, what: str, error: str, channel: str, number: int, others: tuple[str, ...]) -> None:
        report = Report(
            generation=self._seat.number, what=what, error=error, channel=channel, number=number, others=others
        )
        self._rendezvous.report(self._seat, report)
        self._release(orderly=False)

    def _gone(self, what: str) -> GroupBroken:
        assert self._seat.ended is not None
        return GroupBroken(
            f"group {self._name!r} (generation {self.generation}) is broken, {self._me} was to {what}: "
            f"{self._seat.ended.why}",
            missing=[name for name in self._members if name in self._seat.ended.missing],
        )

    def _release(self, *, orderly: bool) -> None:
        if self._released:
            return
        self._released = True
        if orderly:
            self._link.close()
        else:
            self._link.abort()
        self._staging.drop()

    def _batch(self, tensors: NamedTensors, *, written: bool) -> Batch:
        return Batch(tensors, device=self._device, bucket_bytes=self._bucket_bytes, written=written)

    def _flat(self, tensor: torch.Tensor, *, written: bool) -> torch.Tensor:
        tensor = checked("the tensor", tensor, self._device, sys.maxsize, written)
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous: pass a contiguous one")
        return as_bytes(tensor)

    def _read(self, batch: Batch, move: Move, deadline: float) -> None:
        read(batch, move, self._staging, lambda: self._link.finish(deadline))

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
