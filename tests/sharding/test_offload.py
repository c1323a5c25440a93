"""One process, and one rank on a GPU. This file is also the program that the rank runs."""

import contextlib
import sys
from typing import Any

import pytest
import torch
from drivetrain_sharding import Mesh, OptimizerOffload, device_mesh, digest, named_tensors, read_layout, shard_model
from gloo_ranks import be_a_rank, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MIB = 2**20
WIDTH, BLOCKS = 1024, 12  # a block's weight has 4 MiB


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs))
        return inputs


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def steps(module: nn.Module, device: str, *, offload: bool) -> tuple[list[Tensor], set[str]]:
    """The parameters after three steps of AdamW, and where its states were between them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(4, WIDTH, device=device, generator=torch.Generator(device).manual_seed(0))
    places = set()
    with OptimizerOffload(optimizer) if offload else contextlib.nullcontext():
        for _ in range(3):
            module(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                places |= {local(state[name]).device.type for name in ("exp_avg", "exp_avg_sq")}
    for parameter, state in optimizer.state.items():
        assert local(state["exp_avg"]).device == local(parameter).device
    return [local(parameter).detach().cpu() for parameter in module.parameters()], places


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_offloaded_optimizer_steps_as_before(device: str) -> None:
    wanted, there = steps(Tower().to(device), device, offload=False)
    found, places = steps(Tower().to(device), device, offload=True)
    assert same(found, wanted)
    assert (there, places) == ({device}, {"cpu"})


def test_states_are_moved_only_while_it_is_on() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    calls: list[str] = []

    class Counted(OptimizerOffload):
        def load(self) -> None:
            calls.append("load")
            super().load()

        def unload(self) -> None:
            calls.append("unload")
            super().unload()

    weight.grad = torch.ones(3)
    with Counted(optimizer):
        optimizer.step()
        assert calls == ["unload", "load", "unload"]
    assert calls[3:] == ["load"]
    optimizer.step()
    assert calls[4:] == []


@pytest.mark.gpu
def test_states_take_memory_of_the_gpu_during_steps_alone() -> None:
    weight = nn.Parameter(torch.zeros(64 * MIB, device="cuda"))  # 256 MiB
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = torch.cuda.memory_allocated()
    with OptimizerOffload(optimizer) as offload:
        out = torch.cuda.memory_allocated()
        assert out <= held - 2 * weight.nbytes
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.memory_allocated() == out
        assert torch.cuda.max_memory_allocated() >= out + 2 * weight.nbytes
        offload.load()
        assert torch.cuda.memory_allocated() >= out + 2 * weight.nbytes
        offload.unload()
        assert torch.cuda.memory_allocated() == out


def look() -> dict[str, Any]:
    ranks = device_mesh(Mesh((("dp", 1),)), "cuda")
    plain = digest(named_tensors(Tower()))
    inputs = torch.randn(4, WIDTH, device="cuda")
    found: dict[str, Any] = {}
    for name, offloaded in (("device", False), ("host", True)):
        before = torch.cuda.memory_allocated()
        module = Tower() if offloaded else Tower().cuda()
        layout = read_layout(module)
        shard_model(module, ranks, cpu_offload=offloaded)
        for _ in range(2):  # the second time, all has been made that is made once
            torch.cuda.reset_peak_memory_stats()
            module(inputs).square().mean().backward()
        found[name] = {
            "peak": torch.cuda.max_memory_allocated() - before,
            "parameters": sorted({local(parameter).device.type for parameter in module.parameters()}),
            "gradients": sorted({local(parameter.grad).device.type for parameter in module.parameters()}),  # type: ignore[arg-type]
            "tensors": read_layout(module, ranks).tensors == layout.tensors,
            "digest": digest(named_tensors(module)) == plain,
        }
        module.zero_grad()
        del module
    towers = [shard_model(Tower().cuda(), ranks) for _ in range(2)]
    wanted, _ = steps(towers[0], "cuda", offload=False)
    got, places = steps(towers[1], "cuda", offload=True)
    on_host, _ = steps(shard_model(Tower(), ranks, cpu_offload=True), "cuda", offload=True)
    furthest = max((a - b).abs().max().item() for a, b in zip(on_host, wanted, strict=True))
    return {**found, "states": sorted(places), "same": same(got, wanted), "on the host": furthest}


@pytest.mark.gpu
def test_offload_lowers_the_peak_under_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> None:
    (found,) = run_ranks(__file__, tmp_path_factory.mktemp("ranks"), world=1)
    for name, place in (("device", "cuda"), ("host", "cpu")):
        assert (found[name]["parameters"], found[name]["gradients"]) == ([place], [place])
        assert found[name]["tensors"]
        assert found[name]["digest"]
    # Parameters and gradients, 48 MiB each, or those of about two blocks, 4 MiB each.
    assert found["device"]["peak"] > 90 * MIB
    assert found["host"]["peak"] < 40 * MIB
    assert (found["states"], found["same"]) == (["cpu"], True)
    assert found["on the host"] < 1e-4


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=1, device="cuda")
