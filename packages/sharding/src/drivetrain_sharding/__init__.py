"""How a model lies over devices, and its weights as named tensors with a digest."""

from drivetrain_sharding.delta import DeltaChain, DeltaRefused, apply_delta, delta_digests, encode_delta
from drivetrain_sharding.digest import (
    Digest,
    DigestMismatch,
    ShardedDigest,
    VersionDigest,
    combine,
    differing,
    digest,
    piece_hashes,
)
from drivetrain_sharding.exchange import CallableExchange, Exchange, TorchExchange
from drivetrain_sharding.execute import Executor, Pull, TransferFailed, pull
from drivetrain_sharding.families import train_layout, vllm_layout
from drivetrain_sharding.fit import PROCESS, Fit, engine_fit, frozen_fit, kv_bytes, training_fit
from drivetrain_sharding.layout import Box, Layout, Mesh, Parameter, Part, Piece, Split, TensorSpec
from drivetrain_sharding.offload import OptimizerOffload
from drivetrain_sharding.plan import LayoutMismatch, Plan, Transfer, make_plan
from drivetrain_sharding.reading import local_parameters, read_layout
from drivetrain_sharding.setup import checkpoint_activations, device_mesh, shard_model
from drivetrain_sharding.weights import load_named_tensors, manifest, named_tensors

__all__ = [
    "PROCESS",
    "Box",
    "CallableExchange",
    "DeltaChain",
    "DeltaRefused",
    "Digest",
    "DigestMismatch",
    "Exchange",
    "Executor",
    "Fit",
    "Layout",
    "LayoutMismatch",
    "Mesh",
    "OptimizerOffload",
    "Parameter",
    "Part",
    "Piece",
    "Plan",
    "Pull",
    "ShardedDigest",
    "Split",
    "TensorSpec",
    "TorchExchange",
    "Transfer",
    "TransferFailed",
    "VersionDigest",
    "apply_delta",
    "checkpoint_activations",
    "combine",
    "delta_digests",
    "device_mesh",
    "differing",
    "digest",
    "encode_delta",
    "engine_fit",
    "frozen_fit",
    "kv_bytes",
    "load_named_tensors",
    "local_parameters",
    "make_plan",
    "manifest",
    "named_tensors",
    "piece_hashes",
    "pull",
    "read_layout",
    "shard_model",
    "train_layout",
    "training_fit",
    "vllm_layout",
]
