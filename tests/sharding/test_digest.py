import hashlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain_sharding import (
    Box,
    Digest,
    DigestMismatch,
    Layout,
    Mesh,
    Parameter,
    Part,
    ShardedDigest,
    Split,
    TensorSpec,
    combine,
    differing,
    digest,
    named_tensors,
    piece_hashes,
    read_layout,
)
from drivetrain_sharding._hash import Hasher, Item, _kernel
from gloo_ranks import be_a_rank, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

C = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
ROWS, COLUMNS, LINES = (math.isqrt(n << 128) & MASK for n in (2, 3, 5))
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (0, 4), (5, 3), (3, 1), (70, 24), (2, 3, 4), (3, 2, 5, 1), (2, 1, 3, 3)]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def key(number: int, origin: int) -> int:
    x = ((number + 1) * C + origin) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def by_definition(tensor: Tensor) -> int:
    """H of the module's docstring, in Python's integers."""
    bits = 8 if tensor.element_size() == 1 else 16
    flat = tensor.contiguous().view(-1)
    content = bytes(flat.view(torch.uint8).tolist())
    words = [
        int.from_bytes(content[i : i + bits // 8], "little", signed=True) for i in range(0, len(content), bits // 8)
    ]
    width = len(words) // max(math.prod(tensor.shape[:-1]), 1) if words else 1
    total = 0
    for place, word in enumerate(words):
        row, column = divmod(place, width)
        line = key(column // 2**16, LINES) if column >= 2**16 else 1
        total += key(row, ROWS) * key(column % 2**16, COLUMNS) * line * word
    return total & MASK


def bits_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor of random bits."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def item(tensor: Tensor, box: Box | None = None, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Item:
    shape = shape or tuple(tensor.shape)
    return Item(tensor, box or Box.whole(shape), shape, dtype or tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_is_the_documented_one(dtype: torch.dtype) -> None:
    tensors = [bits_of(shape, dtype) for shape in SHAPES]
    assert Hasher([item(tensor) for tensor in tensors]).hashes() == [by_definition(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((70_000,), torch.float32), ((2**16,), torch.int16), ((2**17 + 5,), torch.int8), ((2, 70_000), torch.int16)],
)
def test_long_rows_are_laid_in_lines(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = bits_of(shape, dtype)
    assert Hasher([item(tensor)]).hashes() == [by_definition(tensor)]
    cuts = [0, 3, 2**15, 40_000, 2**16 - 1, shape[-1]]
    boxes = [Box((0,) * (len(shape) - 1) + (a,), (*shape[:-1], b)) for a, b in itertools.pairwise(cuts) if b > a]
    parts = Hasher([item(box.of(tensor), box, shape) for box in boxes]).hashes()
    assert sum(parts) & MASK == by_definition(tensor)


def test_many_rows() -> None:
    """More than float64 sums hold at once; the extreme words would be the first to be rounded."""
    tensor = torch.full((2**16 + 3, 2), -(2**15), dtype=torch.int16)
    assert Hasher([item(tensor)]).hashes() == [by_definition(tensor)]


def test_the_version_is_a_sha256_of_names_dtypes_shapes_and_hashes() -> None:
    a, b = bits_of((3, 4), torch.bfloat16), torch.ones(2)
    lines = [
        f"a\0bfloat16 [3,4] {by_definition(a):016x}\n".encode(),
        f"b\0float32 [2] {by_definition(b):016x}\n".encode(),
    ]
    expected = hashlib.sha256(b"".join(len(line).to_bytes(8, "little") + line for line in lines)).hexdigest()
    assert digest({"b": b, "a": a}) == expected


def test_it_stays_the_same_from_version_to_version() -> None:
    tensors = {"w": torch.arange(10_000, dtype=torch.float32).view(100, 100), "b": torch.ones(3, dtype=torch.bfloat16)}
    assert digest(tensors) == "74dd995cf1652ec6f1c8828985cbe5b63a69795c951cadcf4fb9dbb52af89fa5"


def test_order_and_form_of_the_source_do_not_matter() -> None:
    a, b = torch.randn(4, 6), torch.randn(5)
    whole = Digest()
    whole.add("b", b)
    whole.add("a", a)
    expected = whole.hexdigest()
    assert digest({"a": a, "b": b}) == digest(iter([("b", b), ("a", a)])) == expected
    assert digest({"a": a.T.contiguous().T, "b": torch.cat([b, b])[5:]}) == expected
    assert digest({"a": torch.nn.Parameter(a), "b": b.clone()}) == expected
    assert digest({"a": a[:1].expand(4, 6)}) == digest({"a": a[:1].expand(4, 6).clone()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(5000,), (3, 5), (1,)])
def test_one_bit_anywhere_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    seen = {digest({"x": tensor})}
    octets = tensor.view(torch.uint8).reshape(-1)
    places = sorted({0, 1, octets.numel() // 2, octets.numel() - 1} & set(range(octets.numel())))
    for place in places:
        for bit in (0, 7) if dtype != torch.bool else (0,):
            octets[place] ^= 1 << bit
            seen.add(digest({"x": tensor}))
            octets[place] ^= 1 << bit
    assert len(seen) == 1 + len(places) * (2 if dtype != torch.bool else 1)


def test_name_dtype_shape_and_order_of_elements_change_it() -> None:
    x = torch.arange(6, dtype=torch.int32)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x.view(torch.float32)},
        {"x": x.view(2, 3)},
        {"x": x.view(3, 2)},
        {"x": x.flip(0)},
        {"x": x[[1, 0, 2, 3, 4, 5]]},
        {"x": x, "y": torch.zeros(0)},
        {"x": torch.zeros(0)},
        {"x": torch.zeros(())},
        {"x": torch.zeros(1)},
        {},
    ]
    assert len({digest(tensors) for tensors in variants}) == len(variants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_changes_that_cancel_in_a_plain_sum_change_it(dtype: torch.dtype) -> None:
    """Signs flipped in pairs and in rectangles, elements and rows exchanged."""
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {digest({"x": x})}
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 7), (2, 4095))]:
        flipped = x.clone()
        flipped[first] *= -1
        flipped[second] *= -1
        exchanged = x.clone()
        exchanged[first], exchanged[second] = x[second], x[first]
        seen |= {digest({"x": flipped}), digest({"x": exchanged})}
    corners = x.clone()
    corners[:2, [5, 900]] *= -1
    seen |= {digest({"x": corners}), digest({"x": -x}), digest({"x": x[[1, 0, 2]]})}
    assert len(seen) == 10


def test_tensors_exchanged_between_names_change_it() -> None:
    a, b = torch.randn(4), torch.randn(4)
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})


def test_an_odd_offset_into_storage() -> None:
    base = torch.arange(20, dtype=torch.bfloat16)
    assert digest({"x": base[1:10]}) == digest({"x": base[1:10].clone()})


def test_names_come_once_and_shards_not_at_all() -> None:
    result = Digest()
    result.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="tensor a was added before"):
        result.add("a", torch.zeros(1))

    class Shard(Tensor):
        pass

    with pytest.raises(ValueError, match="tensor b is a Shard; give whole tensors"):
        digest({"b": torch.zeros(1).as_subclass(Shard)})


