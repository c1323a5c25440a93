"""Tensors between processes: groups that exchange them by NCCL, RCCL or gloo, and memory that processes share.

Needs torch. Importing it starts nothing and touches no GPU.
"""

from drivetrain_transport._errors import GroupBroken
from drivetrain_transport.device._group import TensorGroup
from drivetrain_transport.device._ipc import TensorExports, TensorHandle, import_tensor
from drivetrain_transport.device._rendezvous import Rendezvous
from drivetrain_transport.device._rounds import Round

__all__ = [
    "GroupBroken",
    "Rendezvous",
    "Round",
    "TensorExports",
    "TensorGroup",
    "TensorHandle",
    "import_tensor",
]
