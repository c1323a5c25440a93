"""Two buckets that a plan's rounds take turns in, for one direction of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from drivetrain_sharding._copies import Copies, Parameters, box_of, identity
from drivetrain_sharding.exchange import Message
from drivetrain_sharding.plan import Transfer


class Round:
    """What a rank sends or receives in a round: its transfers, those with one rank behind one another.

    Args:
        transfers: of `Plan.sends` or `Plan.receives`.
        peer: which end of them the other rank is.
    """

    def __init__(self, transfers: Sequence[Transfer], peer: Literal["source", "target"]) -> None:
        self.transfers = tuple(sorted(transfers, key=lambda transfer: getattr(transfer, peer)))
        self.offsets: list[int] = []
        """Of each transfer, in the bucket."""
        self.size = 0
        """Bytes of the bucket that the round takes."""
        spans: dict[int, tuple[int, int]] = {}
        for transfer in self.transfers:
            self.offsets.append(self.size)
            self.size += transfer.room
            first, _ = spans.setdefault(getattr(transfer, peer), (self.offsets[-1], 0))
            spans[getattr(transfer, peer)] = first, self.size
        self.messages = tuple((other, *span) for other, span in spans.items())
        """The other rank, and from where to where its message lies in the bucket."""


class Buckets:
    """Carries between parameters and messages.

    Args:
        rounds: of the whole plan.
        end: which end of a transfer is here: what is taken from parameters, or what is put into them.
        parameters: of this rank.
        device: where the buckets are to lie.
    """

    def __init__(
        self, rounds: Sequence[Round], end: Literal["taken", "put"], parameters: Parameters, device: torch.device
    ) -> None:
        self.key = identity(parameters)
        self._staged = None
        if device.type == "cpu":
            self._staged = next((t.device for t in parameters.values() if t.device.type != "cpu"), None)
        buckets = [
            torch.empty(
                max((some.size for some in rounds[first::2]), default=0),
                dtype=torch.uint8,
                device=device,
                pin_memory=self._staged is not None,
            )
            for first in (0, 1)
        ]
        self._messages = list[list[Message]]()
        self._copies = list[Copies]()
        for number, some in enumerate(rounds):
            bucket = buckets[number % 2]
            self._messages.append([(peer, bucket[start:stop]) for peer, start, stop in some.messages])
            pairs = list[tuple[Tensor, Tensor]]()
            for transfer, offset in zip(some.transfers, some.offsets, strict=True):
                box = box_of(getattr(transfer, end), parameters)
                slot = bucket[offset : offset + transfer.nbytes].view(transfer.wire_dtype).view(box.shape)
                pairs.append((slot, box) if end == "taken" else (box, slot))
            self._copies.append(Copies(pairs))

    def messages(self, number: int) -> list[Message]:
        """Those of a round: parts of its bucket."""
        return self._messages[number]

    def packed(self, number: int) -> list[Message]:
        """A round's messages, filled from the parameters."""
        self._copy(number)
        return self._messages[number]

    def unpack(self, number: int) -> None:
        """Fill the parameters from a round's messages."""
        self._copy(number)

    def _copy(self, number: int) -> None:
        self._copies[number].run()
        if self._staged is not None and self._messages[number]:
            torch.accelerator.current_stream(self._staged).synchronize()  # a transport knows no streams on a CPU