# Pieces


def held(layout: Layout, rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a rank, cut out of the whole tensors; padding is 7."""
    dtypes = {spec.name: spec.dtype for spec in layout.tensors}
    parameters = {
        parameter.name: torch.full(
            layout.parameter_shapes(rank)[parameter.name], 7, dtype=dtypes[parameter.parts[0].tensor]
        )
        for parameter in layout.parameters
    }
    for piece in layout.pieces(rank):
        piece.at.of(parameters[piece.parameter]).view(piece.box.shape).copy_(piece.box.of(tensors[piece.tensor]))
    return parameters


def all_hashes(layout: Layout, tensors: dict[str, Tensor], **options: Any) -> dict[int, tuple[int, ...]]:
    return {
        rank: piece_hashes(layout, rank, held(layout, rank, tensors), **options) for rank in range(layout.mesh.size)
    }


def whole(tensors: dict[str, Tensor]) -> Any:
    result = Digest()
    for name, tensor in tensors.items():
        result.add(name, tensor)
    return result.version()


def everything() -> tuple[Layout, dict[str, Tensor]]:
    """Copies, uneven and nested cuts, a padded vocabulary, a fused parameter, heads that neighbours share, stacked
    experts, a tie, a tensor in two parameters, a scalar and a tensor of four dimensions."""
    specs = {
        "embed": (11, 6), "q": (8, 5), "k": (4, 5), "norm": (7,), "scale": (), "conv": (3, 2, 4, 2), "column": (4, 9),
        "e0": (6, 4), "e1": (6, 4), "e2": (6, 4), "none": (0, 3),
    }  # fmt: skip
    dtypes = {"norm": torch.float32, "scale": torch.float32, "conv": torch.float32}
    rows = (Split(over="tp", dim=0),)
    layout = Layout(
        mesh=Mesh((("dp", 3), ("tp", 4))),
        tensors=tuple(
            TensorSpec(name=name, shape=shape, dtype=dtypes.get(name, torch.bfloat16)) for name, shape in specs.items()
        ),
        parameters=(
            Parameter(name="embed", parts=(Part(tensor="embed", splits=(Split(over="tp", dim=0, padded=16),)),)),
            Parameter(name="head", parts=(Part(tensor="embed", splits=(Split(over="tp", dim=1),)),)),
            Parameter(
                name="qk",
                parts=(
                    Part(tensor="q", splits=rows),
                    Part(tensor="k", splits=(Split(over="tp", dim=0, parts=2),)),
                ),
            ),
            Parameter(name="norm", parts=(Part(tensor="norm", splits=(*rows, Split(over="dp", dim=0))),)),
            Parameter(name="scale", parts=(Part(tensor="scale"),)),
            Parameter(name="conv", parts=(Part(tensor="conv", splits=(Split(over="dp", dim=2), rows[0])),)),
            Parameter(name="column", parts=(Part(tensor="column", splits=(Split(over="tp", dim=1),)),)),
            Parameter(
                name="experts",
                parts=tuple(
                    Part(tensor=f"e{n}", expert=n, splits=(Split(over="tp", dim=1, parts=2),)) for n in range(3)
                ),
                experts=Split(over="dp", dim=0),
            ),
            Parameter(name="none", parts=(Part(tensor="none"),)),
        ),
        ties={"lm_head": "embed"},
    )
    tensors = {s.name: bits_of(s.shape, s.dtype, seed) for seed, s in enumerate(layout.tensors)}
    return layout, tensors


def test_pieces_give_what_whole_tensors_give() -> None:
    layout, tensors = everything()
    version = combine(layout, all_hashes(layout, tensors))
    assert version == whole(tensors)
    assert version.hex == digest(tensors)
    assert version.tensors["k"] == f"bfloat16 [4,5] {by_definition(tensors['k']):016x}"


splits = st.lists(
    st.builds(Split, over=st.sampled_from(["a", "b"]), dim=st.integers(0, 3)), max_size=2, unique_by=lambda s: s.over
)


@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    splits=splits,
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_any_sharding_gives_the_same(
    shape: tuple[int, ...], splits: list[Split], sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    cut = tuple(split for split in splits if split.dim < len(shape))
    layout = Layout(
        mesh=Mesh((("a", sizes[0]), ("b", sizes[1]))),
        tensors=(TensorSpec(name="x", shape=shape, dtype=dtype),),
        parameters=(Parameter(name="x", parts=(Part(tensor="x", splits=cut),)),),
    )
    tensors = {"x": bits_of(shape, dtype, seed)}
    assert combine(layout, all_hashes(layout, tensors)) == whole(tensors)


def test_values_are_hashed_as_the_target_has_them() -> None:
    """fp32 masters beside the bf16 that goes over the wire; the target keeps one tensor in fp32."""
    layout, tensors = everything()
    masters = Layout(
        mesh=layout.mesh,
        tensors=tuple(TensorSpec(name=s.name, shape=s.shape, dtype=torch.float32) for s in layout.tensors),
        parameters=layout.parameters,
        ties=layout.ties,
    )
    values = {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}
    halves = {name: tensor.bfloat16() for name, tensor in values.items()}
    hashes = all_hashes(masters, values, dtype=torch.bfloat16)
    assert combine(masters, hashes, dtype=torch.bfloat16) == whole(halves)
    kept = {name: values[name] if name in ("norm", "scale", "conv") else half for name, half in halves.items()}
    assert combine(masters, all_hashes(masters, values, dtype=layout), dtype=layout) == whole(kept)
    with pytest.raises(ValueError, match="lacks column, conv, e0, e1, e2, embed, k, none and 3 more"):
        ShardedDigest(layout, dtype=Layout(mesh=layout.mesh, tensors=(), parameters=()))


def test_a_cast_is_never_held_whole() -> None:
    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() != masters.nbytes:
                self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
            return out

    masters = torch.randn(8192, 512)
    with Largest() as largest:
        found = Hasher([item(masters, dtype=torch.bfloat16)]).hashes()
    assert found == Hasher([item(masters.bfloat16())]).hashes()
    assert 0 < largest.nbytes < masters.nbytes / 8


def test_copies_that_differ_are_named_with_their_ranks() -> None:
    layout, tensors = everything()
    hashes = all_hashes(layout, tensors)
    parameters = held(layout, 5, tensors)
    parameters["qk"][-1, 2] += 1
    parameters["scale"] += 1
    hashes[5] = piece_hashes(layout, 5, parameters)
    with pytest.raises(DigestMismatch, match=r"k\[0:2, 0:5\] on ranks 0 and 5, scale\[\] on ranks 0 and 5$"):
        combine(layout, hashes)
    hashes = all_hashes(layout, tensors)
    for rank in range(layout.mesh.size):
        parameters = held(layout, rank, tensors)
        if layout.mesh.coordinates(rank)["tp"] == 0:
            parameters["head"][0, 0] += 1
        hashes[rank] = piece_hashes(layout, rank, parameters)
    with pytest.raises(DigestMismatch, match="embed in head and in another parameter"):
        combine(layout, hashes)


def test_padding_does_not_count() -> None:
    layout, tensors = everything()
    hashes = all_hashes(layout, tensors)
    parameters = held(layout, 2, tensors)
    assert layout.pieces(2)[0].at == Box((0, 0), (3, 6))
    parameters["embed"][3] = -1
    assert piece_hashes(layout, 2, parameters) == hashes[2]


def test_incomplete_or_foreign_hashes_are_refused() -> None:
    layout, tensors = everything()
    hashes = all_hashes(layout, tensors)
    with pytest.raises(ValueError, match="hashes of ranks 3: give those of each of 12 ranks once"):
        combine(layout, {rank: found for rank, found in hashes.items() if rank != 3})
    with pytest.raises(ValueError, match="hashes of ranks 12: give"):
        combine(layout, {**hashes, 12: ()})
    with pytest.raises(ValueError, match=r"rank 2 holds \d+ pieces in this layout and sent 1 hashes"):
        combine(layout, {**hashes, 2: (1,)})
    parameters = held(layout, 1, tensors)
    parameters["norm"] = parameters["norm"].bfloat16()
    parameters["column"] = parameters["column"][:, 1:]
    del parameters["qk"]
    with pytest.raises(ValueError, match="rank 1 does not hold what the layout says") as refused:
        piece_hashes(layout, 1, parameters)
    for text in (
        "qk is missing",
        "norm is torch.bfloat16 (1,), in the layout torch.float32",
        "column is torch.bfloat16",
    ):
        assert text in str(refused.value)


def test_a_layout_that_holds_less_than_its_tensors_has_no_digest() -> None:
    spec = TensorSpec(name="x", shape=(4,), dtype=torch.float32)
    layout = Layout(mesh=Mesh((("a", 1),)), tensors=(spec,), parameters=())
    with pytest.raises(ValueError, match="do not hold all elements, each once, of x"):
        combine(layout, {0: ()})


def test_differing_names_the_tensors() -> None:
    one = whole({"a": torch.zeros(3), "b": torch.ones(2), "c": torch.ones(1)})
    other = whole({"a": torch.zeros(3), "b": -torch.ones(2), "c": torch.ones(1, 1), "d": torch.ones(1)})
    assert differing(one, other) == differing(other, one) == ("b", "c", "d")
    assert differing(one, one) == ()


def test_values_changed_in_place_are_seen_by_the_next_call() -> None:
    layout, tensors = everything()
    sharded = ShardedDigest(layout)
    parameters = held(layout, 0, tensors)
    before = sharded.hashes(0, parameters)
    assert sharded.hashes(0, parameters) == before
    parameters["scale"] += 1
    assert sum(a != b for a, b in zip(before, sharded.hashes(0, parameters), strict=True)) == 1
    parameters["scale"] = parameters["scale"] - 1
    assert sharded.hashes(0, parameters) == before


def a_sharded_module() -> Any:
    """FSDP2 over two ranks, uneven: from the pieces, and from the tensors gathered whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    layout = read_layout(module)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, piece_hashes(layout, dist.get_rank(), dict(module.named_parameters())))
    return combine(layout, dict(enumerate(found))).hex, digest(named_tensors(module))


