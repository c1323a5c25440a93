"""An optimizer's states in host memory while it does not step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class OptimizerOffload:
    """Keeps the states of an optimizer in host memory between its steps.

    A step brings them to where their parameters lie, and puts them back afterwards: while the model runs forward and
    backward, and while an engine samples on the same device, they take no device memory. They are copied over the
    host's link in both directions at each step (12 GB each way for AdamW on 1.5 billion fp32 parameters). What is
    moved is what has the size of a parameter's share; counters of steps stay.

    Between steps the states are ordinary tensors on the CPU: those of a plain module can be saved as they are. States
    that are DTensors still belong to the mesh of the device; to gather them, `load` them first, or have gloo in the
    process group (`init_process_group("cpu:gloo,cuda:nccl")`).

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with OptimizerOffload(optimizer):
        ...     _ = model(torch.ones(1, 4)).sum().backward()
        ...     optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves the states to the host, and has every step of the optimizer bring and return them."""
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.load()),
            optimizer.register_step_post_hook(lambda *_: self.unload()),
        ]
        self.unload()

    @torch.no_grad()
    def load(self) -> None:
        """Moves the states to the devices of their parameters."""
        for device, state in self._states():
            if state.device != device:
                state.data = state.to(device, non_blocking=True)

    @torch.no_grad()
    def unload(self) -> None:
        """Moves the states to the host, and waits until they are there."""
        devices: set[torch.device] = set()
        for _, state in self._states():
            if state.device.type != "cpu":
                devices.add(state.device)
                host = torch.empty_like(state, device="cpu", pin_memory=True)
                # The device's memory goes back to its allocator, which gives it away in the order of the stream.
                state.data = host.copy_(state, non_blocking=True)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    def close(self) -> None:
        """Moves the states back for good."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.load()

    def __enter__(self) -> OptimizerOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _states(self) -> Iterator[tuple[torch.device, Tensor]]:
        """What lies on this rank, and the device of its parameter."""
        for parameter, states in self._optimizer.state.items():
            device = _local(parameter).device
            for state in states.values():
                if isinstance(state, Tensor) and state.ndim > 0:
                    yield device, _local(state)


def _local(tensor: Tensor) -> Tensor:
    """The tensor, or the tensor within a DTensor: it itself and not a view, as gradients are off."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
