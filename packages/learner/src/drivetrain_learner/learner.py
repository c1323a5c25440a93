"""Gradient accumulation that does not depend on how a batch is cut, and AdamW on fp32 parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_learner import _parallel as parallel
from drivetrain_learner.batch import PackedBatch
from drivetrain_learner.config import LearnerConfig

Output = TypeVar("Output", bound="Tensor | tuple[Any, ...]")
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss closure returns for one micro-batch."""

    loss: Tensor
    """Scalar with a gradient: this micro-batch's summand of the loss. Its denominator is that of the whole step (all
    micro-batches, all ranks)."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that add up over micro-batches and ranks to the numbers wanted. The same names on every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an update did; the same on every rank."""

    loss: float
    """The sum of the loss over micro-batches and ranks."""
    grad_norm: float
    """The global 2-norm of the gradient, before clipping."""
    lr: float
    """The learning rate of this update."""
    metrics: dict[str, float]
    """The sums of the metrics over micro-batches and ranks."""
    skipped: str | None = None
    """Why the parameters were left as they were, or None."""


class Learner(Generic[Module]):
    """Trains one module, on one device or as one rank of a group.

    The module is taken as it lies: ordinary parameters are taken to be equal on all ranks and their gradients are
    summed here; parameters sharded by FSDP2 are summed by FSDP2. Either way gradients are summed, never averaged,
    because losses carry global denominators: the update does not depend on the micro-batches or the number of ranks.
    The ranks of the group are those that bring batches of their own. Tensor-parallel ranks bring the same batch: they
    are in different groups, each that of the data-parallel mesh dimension.

    All ranks of the group call `infer`, `update`, `reduce`, `state_dict` and `load_state_dict` in the same order; each
    brings its own batch. A rank whose batch is smaller (or empty) runs its closure on empty batches, so that every rank
    runs as many passes as the others. A closure therefore calls the module once on whatever batch it is given, and
    sums: over an empty batch its loss and its metrics are 0.

    The parameters are the fp32 masters: to compute in another dtype use `PolicyModel(..., autocast=...)` or FSDP2's
    mixed precision.
    """

    def __init__(
        self, module: Module, config: LearnerConfig, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Makes the optimizer.

        Args:
            module: a `PolicyModel`, `ValueModel`, or any module that its closures call with packed batches. One without
                trainable parameters (a reference) can `infer`, and not `update`.
            config: the settings.
            process_group: the ranks that train this module together, each on its own batches. None: this process alone.

        Raises:
            ValueError: a trainable parameter is not fp32, or the module is sharded without a group, or over some of the
                group's ranks.
        """
        self.module = module
        self.config = config
        self.process_group = process_group
        self.step = 0
        """Updates that have changed the parameters."""
        self._reshard()
        self._state = parallel.named_state(module)
        self._parameters = {name: p for name, p in self._state.items() if p.requires_grad}
        self._check_parameters()
        self.device = parallel.device_of(next(iter(self._state.values())))
        """Where batches are moved to."""
        for sharded in parallel.fsdp_modules(module):
            sharded.set_gradient_divide_factor(1.0)
            # Without this FSDP2 asks for a pre-multiplied sum, which only NCCL has.
            sharded.set_force_sum_reduction_for_comms(True)
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [
            {"params": group, "weight_decay": decay}
            for parameters, decay in ((matrices, config.weight_decay), (vectors, 0.0))
            for group in parallel.by_layout(parameters)
        ]
        self.optimizer = torch.optim.AdamW(
            groups or [{"params": []}],
            lr=config.lr_at(0),
            betas=config.betas,
            eps=config.eps,
            fused=self.device.type in ("cpu", "cuda"),
        )

    def infer(self, batch: PackedBatch, forward: Callable[[PackedBatch], Output]) -> Output:
        """Outputs for a whole batch, without gradients, micro-batch by micro-batch.

        Args:
            batch: this rank's sequences.
            forward: from a micro-batch to a tensor, or a (named) tuple of tensors and Nones, with per-slot or
                per-sequence entries along the first dimension. It calls the module once.

        Returns:
            the same structure, in the batch's order.
        """
        with torch.no_grad():
            outputs = [forward(part) for part in self._microbatches(batch)]
        self._reshard()
        joined: Output = _join(outputs)
        return joined

    def update(self, batch: PackedBatch, loss: Callable[[PackedBatch], LossTerms]) -> UpdateResult:
        """One optimizer step on the loss of a batch, summed over its micro-batches and all ranks.

        The step is skipped, with the reason in the result, when no rank has a slot with `loss_mask` true, and when the
        gradient is not finite.

        Args:
            batch: this rank's sequences; there may be none.
            loss: from a micro-batch to its summand of the loss.

        Raises:
            ValueError: the loss is not a scalar with a gradient, or the names of the metrics change between calls.
            RuntimeError: the module has no trainable parameters.
        """
        if not self._parameters:
            raise RuntimeError("the module has no parameter with requires_grad: it can infer, not update")
        lr = self.config.lr_at(self.step)
        self.optimizer.zero_grad()
        if not self._maximum(int(batch.loss_mask.any())):
            return UpdateResult(loss=0.0, grad_norm=0.0, lr=lr, metrics={}, skipped="no slot has loss_mask true")
        totals: dict[str, Tensor] = {}
        for part in self._microbatches(batch):
            terms = loss(part)
            _check_terms(terms, totals)
            torch.autograd.backward(terms.loss)
            for name, value in (("", terms.loss), *terms.metrics.items()):
                value = value.detach().to(self.device, torch.float64)
                totals[name] = totals[name] + value if name in totals else value
        gradients = self._summed_gradients()
        names = sorted(totals)
        sums = self.reduce(torch.stack([totals[name] for name in names]))
        # The host waits for the device here once, and not for each number.
        norm, *values = torch.cat([parallel.total_norm(gradients)[None].to(sums.device), sums]).tolist()
        metrics = dict(zip(names, values, strict=True))
        result = {"loss": metrics.pop(""), "grad_norm": norm, "lr": lr, "metrics": metrics}
        if not norm < float("inf"):
            self.optimizer.zero_grad()
            return UpdateResult(**result, skipped=f"the gradient's norm is {norm}")
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            torch._foreach_mul_([parallel.local(g) for g in gradients], self.config.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return UpdateResult(**result)

    def reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks; alone, the tensor itself. The denominators of a step are made with it."""
        if self.process_group is None:
            return tensor
        tensor = tensor.to(self.device, copy=True)
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a later learner needs to go on as this one would: masters, AdamW's moments, the step.

        Returns:
            full tensors on the CPU, named `model/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and `step`; an empty mapping
            on ranks other than the group's first.
        """
        self._reshard()
        keep = self.process_group is None or dist.get_rank(self.process_group) == 0
        state: dict[str, Tensor] = {}
        for name, tensor in self._tensors():
            gathered = parallel.full(tensor.detach())
            if keep:
                state[name] = gathered.to("cpu", copy=True)
        if keep:
            state["step"] = torch.tensor(self.step)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a state that `state_dict` made, whatever layout it was made from. Every rank brings all of it.

        Raises:
            ValueError: names are unknown or missing, or shapes differ; nothing has changed then.
        """
        self._reshard()
        own = dict(self._tensors())
        problems = [f"unknown {name}" for name in sorted(state.keys() - own.keys() - {"step"})]
        problems += [f"missing {name}" for name in sorted(own.keys() | {"step"}) if name not in state]
        problems += [
            f"{name} is {tuple(state[name].shape)}, here {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in state and state[name].shape != tensor.shape
        ]
        if problems:
            raise ValueError(f"the state does not fit this module: {'; '.join(problems)}")
        for name, tensor in own.items():
            parallel.assign(tensor, state[name])
        self.step = int(state["step"])
        for moments in self.optimizer.state.values():
            moments["step"].fill_(self.step)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of the state, as they lie. AdamW's moments are made (as zeros) where it has none yet."""
        for name, tensor in self._state.items():
            yield f"model/{name}", tensor
        for name, parameter in self._parameters.items():
            moments = self.optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            yield f"exp_avg/{name}", moments["exp_avg"]
            yield f"exp_avg_sq/{name}", moments["exp_avg_sq"]

    def _microbatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """This rank's micro-batches, then empty ones until every rank has had as many."""
        parts = batch.split(self.config.max_tokens_per_microbatch)
        empty = batch.select([])
        for index in range(self._maximum(max(len(parts), 1))):
            yield (parts[index] if index < len(parts) else empty).to(self.device)

    def _maximum(self, value: int) -> int:
        if self.process_group is None:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(tensor)

    def _summed_gradients(self) -> list[Tensor]:
        """All gradients, summed over ranks. A parameter that the loss did not reach has a gradient of zero."""
        gradients: list[Tensor] = []
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self.process_group is not None:
            group = self.process_group
            own = [parallel.local(g) for g in gradients if not parallel.is_summed(g, group)]
            parallel.sum_replicated(own, group)
        return gradients

    def _reshard(self) -> None:
        # FSDP2 keeps the root's parameters whole after a forward pass that no backward pass follows.
        for sharded in parallel.fsdp_modules(self.module):
            sharded.reshard()

    def _check_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}, in which steps of RL's size round to nothing; "
                    "load the model with dtype=torch.float32 and compute with autocast=torch.bfloat16"
                )
            if self.process_group is None and parallel.is_sharded(parameter):
                raise ValueError(f"parameter {name} is sharded; give the process_group of its ranks")
            if self.process_group is not None and not parallel.goes_with(parameter, self.process_group):
                raise ValueError(
                    f"parameter {name} is shared by some ranks of the process_group and not by others, so that its "
                    "gradient would be summed over some twice; give the ranks of the data-parallel mesh dimension"
                )


def _check_terms(terms: LossTerms, totals: Mapping[str, Tensor]) -> None:
    if terms.loss.ndim != 0 or not terms.loss.requires_grad:
        raise ValueError(
            f"the loss has shape {tuple(terms.loss.shape)} and requires_grad={terms.loss.requires_grad}; "
            "a scalar that depends on the module's outputs is needed"
        )
    if totals and totals.keys() - {""} != terms.metrics.keys():
        raise ValueError(f"metrics are {sorted(terms.metrics)}, before {sorted(totals.keys() - {''})}")


def _join(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    columns = [_join(column) for column in zip(*outputs, strict=True)]
    return type(first)(*columns) if isinstance(first, tuple) and type(first) is not tuple else tuple(columns)