def test_fsdp2_without_gathering(tmp_path: Path) -> None:
    found = run_ranks(__file__, tmp_path, world=2)
    assert len({text for pair in found for text in pair}) == 1


# The kernel


def kernel_items(device: str) -> list[Item]:
    """Every dtype and shape; boxes; rows that lie apart, broadcast or misaligned; more than one tile."""
    tensors = [bits_of(shape, dtype) for dtype in DTYPES for shape in SHAPES]
    tensors += [bits_of((130, 1100), torch.bfloat16), bits_of((3, 66_000), torch.int16), bits_of((70_001,), torch.int8)]
    items = [item(tensor.to(device)) for tensor in tensors]
    big = bits_of((4, 6, 5, 40), torch.bfloat16)
    cuts = [Box((1, 0, 0, 0), (4, 6, 5, 40)), Box((0, 2, 1, 8), (3, 5, 5, 32)), Box((0, 0, 0, 3), (4, 6, 5, 4))]
    items += [item(box.of(big.to(device)), box, tuple(big.shape)) for box in cuts]
    items += [item(box.of(big).clone().to(device), box, tuple(big.shape)) for box in cuts]
    wide = bits_of((9, 64), torch.float32).to(device)
    return [*items, item(wide[:, 1:]), item(wide.T), item(wide[:1].expand(5, 64)), item(wide[::2])]


