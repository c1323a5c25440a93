from typing import cast

import pytest
import torch
from drivetrain_sharding import TensorSpec, digest, load_named_tensors, manifest, named_tensors
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Tied(nn.Module):
    """An embedding tied to a head, with a block, a persistent and a passing buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return cast(Tensor, self.head(hidden) * self.scale)


NAMES = ["scale", "counts", "embed.weight", "blocks.0.weight", "blocks.0.bias"]


def test_every_tensor_once_in_order() -> None:
    model = Tied()
    tensors = dict(named_tensors(model))
    assert list(tensors) == NAMES
    assert torch.equal(tensors["embed.weight"], model.head.weight)
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_manifest_tells_what_will_come() -> None:
    for dtype in (None, torch.bfloat16):
        specs = manifest(Tied(), dtype=dtype)
        assert specs == tuple(
            TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in named_tensors(Tied(), dtype=dtype)
        )
    assert specs[1].dtype == torch.int64
    assert specs[2] == TensorSpec(name="embed.weight", dtype=torch.bfloat16, shape=(7, 3))


def test_names_do_not_tell_of_wrappers() -> None:
    model = Tied()
    expected = digest(named_tensors(model))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    compiled = torch.compile(model, backend="eager")
    assert digest(named_tensors(cast(nn.Module, compiled))) == expected
    other = Tied(seed=1)
    load_named_tensors(other, named_tensors(cast(nn.Module, compiled)))
    assert digest(named_tensors(other)) == expected
    load_named_tensors(cast(nn.Module, compiled), named_tensors(other))


def test_loading_makes_the_models_equal_and_keeps_the_tie() -> None:
    source, target = Tied(seed=0), Tied(seed=1)
    ids = torch.tensor([0, 6, 3])
    for step in range(3):
        with torch.no_grad():
            source.embed.weight.add_(step)
        load_named_tensors(target, named_tensors(source))
        assert torch.equal(target(ids), source(ids))
        assert target.head.weight is target.embed.weight
    assert target.embed.weight.requires_grad


def test_a_tied_tensor_may_come_under_any_of_its_names() -> None:
    source, target = Tied(seed=0), Tied(seed=1)
    tensors = dict(named_tensors(source))
    both = tensors | {"head.weight": tensors["embed.weight"].clone()}
    load_named_tensors(target, both)
    assert torch.equal(target.embed.weight, source.embed.weight)
    alone = dict(both)
    del alone["embed.weight"]
    target = Tied(seed=1)
    load_named_tensors(target, alone)
    assert torch.equal(target.embed.weight, source.embed.weight)
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(ValueError, match=r"head\.weight differs from embed\.weight, to which it is tied"):
        load_named_tensors(target, both)


def test_one_error_with_all_that_does_not_fit_and_nothing_changed() -> None:
    target = Tied(seed=1)
    before = digest(named_tensors(target))
    tensors = dict(named_tensors(Tied(seed=0)))
    del tensors["blocks.0.bias"]
    tensors["blocks.0.weight"] = torch.zeros(3, 4)
    tensors["base_layer.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="do not fit") as error:
        load_named_tensors(target, tensors)
    for problem in ("unknown base_layer.weight", "missing blocks.0.bias", "blocks.0.weight is (3, 4), here (3, 3)"):
        assert problem in str(error.value)
    with pytest.raises(ValueError, match="scale came twice"):
        load_named_tensors(target, [*named_tensors(target), ("scale", torch.ones(1))])
    assert digest(named_tensors(target)) == before


def test_values_are_cast_to_what_the_module_holds() -> None:
    source, target = Tied(seed=0).bfloat16(), Tied(seed=1)
    load_named_tensors(target, named_tensors(source))
    assert target.embed.weight.dtype == torch.float32
    assert torch.equal(target.embed.weight, source.embed.weight.float())
    assert digest(named_tensors(target, dtype=torch.bfloat16)) == digest(named_tensors(source))


def test_digest_follows_training() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = digest(named_tensors(model))
    for lr, same in ((0.0, True), (1e-3, False)):
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert (digest(named_tensors(model)) == before) == same
