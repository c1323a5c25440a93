"""How a model lies over devices, and its weights as named tensors with a digest."""

from drivetrain_sharding.digest import Digest, digest
from drivetrain_sharding.layout import shard_model
from drivetrain_sharding.weights import TensorSpec, load_named_tensors, manifest, named_tensors

__all__ = ["Digest", "TensorSpec", "digest", "load_named_tensors", "manifest", "named_tensors", "shard_model"]
