"""Tensor parallelism as a layout has it: which module is cut how, what does not go, and carrying it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from drivetrain_sharding.layout import Layout, Parameter
from drivetrain_sharding.weights import _aliases, _clean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Norms of single heads: each rank has all of their weights and applies them to its own heads.
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class Cutting:
    """What tensor parallelism does to one module."""

    path: str
    module: nn.Module
    set_up: Callable[[nn.Module, DeviceMesh], None]


def cuttings(module: nn.Module, layout: Layout, over: str) -> list[Cutting]:
    """What is to be done to the modules of a model, so that it lies as in a layout.

    Which module needs which communication follows from what is cut: a linear layer cut by outputs hands its share on to
    the layer beside it (in the same parent) that is cut by inputs, and gathers its outputs where there is none.

    Raises:
        ValueError: what cannot be cut like this, each with a mend.
    """
    modules = {_clean(name): child for name, child in module.named_modules(remove_duplicate=False)}
    parameters = {parameter.name: parameter for parameter in layout.parameters}
    dims = {name: _dims(parameter, over) for name, parameter in parameters.items()}
    names: dict[str, dict[str, str]] = {}  # by module and attribute: the parameter's name in the layout
    for alias, name in _aliases(module).items():
        if name in parameters:
            path, _, attribute = alias.rpartition(".")
            names.setdefault(path, {})[attribute] = name
    pairs = {
        path.rpartition(".")[0]
        for path, held in names.items()
        if isinstance(modules[path], nn.Linear) and [1] in (dims[name] for name in held.values())
    }
    found: list[Cutting] = []
    problems = [f"{name} {problem}" for name in parameters for problem in _misfits(parameters[name], layout, over)]
    seen: set[int] = set()
    for path, held in names.items():
        if id(modules[path]) in seen:
            continue
        seen.add(id(modules[path]))
        parent = path.rpartition(".")[0]
        try:
            chosen = _choose(path, modules[path], {key: dims[name] for key, name in held.items()}, parent in pairs)
            heads = getattr(modules[parent], "head_dim", None)
            if chosen is _columns and isinstance(heads, int):
                _check_heads(modules[path], heads, layout.mesh.extent(over))
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        if chosen is not None:
            found.append(Cutting(path, modules[path], chosen))
    if problems:
        raise ValueError(f"tensor parallelism over {over!r} ({layout.mesh.extent(over)} ranks): {'; '.join(problems)}")
    return found


def parallelize(module: nn.Module, found: Sequence[Cutting], mesh: DeviceMesh) -> None:
    """Carry out what `cuttings` found; parameters that were one stay one."""
    aliases = {other: name for other, name in _aliases(module).items() if other != name}
    for cutting in found:
        cutting.set_up(cutting.module, mesh)
    modules = {_clean(name): child for name, child in module.named_modules(remove_duplicate=False)}
    for other, name in aliases.items():
        path, _, attribute = name.rpartition(".")
        at, _, alias = other.rpartition(".")
        setattr(modules[at], alias, getattr(modules[path], attribute))


def _dims(parameter: Parameter, over: str) -> list[int]:
    """Along which dimensions of its whole tensors a parameter is cut over a mesh dimension."""
    stacked = [-1] if parameter.experts is not None and parameter.experts.over == over else []
    return stacked + [split.dim for split in parameter.parts[0].splits if split.over == over]


def _misfits(parameter: Parameter, layout: Layout, over: str) -> list[str]:
    """Why a parameter's sizes cannot be cut evenly, or are not cut as training needs it."""
    found, ranks = [], layout.mesh.extent(over)
    shape = layout.spec(parameter.parts[0].tensor).shape
    for split in parameter.parts[0].splits:
        if split.over != over:
            continue
        if split.parts not in (None, ranks) or split.padded is not None:
            found.append("is padded, or held by neighbours in copies: that is a layout for sampling; use train_layout")
        elif shape[split.dim] % ranks:
            found.append(f"has {shape[split.dim]} in dimension {split.dim}: use a number of ranks that divides it")
    return found


