"""Two ranks on gloo. This file is also the program that each rank runs; it leaves what it found as JSON."""

import sys
from typing import Any, cast

import pytest
import torch
from drivetrain_sharding import digest, load_named_tensors, manifest, named_tensors, shard_model
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

WORLD = 2
SIZES = (1, 3, 7, 1031)


class Uneven(nn.Module):
    """Tied embedding and head, blocks, and parameters whose first dimensions are 1, 3, 7 and 1031."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.ParameterList([nn.Parameter(torch.randn(size, 2)) for size in SIZES])
        self.register_buffer("offset", torch.randn(7))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return cast(Tensor, self.head(hidden) + self.offset) * sum(p.sum() for p in self.odd)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def look() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    ids = torch.tensor([0, 3, 6, 2])
    plain, sharded = Uneven(), shard_model(Uneven(), mesh)
    found: dict[str, Any] = {
        "all sharded": all(isinstance(p, DTensor) for p in sharded.parameters()),
        "tie": sharded.head.weight is sharded.embed.weight,
        "local sizes": [p.to_local().shape[0] for p in sharded.odd],  # type: ignore[attr-defined]
        "manifest": manifest(sharded) == manifest(plain),
        "names": [name for name, _ in named_tensors(sharded)] == [name for name, _ in named_tensors(plain)],
        "bit equal": same(dict(named_tensors(sharded)), dict(named_tensors(plain))),
        "digest": [digest(named_tensors(sharded)), digest(named_tensors(plain))],
        "digest bf16": [digest(named_tensors(m, dtype=torch.bfloat16)) for m in (sharded, plain)],
    }
    with torch.no_grad():
        found["logits"] = torch.equal(sharded(ids), plain(ids))
    # A forward pass without a backward pass leaves the root whole.
    found["digest after a forward pass"] = digest(named_tensors(sharded)) == digest(named_tensors(plain))

    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-3)
    found["syncs"] = []
    digests = {digest(named_tensors(plain))}
    for _ in range(3):
        sharded(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        load_named_tensors(plain, named_tensors(sharded))
        with torch.no_grad():
            found["syncs"].append(torch.equal(plain(ids), sharded(ids)))
        digests.add(digest(named_tensors(plain)))
    found["digests"] = len(digests)

    load_named_tensors(sharded, dict(named_tensors(Uneven(seed=5))))
    found["loaded"] = digest(named_tensors(sharded)) == digest(named_tensors(Uneven(seed=5)))
    found["tie after loading"] = sharded.head.weight is sharded.embed.weight
    try:
        load_named_tensors(sharded, {"odd.0": torch.zeros(2, 2)})
    except ValueError as error:
        found["error"] = str(error)

    half = shard_model(Uneven(), mesh, param_dtype=torch.bfloat16)
    dtypes = []
    half.layers[0].register_forward_hook(lambda module, args, output: dtypes.append(str(output.dtype)))
    half(ids).sum().backward()
    found["mixed"] = [*dtypes, str(half.embed.weight.dtype), str(half.embed.weight.grad.dtype)]  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=WORLD)


def test_uneven_parameters_are_split_and_stay_tied(found: list[dict[str, Any]]) -> None:
    assert [rank["local sizes"] for rank in found] == [[1, 2, 4, 516], [0, 1, 3, 515]]
    for rank in found:
        assert rank["all sharded"]
        assert rank["tie"]
        assert rank["logits"]


def test_named_tensors_are_those_of_the_plain_module(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["names"]
        assert rank["manifest"]
        assert rank["bit equal"]
        assert rank["digest after a forward pass"]


def test_digests_do_not_depend_on_the_layout(found: list[dict[str, Any]]) -> None:
    assert len({value for rank in found for value in rank["digest"]}) == 1
    assert len({value for rank in found for value in rank["digest bf16"]}) == 1
    assert found[0]["digest"] != found[0]["digest bf16"]


def test_a_copy_follows_three_optimizer_steps(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["syncs"] == [True] * 3
        assert rank["digests"] == 4


def test_loading_into_shards(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["loaded"]
        assert rank["tie after loading"]
        assert "odd.0 is (2, 2), here (1, 2)" in rank["error"]
        assert "missing embed.weight" in rank["error"]


def test_mixed_precision_keeps_the_shards_in_fp32(found: list[dict[str, Any]]) -> None:
    assert found[0]["mixed"] == ["torch.bfloat16", "torch.float32", "torch.float32"]


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
