"""How lists of tensors are cut into messages, and what packing them keeps."""

import pytest
import torch
from drivetrain_transport.device._buckets import HEADER_BYTES, Batch, Bucket, Direct, cut
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


def batch(tensors: dict[str, torch.Tensor], bucket_bytes: int = 64, written: bool = False) -> Batch:
    return Batch(tensors, device=CPU, bucket_bytes=bucket_bytes, written=written)


def test_small_tensors_fill_buckets_in_order_and_large_ones_go_between() -> None:
    steps = cut([10, 20, 64, 30, 0, 16, 100], 64)
    assert steps == [
        Direct(2),
        Bucket(((0, 0, 10), (1, 16, 20)), 36),
        Direct(6),
        Bucket(((3, 0, 30), (5, 32, 16)), 48),
    ]


def test_nothing_makes_no_message() -> None:
    assert cut([], 64) == []
    assert cut([0, 0], 64) == []


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 200), max_size=60), st.sampled_from([16, 64, 112]))
def test_every_byte_is_in_one_message_aligned_and_within_its_bucket(sizes: list[int], bucket_bytes: int) -> None:
    seen = []
    for step in cut(sizes, bucket_bytes):
        if isinstance(step, Direct):
            assert sizes[step.tensor] >= bucket_bytes
            seen.append(step.tensor)
            continue
        assert 0 < step.size <= bucket_bytes
        end = 0
        for part in step.parts:
            assert part.start % 16 == 0
            assert part.start >= end
            assert part.size == sizes[part.tensor]
            end = part.start + part.size
            seen.append(part.tensor)
        assert end == step.size
    assert sorted(seen) == [index for index, size in enumerate(sizes) if size]


def test_two_neighbouring_buckets_never_fit_in_one() -> None:
    """Buckets are filled: with as many messages as tensors the small ones would cost a round trip each."""
    steps = [step for step in cut([24] * 100, 256) if isinstance(step, Bucket)]
    assert len(steps) == 13  # eight of 24 bytes, each on a multiple of 16, in 256
    assert {len(step.parts) for step in steps[:-1]} == {8}


def test_packing_keeps_bits_and_order_whatever_the_strides() -> None:
    source = {"t": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor([True, False]), "s": torch.arange(9)[::3]}
    copy = {"t": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.bool), "s": torch.zeros(6, dtype=torch.int64)[::2]}
    sent, taken = batch(source, 128), batch(copy, 128, written=True)
    assert sent.steps == taken.steps
    (step,) = sent.steps
    assert isinstance(step, Bucket)
    bucket = torch.empty(step.size, dtype=torch.uint8)
    sent.pack(step, bucket)
    assert bucket[:24].view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]
    taken.unpack(step, bucket)
    assert all(torch.equal(copy[name], source[name]) for name in source)


def test_large_tensors_are_not_copied() -> None:
    large = torch.zeros(100)
    (step,) = (made := batch({"w": large})).steps
    assert isinstance(step, Direct)
    assert made.flat(step).data_ptr() == large.data_ptr()
    assert made.flat(step).nbytes == 400


def test_parameters_are_written_without_their_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    made = batch({"p": parameter}, written=True)
    (step,) = made.steps
    assert isinstance(step, Bucket)
    made.unpack(step, torch.ones(2).view(torch.uint8))
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "other",
    [
        {"renamed": torch.zeros(4), "v": torch.zeros(2)},
        {"w": torch.zeros(4, dtype=torch.int32), "v": torch.zeros(2)},
        {"w": torch.zeros(2, 2), "v": torch.zeros(2)},
        {"v": torch.zeros(2), "w": torch.zeros(4)},
        {"w": torch.zeros(4)},
    ],
    ids=["name", "dtype", "shape", "order", "number"],
)
def test_lists_that_differ_have_other_headers(other: dict[str, torch.Tensor]) -> None:
    mine = batch({"w": torch.zeros(4), "v": torch.zeros(2)})
    assert len(mine.header()) == HEADER_BYTES
    assert mine.difference(mine.header()) == ""
    assert mine.difference(batch({"w": torch.ones(4), "v": torch.ones(2)}).header()) == ""
    assert f"{len(other)} tensors of" in mine.difference(batch(other).header())