def _check_heads(module: nn.Module, head_dim: int, ranks: int) -> None:
    """Attention cannot work on parts of heads."""
    rows = int(module.weight.shape[0])  # type: ignore[index]
    if rows % head_dim == 0 and (rows // head_dim) % ranks:
        raise ValueError(f"it has {rows // head_dim} heads of {head_dim}: use a number of ranks that divides the heads")


def _choose(
    path: str, module: nn.Module, dims: Mapping[str, list[int]], paired: bool
) -> Callable[[nn.Module, DeviceMesh], None] | None:
    """What is done to a module whose parameters are cut along these dimensions; None: nothing."""
    cut = {key: along for key, along in dims.items() if along}
    if not cut:
        if not paired or isinstance(module, (nn.Linear, nn.Embedding)):
            return None
        if path.rpartition(".")[2] in _HEAD_NORMS:
            return _sum_gradients
        raise ValueError(
            f"a {type(module).__name__} stands between layers that are cut, and whether it sees shares or whole "
            "activations is not known: cut none of its neighbours"
        )
    if isinstance(module, nn.Linear):
        if all(along == [0] for along in dims.values()):
            return _columns if paired else _gathered_columns
        if cut == {"weight": [1]}:
            return _rows
    if isinstance(module, nn.Embedding) and cut == {"weight": [0]}:
        return _vocabulary
    if dims == {"gate_up_proj": [0], "down_proj": [1]} and not isinstance(module, nn.Linear):
        return _experts
    raise ValueError(
        f"a {type(module).__name__} cannot be cut as {cut}; known are Linear (all along dimension 0, or the weight "
        "along 1), Embedding (along 0) and stacked experts (gate and up along 0, down along 1): leave it whole"
    )


def _columns(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(module, mesh, ColwiseParallel(), src_data_rank=None)


def _gathered_columns(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)


def _rows(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    parallelize_module(module, mesh, RowwiseParallel(), src_data_rank=None)


def _vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    parallelize_module(module, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank's heads give part of the gradient of a norm's weight; the norm is to have their sum on every rank."""
    group = mesh.get_group()
    _seen_as(module, lambda parameter: _sum_backward(parameter, group))


def _experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every expert is cut: gate and up, which lie behind one another, each by outputs, down by inputs."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    for name, placement in (("gate_up_proj", _StridedShard(1, split_factor=2)), ("down_proj", Shard(2))):
        whole: Any = getattr(module, name)
        part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    group = mesh.get_group()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # What the experts do with tokens and their weights is a share: so are the gradients that come back.
        shared = {key: _shared(value, group) for key, value in kwargs.items()}
        return tuple(_shared(value, group) for value in args), shared

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda *seen: _sum_forward(seen[-1], group))
    _seen_as(module, lambda parameter: parameter.to_local())


def _shared(value: Any, group: dist.ProcessGroup) -> Any:
    differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return _sum_backward(value, group) if differentiable else value


def _seen_as(module: nn.Module, view: Callable[[Any], Tensor]) -> None:
    """While the module runs, its parameters are what `view` makes of them."""

    def enter(module: nn.Module, *_: Any) -> None:
        # Attributes of the instance itself are found before its parameters.
        module.__dict__.update({name: view(parameter) for name, parameter in module.named_parameters(recurse=False)})

    def leave(module: nn.Module, *_: Any) -> None:
        for name, _parameter in module.named_parameters(recurse=False):
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class _SumBackward(Function):
    """The tensor itself; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumForward(Function):
    """The sum over ranks; its gradient, the same on all ranks, is that of each summand."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


_sum_backward: Callable[..., Tensor] = _SumBackward.apply
_sum_forward: Callable[..., Tensor] = _SumForward.apply
