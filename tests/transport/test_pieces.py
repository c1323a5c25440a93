import pytest
from drivetrain_transport import FrameError
from drivetrain_transport._endpoints.pieces import PIECE_BYTES, join, split


def test_frames_come_back_whole_and_writable() -> None:
    large = bytearray(2 * PIECE_BYTES + 5)
    large[0], large[PIECE_BYTES], large[-1] = 1, 2, 3
    frames = [b"head", b"", large, bytearray(PIECE_BYTES)]
    pieces, counts = split(frames)
    assert counts == (1, 1, 3, 1)
    assert [memoryview(piece).nbytes for piece in pieces] == [4, 0, PIECE_BYTES, PIECE_BYTES, 5, PIECE_BYTES]
    whole = join(pieces, counts)
    assert [bytes(frame) for frame in whole] == [bytes(frame) for frame in frames]
    assert isinstance(whole[2], bytearray)


def test_pieces_alias_the_frame() -> None:
    large = bytearray(PIECE_BYTES + 1)
    pieces, _ = split([large])
    large[-1] = 9
    assert bytes(pieces[1]) == b"\x09"


def test_frames_that_were_not_split_pass_through() -> None:
    frames = [b"a", b"b"]
    assert join(frames, ()) is frames


@pytest.mark.parametrize("counts", [(1,), (1, 2), (3,), (0, 2), (-1, 3), (2, 0)])
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(FrameError, match=r"2 pieces cannot be frames"):
        join([b"a", b"b"], counts)
