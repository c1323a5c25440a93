"""Large frames in pieces, for encrypted connections.

CURVE encrypts a frame in one go, on the thread that also answers heartbeats: a frame of a gigabyte would keep it for
seconds. In pieces, the heartbeats get their turn between two of them. Unencrypted frames need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain_transport._errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES = 1 << 20
"""About 3 ms of encryption."""


def split(frames: Sequence[Buffer]) -> tuple[list[Buffer], tuple[int, ...]]:
    """The frames cut into pieces, without a copy, and the number of pieces that each became."""
    pieces: list[Buffer] = []
    counts = []
    for frame in frames:
        view = memoryview(frame)
        starts = range(0, view.nbytes, PIECE_BYTES)
        if len(starts) < 2:
            pieces.append(frame)
        else:
            flat = view.cast("B")
            pieces.extend(flat[start : start + PIECE_BYTES] for start in starts)
        counts.append(max(len(starts), 1))
    return pieces, tuple(counts)


def join(pieces: Sequence[Buffer], counts: Sequence[int]) -> Sequence[Buffer]:
    """The frames that were cut; an empty `counts` says that none was.

    Raises:
        FrameError: The counts are not those of the pieces.
    """
    if not counts:
        return pieces
    if min(counts) < 1 or sum(counts) != len(pieces):
        raise FrameError(f"{len(pieces)} pieces cannot be frames of {list(counts)} pieces each")
    frames: list[Buffer] = []
    start = 0
    for count in counts:
        group = pieces[start : start + count]
        frames.append(group[0] if count == 1 else bytearray().join(group))
        start += count
    return frames
