import itertools
import struct
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from drivetrain_sharding import (
    DeltaChain,
    DeltaRefused,
    apply_delta,
    delta_digests,
    digest,
    encode_delta,
)
from drivetrain_sharding import delta as module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Weights = dict[str, Tensor]
HEADER = 72
FRAME = struct.Struct("<IQQQQQ")


def bits_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def weights(seed: int = 0) -> Weights:
    return {
        "a": bits_of((40, 30), torch.bfloat16, seed),
        "b": bits_of((7,), torch.float32, seed + 1),
        "c": bits_of((), torch.float64, seed + 2),
        "d": bits_of((0, 3), torch.bfloat16, seed + 3),
    }


def copied(tensors: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def a_step(tensors: Weights, part: float, seed: int = 0) -> Weights:
    """The next version: a part of all elements is moved by one unit in the last place, either way."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(-1).view(torch.int16)
        steps = torch.randint(0, 2, bits.shape, generator=generator) * 2 - 1
        steps *= torch.rand(bits.shape, generator=generator) < part
        moved[name] = (bits + steps.to(torch.int16)).view(tensor.dtype).view(tensor.shape)
    return moved


def the_delta(base: Weights, new: Weights) -> bytes:
    return b"".join(encode_delta(base, new))


def same(one: Weights, other: Weights) -> bool:
    return digest(one) == digest(other)


@given(
    dtype=st.sampled_from([
        torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.complex64,
        torch.complex128, torch.float8_e4m3fn,
    ]),
    shape=st.lists(st.integers(0, 12), max_size=3).map(tuple),
    part=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([1, 64, 16 << 20]),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=80)
def test_any_two_versions(dtype: torch.dtype, shape: tuple[int, ...], part: float, seed: int, chunk: int) -> None:
    base, other = bits_of(shape, dtype, seed), bits_of(shape, dtype, seed + 1)
    if dtype == torch.bool:
        base, other = base.view(torch.uint8) % 2 == 1, other.view(torch.uint8) % 2 == 1
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < part
    new = base.clone()
    new[chosen] = other[chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        held = {"x": base.clone(), "y": torch.ones(2)}
        delta = the_delta({"x": base, "y": torch.ones(2)}, {"x": new, "y": torch.ones(2)})
        version = apply_delta(held, delta)
    assert torch.equal(held["x"].view(-1).view(torch.uint8), new.view(-1).view(torch.uint8))
    assert version.hex == digest({"x": new, "y": torch.ones(2)}) == delta_digests(delta)[1]


def test_long_gaps_and_neighbours() -> None:
    base = torch.zeros(3000, dtype=torch.int16)
    for places in ([0], [2999], [254], [255], [256], [509, 510, 511], [0, 255, 511, 512, 2999], list(range(3000))):
        new = base.clone()
        new[places] = torch.arange(len(places), dtype=torch.int16) - 7
        held = {"x": base.clone()}
        apply_delta(held, the_delta({"x": base}, {"x": new}))
        assert torch.equal(held["x"], new), places


def test_what_a_training_step_changes_is_small() -> None:
    base = {"w": torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()}
    new = a_step(base, 0.03)
    delta = the_delta(base, new)
    assert len(delta) < base["w"].nbytes * 0.03 * 0.75  # 0.75 bytes for each two of an element that changed
    assert len(the_delta(base, copied(base))) == HEADER + FRAME.size


def test_a_parameter_that_lies_across_is_changed_where_it_lies() -> None:
    base = bits_of((6, 5), torch.bfloat16)
    new = a_step({"x": base}, 0.5)
    across = torch.nn.Parameter(base.T.contiguous().T.clone(memory_format=torch.preserve_format))
    address = across.data_ptr()
    assert not across.is_contiguous()
    apply_delta({"x": across}, the_delta({"x": base}, new))
    assert same({"x": across.detach()}, new)
    assert across.data_ptr() == address


def test_deltas_out_of_order_are_refused() -> None:
    versions = [weights()]
    for step in range(3):
        versions.append(a_step(versions[-1], 0.1, step))
    deltas = [the_delta(a, b) for a, b in itertools.pairwise(versions)]
    held = copied(versions[0])
    for wrong in (deltas[1], deltas[2]):
        with pytest.raises(DeltaRefused, match=rf"leads from version \w+ to \w+; the weights here are {digest(held)}"):
            apply_delta(held, wrong)
        assert same(held, versions[0])
    apply_delta(held, deltas[0])
    with pytest.raises(DeltaRefused, match="the weights here are"):  # twice
        apply_delta(held, deltas[0])
    apply_delta(held, deltas[1])
    assert same(held, versions[2])


def test_weights_that_are_not_what_they_were_are_refused() -> None:
    base = weights()
    new = a_step(base, 0.1)
    held = copied(base)
    held["a"].view(torch.int16)[3, 3] ^= 1
    before = copied(held)
    with pytest.raises(DeltaRefused, match="the weights here are"):
        apply_delta(held, the_delta(base, new))
    assert same(held, before)
    with pytest.raises(DeltaRefused, match="does not fit the weights here"):
        apply_delta({"a": base["a"].clone()}, the_delta(base, new))


def frames(delta: bytes) -> Iterator[tuple[int, tuple[int, ...], bytes]]:
    place = HEADER
    while place < len(delta):
        fields = FRAME.unpack_from(delta, place)
        yield place, fields, delta[place + FRAME.size : place + FRAME.size + fields[5]]
        place += FRAME.size + fields[5]


def with_frame(delta: bytes, number: int, change: Callable[[list[int], bytes], bytes]) -> bytes:
    """The delta with one frame's fields and payload changed."""
    pieces = [delta[:HEADER]]
    for index, (_, fields, payload) in enumerate(frames(delta)):
        changed = list(fields)
        if index == number:
            payload = change(changed, payload)
        pieces.append(FRAME.pack(*changed) + payload)
    return b"".join(pieces)


def test_every_damaged_byte_is_seen_before_anything_changes() -> None:
    """But for bits that no reader looks at, such as those that fill up the last byte of what zlib packs."""
    base = weights()
    new = a_step(base, 0.05)
    delta = the_delta(base, new)
    held = copied(base)
    harmless = 0
    for place in range(len(delta)):
        damaged = bytearray(delta)
        damaged[place] ^= 1 << place % 8
        try:
            apply_delta(held, damaged)
        except DeltaRefused:
            assert same(held, base)
        else:
            harmless += 1
            assert same(held, new)
            held = copied(base)
    assert harmless <= 2
    for size in (0, 5, HEADER, HEADER + 10, len(delta) // 2, len(delta) - 1):
        with pytest.raises(DeltaRefused):
            apply_delta(held, delta[:size])
    with pytest.raises(DeltaRefused, match="is damaged, or has lost frames"):
        apply_delta(held, delta + b"\0")
    assert same(held, base)
    assert apply_delta(held, memoryview(delta)).hex == digest(new)


@given(st.binary(max_size=300), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_any_other_bytes_are_refused(content: bytes, with_header: bool) -> None:
    base = weights()
    held = copied(base)
    with pytest.raises(DeltaRefused):
        apply_delta(held, (the_delta(base, a_step(base, 0.1))[:HEADER] if with_header else b"") + content)
    assert same(held, base)


def test_sizes_are_checked_before_memory_is_taken() -> None:
    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
            return out

    base = weights()
    delta = the_delta(base, a_step(base, 0.1))

    def bomb(fields: list[int], payload: bytes) -> bytes:
        payload = zlib.compress(b"\0" * (64 << 20))
        fields[5] = len(payload)
        return payload

    def vast(fields: list[int], payload: bytes) -> bytes:
        fields[3] = fields[4] = 2**40
        return payload

    def beyond(fields: list[int], payload: bytes) -> bytes:
        fields[2] = 2**60
        return payload

    def again(fields: list[int], payload: bytes) -> bytes:
        fields[0] = fields[1] = 0
        return payload

    def outside(fields: list[int], payload: bytes) -> bytes:
        payload = zlib.compress(b"\0" * (2 * fields[3]) + b"\xfe" * fields[4])
        fields[5] = len(payload)
        return payload

    for number, change, text in (
        (0, bomb, r"rows 0 to 40 of tensor 0 in this delta are damaged"),
        (0, vast, "frame 0 of this delta does not fit"),
        (0, beyond, "frame 0 of this delta does not fit"),
        (1, again, "frame 1 of this delta does not fit"),
        (0, outside, "rows 0 to 40 of tensor 0 in this delta are damaged"),
    ):
        held = copied(base)
        with Largest() as largest, pytest.raises(DeltaRefused, match=text):
            apply_delta(held, with_frame(delta, number, change))
        assert largest.nbytes < 4 << 20
        assert same(held, base)


def test_a_delta_that_leads_elsewhere_is_refused() -> None:
    base = weights()
    new, other = a_step(base, 0.1), a_step(base, 0.1, seed=1)
    held = copied(base)
    with pytest.raises(DeltaRefused, match=f"to lead to version {digest(other)}, but leads to {digest(new)}"):
        apply_delta(held, b"".join(encode_delta(base, new, new_digest=digest(other))))
    assert same(held, base)


def test_a_write_that_breaks_off_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 600)
    base = weights()
    new = a_step(base, 0.3)
    delta = the_delta(base, new)
    held = copied(base)
    add, calls = module._add, []

    def failing(frame, tensor, sign):
        calls.append(sign)
        if len(calls) == 3:
            assert not same(held, base)
            raise MemoryError("no room")
        add(frame, tensor, sign)

    monkeypatch.setattr(module, "_add", failing)
    with pytest.raises(MemoryError):
        apply_delta(held, delta)
    assert calls == [1, 1, 1, -1, -1]
    assert same(held, base)


def test_versions_that_do_not_match_have_no_delta() -> None:
    base = weights()
    other = copied(base)
    del other["c"]
    other["b"] = other["b"].double()
    with pytest.raises(ValueError, match=r"only one has c; b is \(torch.float32, \(7,\)"):
        encode_delta(base, other)


def test_tied_tensors_are_to_be_given_once() -> None:
    held = {"x": torch.ones(3)}
    delta = the_delta(held, {"x": torch.zeros(3)})
    held["y"] = held["x"]
    with pytest.raises(ValueError, match="y lies where x lies: give tied tensors once"):
        apply_delta(held, delta)


def test_a_chain_gives_each_receiver_what_it_needs() -> None:
    versions = [weights()]
    for step in range(4):
        versions.append(a_step(versions[-1], 0.05, step))
    chain = DeltaChain(digest(versions[0]))
    assert chain.since(chain.latest) == ()
    for one, two in itertools.pairwise(versions):
        chain.add(the_delta(one, two))
    assert chain.latest == digest(versions[4])
    for start in range(5):
        held = copied(versions[start])
        missing = chain.since(digest(held))
        assert len(missing) == 4 - start
        for delta in missing:
            apply_delta(held, delta)
        assert same(held, versions[4])
    assert chain.nbytes == sum(map(len, chain.since(digest(versions[0]))))
    with pytest.raises(DeltaRefused, match=r"starts from version \w+, the chain ends with"):
        chain.add(the_delta(versions[1], versions[2]))
    with pytest.raises(DeltaRefused, match="send a full version"):
        chain.since("0" * 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_same_delta() -> None:
    base = {"a": bits_of((4000, 3001), torch.bfloat16), "b": bits_of((7,), torch.float32)}
    new = a_step(base, 0.05)
    there, then = ({name: tensor.cuda() for name, tensor in version.items()} for version in (base, new))
    delta = the_delta(there, then)
    assert delta == the_delta(base, new)
    assert apply_delta(there, delta).hex == digest(new)
    assert same(there, new)
