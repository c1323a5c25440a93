"""A weight update, both ends of it: from the learner's parameters to the engines that sample.

 elsewhere         named tensors, whole, one at a time ── buckets over ZeroMQ ──► checked, then loaded
 on our device     handles to the parameters, once ──────────────────────────► read, cast and cut in one copy, in place

Either way the engine proves by the digest what it holds before it samples from it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from drivetrain_learner import PolicyModel
from drivetrain_rollout import EngineInfo, WeightUpdate, WeightWrite
from drivetrain_sharding import (
    Digest,
    Layout,
    Mesh,
    Pull,
    ShardedDigest,
    local_parameters,
    make_plan,
    named_tensors,
    read_layout,
    train_layout,
    vllm_layout,
)
from drivetrain_transport.device import TensorExports, TensorHandle, import_tensor
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One version of the policy on its way to the engines."""

    policy_version: int
    digest: str
    nbytes: int
    """Of the weights, as the engines hold them."""
    updates: Sequence[WeightUpdate | WeightWrite]
    """One for each engine; none on a rank that has no engines."""


def gather(module: PolicyModel, version: int, *, dtype: torch.dtype, engines: int) -> Push:
    """The policy's full named tensors, cast once to the type that the engine holds, with the digest of exactly those.

    All ranks gather together, one tensor at a time; only a rank that has engines holds the result. The collective is
    complete before anything is sent, so that a slow engine can never leave ranks waiting in a gather.
    """
    digest = Digest()
    tensors, nbytes = [], 0
    for name, tensor in named_tensors(module.model, dtype=dtype):
        nbytes += tensor.nbytes
        if engines:
            digest.add(name, tensor)
            tensors.append((name, tensor))
    update = WeightUpdate(policy_version=version, digest=digest.hexdigest(), tensors=tensors)
    return Push(policy_version=version, digest=update.digest, nbytes=nbytes, updates=[update] * engines)


def engine_layout(engine: str, config: Any, dtype: torch.dtype) -> Layout:
    """How an engine that samples on one device lays the model out.

    Raises:
        ValueError: it is not known of this model; weights then travel as named tensors.
    """
    match engine:
        case "vllm":
            return vllm_layout(config, dtype=dtype)
        case "transformers":
            return train_layout(config, Mesh((("dp", 1),)), dtype=dtype)
        case _:
            raise ValueError(f"it is not known how {engine} lays a model out")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learner's parameters lie, and how; the same for all updates of a run."""

    source: str
    target: str
    """Layouts, as JSON."""
    handles: dict[str, TensorHandle]


class SharedWeights:
    """The learner's end for engines that share its device: they read the parameters where they lie.

    A GPU's memory is exported once, so the module's parameters must stay the tensors that they are. A CPU's are copied
    into shared memory for each version. Between a `push` and the engines' answers nothing may change their values.
    """

    def __init__(self, module: PolicyModel, engines: Sequence[EngineInfo], *, dtype: torch.dtype) -> None:
        """
        Raises:
            ValueError: the layout of one of the engines is not known, or the module does not fit it.
        """
        self._source = read_layout(module.model)
        self._parameters = local_parameters(module.model)
        self._targets = [engine_layout(info.engine, module.model.config, dtype) for info in engines]
        for target in self._targets:
            make_plan(self._source, target)
        self._digest = ShardedDigest(self._source, dtype=dtype)
        self._nbytes = sum(spec.nbytes for spec in self._targets[0].tensors)
        self._exports = TensorExports()
        self._offers: list[bytes] = []

    def push(self, version: int) -> Push:
        """This version, for each engine. Returns when all work on the parameters is done."""
        parameters = self._parameters
        digest = self._digest.combine({0: self._digest.hashes(0, parameters)}).hex
        device = next(iter(parameters.values())).device
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        if device.type == "cpu" or not self._offers:
            self._export(parameters)
        return Push(
            policy_version=version,
            digest=digest,
            nbytes=self._nbytes,
            updates=[WeightWrite(policy_version=version, digest=digest, message=offer) for offer in self._offers],
        )

    def _export(self, parameters: Mapping[str, Tensor]) -> None:
        self._exports.close()
        self._exports = TensorExports()
        source = self._source.to_json()
        self._offers = [
            msgspec.msgpack.encode(
                Offer(
                    source=source,
                    target=target.to_json(),
                    handles={name: self._exports.export(tensor) for name, tensor in parameters.items()},
                )
            )
            for target in self._targets
        ]

    def close(self) -> None:
        """Let go of what was exported."""
        self._exports.close()


class SharedWriter:
    """The engine's end, a `drivetrain_rollout.Writer`: it opens what it is offered once, and reads it at each write."""

    def __init__(self) -> None:
        self._offer = b""
        self._opened: _Opened | None = None

    def __call__(self, parameters: Mapping[str, Tensor], message: bytes) -> Callable[[], str]:
        if self._opened is None or message != self._offer:
            self._opened = None  # lets go of the memory that was offered before
            self._opened, self._offer = _Opened(message), message
        opened = self._opened
        copy = opened.pull.prepare(opened.source, parameters)

        def write() -> str:
            copy()
            return opened.digest.combine({0: opened.digest.hashes(0, parameters)}).hex

        return write


class _Opened:
    """An offer that was taken up."""

    def __init__(self, message: bytes) -> None:
        offer = msgspec.msgpack.decode(message, type=Offer)
        plan = make_plan(Layout.from_json(offer.source), Layout.from_json(offer.target))
        self.pull, self.digest = Pull(plan, 0), ShardedDigest(plan.target)
        self._memory = {name: import_tensor(handle) for name, handle in offer.handles.items()}

    def source(self, _rank: int) -> Mapping[str, Tensor]:
        """What the learner, a single rank, holds."""
        return self._memory
