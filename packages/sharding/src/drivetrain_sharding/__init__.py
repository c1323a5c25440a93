"""How a model lies over devices, and its weights as named tensors with a digest."""

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
from drivetrain_sharding.families import train_layout, vllm_layout
from drivetrain_sharding.layout import Box, Layout, Mesh, Parameter, Part, Piece, Split, TensorSpec
from drivetrain_sharding.plan import LayoutMismatch, Plan, Transfer, make_plan
from drivetrain_sharding.reading import local_parameters, read_layout
from drivetrain_sharding.setup import shard_model
from drivetrain_sharding.weights import load_named_tensors, manifest, named_tensors

__all__ = [
    "Box",
    "Digest",
    "DigestMismatch",
    "Layout",
    "LayoutMismatch",
    "Mesh",
    "Parameter",
    "Part",
    "Piece",
    "Plan",
    "ShardedDigest",
    "Split",
    "TensorSpec",
    "Transfer",
    "VersionDigest",
    "combine",
    "differing",
    "digest",
    "load_named_tensors",
    "local_parameters",
    "make_plan",
    "manifest",
    "named_tensors",
    "piece_hashes",
    "read_layout",
    "shard_model",
    "train_layout",
    "vllm_layout",
]