INTERPRETED = """
import sys; sys.path[:0] = PATHS
import torch
from test_digest import kernel_items
from drivetrain_sharding import _hash, _hash_triton
items = kernel_items("cpu")
launches, left = _hash_triton.prepare(items)
sums = torch.zeros(len(items), dtype=torch.int64)
for launch in launches:
    launch(sums)
expected = _hash.Hasher(items).hashes()
assert len(left) == 1, left
wrong = [n for n, (a, b) in enumerate(zip(sums.tolist(), expected)) if a % 2**64 != b and n not in left]
assert not wrong, wrong
"""


def test_the_kernel_gives_the_same_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "support")]
    subprocess.run(
        [sys.executable, "-c", INTERPRETED.replace("PATHS", repr(paths))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=150,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton finds a GPU here")
def test_where_triton_does_not_work_torch_does_it_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    assert _kernel.__wrapped__(torch.device("cpu")) is None
    assert "Triton compiles nothing here, so digests on cpu are slower" in caplog.text


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("way", ["triton", "torch"])
def test_a_gpu_gives_the_same_bit_for_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr("drivetrain_sharding._hash._kernel", lambda device: None)
    items = kernel_items("cuda")  # a hasher keeps no values
    hasher = Hasher(items)
    expected = Hasher(kernel_items("cpu")).hashes()
    assert hasher.hashes() == expected
    assert hasher.hashes() == expected


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_gpu_casts_as_torch_does(dtype: torch.dtype) -> None:
    """All sorts of fp32: halfway between two, below the smallest, beyond the largest; for the casts of the kernel and
    for one that is left to torch."""
    values = torch.cat([
        torch.arange(2**16, dtype=torch.int32).mul(2**16).add(2**15).view(torch.float32),
        torch.randint(-(2**31), 2**31 - 1, (2**16,), dtype=torch.int32).view(torch.float32),
        torch.tensor([0.0, -0.0, 6e-8, -3e-8, 65504.0, 65519.0, 65520.0, 3.39e38, torch.inf, -torch.inf, torch.nan]),
    ])  # fmt: skip
    for some in (values, values.nan_to_num(0)[:131072].view(512, 256)):
        there = some.cuda()
        assert Hasher([item(there, dtype=dtype)]).hashes() == Hasher([item(there.to(dtype))]).hashes()


@pytest.mark.gpu
@on_a_gpu
def test_a_gpu_hashes_a_model_at_once_and_without_a_copy() -> None:
    masters = {f"{n}": torch.randn(4096, 4096, device="cuda") for n in range(8)}
    layout = Layout(
        mesh=Mesh((("a", 1),)),
        tensors=tuple(TensorSpec(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in masters.items()),
        parameters=tuple(Parameter(name=n, parts=(Part(tensor=n),)) for n in masters),
    )
    sharded = ShardedDigest(layout, dtype=torch.bfloat16)
    first = sharded.hashes(0, masters)
    torch.cuda.reset_peak_memory_stats()
    held_before = torch.cuda.memory_allocated()
    assert sharded.hashes(0, masters) == first
    assert torch.cuda.max_memory_allocated() - held_before < 1 << 20
    assert sharded.combine({0: first}) == whole({name: tensor.bfloat16() for name, tensor in masters.items()})
    masters["3"][5, 5] += 1
    again = sharded.hashes(0, masters)
    assert [a == b for a, b in zip(first, again, strict=True)] == [n != 3 for n in range(8)]
    # Tensors of other memory under the same names.
    assert sharded.hashes(0, {name: tensor.clone() for name, tensor in masters.items()}) == again


if __name__ == "__main__":
    be_a_rank(sys.argv[1], sys.argv[2], a_sharded_module, world=2)
