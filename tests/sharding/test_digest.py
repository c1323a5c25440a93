import pytest
import torch
from drivetrain_sharding import Digest, digest

C = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def splitmix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def by_definition(content: bytes) -> int:
    """H of the module's docstring, in Python's integers."""
    content += bytes(-len(content) % 4)
    words = [int.from_bytes(content[i : i + 4], "little", signed=True) for i in range(0, len(content), 4)]
    total = 0
    for row in range(0, len(words), 4096):
        h = sum(w * (splitmix((j + 1) * C & MASK) | 1) for j, w in enumerate(words[row : row + 4096]))
        x = (h + (row // 4096 + 1) * C) & MASK
        x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & MASK
        total += x ^ x >> 29
    return total & MASK


@pytest.mark.parametrize("size", [0, 1, 3, 4, 4096 * 4 - 1, 4096 * 4, 4096 * 4 * 2 + 5, 2**17 * 4 + 4096 * 4 + 7])
def test_the_hash_is_the_documented_one(size: int) -> None:
    import hashlib

    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    line = f"x\0uint8\0{size}\0{by_definition(bytes(data.tolist())):016x}\n".encode()
    expected = hashlib.sha256(len(line).to_bytes(8, "little") + line).hexdigest()
    assert digest({"x": data}) == expected


def test_it_stays_the_same_from_version_to_version() -> None:
    tensors = {"w": torch.arange(10_000, dtype=torch.float32).view(100, 100), "b": torch.ones(3, dtype=torch.bfloat16)}
    assert digest(tensors) == "7fc1c84de27ce0e90351b4dc1e22cf8a937fedf4aadd654d189a96bd8c6c19fa"


def test_order_and_form_of_the_source_do_not_matter() -> None:
    a, b = torch.randn(4, 6), torch.randn(5)
    whole = Digest()
    whole.add("b", b)
    whole.add("a", a)
    expected = whole.hexdigest()
    assert digest({"a": a, "b": b}) == digest(iter([("b", b), ("a", a)])) == expected
    assert digest({"a": a.T.contiguous().T, "b": torch.cat([b, b])[5:]}) == expected
    assert digest({"a": torch.nn.Parameter(a), "b": b.clone()}) == expected


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


def test_changes_that_cancel_in_a_plain_sum_change_it() -> None:
    """Signs flipped in pairs, rows exchanged, elements moved between rows."""
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    seen = {digest({"x": x})}
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 7), (2, 4095))]:
        flipped = x.clone()
        flipped[first] *= -1
        flipped[second] *= -1
        exchanged = x.clone()
        exchanged[first], exchanged[second] = x[second], x[first]
        seen |= {digest({"x": flipped}), digest({"x": exchanged})}
    seen.add(digest({"x": x[[1, 0, 2]]}))
    assert len(seen) == 8


def test_tensors_exchanged_between_names_change_it() -> None:
    a, b = torch.randn(4), torch.randn(4)
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})


def test_an_odd_offset_into_storage() -> None:
    base = torch.arange(20, dtype=torch.bfloat16)
    assert digest({"x": base[1:10]}) == digest({"x": base[1:10].clone()})


def test_names_come_once() -> None:
    result = Digest()
    result.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="tensor a was added before"):
        result.add("a", torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same() -> None:
    tensors = {"a": torch.randn(5000, 301), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0)}
    assert digest({name: tensor.cuda() for name, tensor in tensors.items()}) == digest(tensors)
