"""The other script: sends tensors, gets tensors. It may start first, and fails by name when the scorer goes away.

python examples/two_scripts/learner.py tcp://127.0.0.1:5555
"""

import sys

import msgspec
import torch
from drivetrain_transport import Endpoint, Protocol

Score = msgspec.defstruct("Score", [("vectors", torch.Tensor)])
Scores = msgspec.defstruct("Scores", [("norms", torch.Tensor)])

with Endpoint.connect(sys.argv[1], protocol=Protocol(requests=Score, replies=Scores), timeout=60) as endpoint:
    for step in range(1, 4):
        reply = endpoint.peer.call(Score(vectors=torch.full((2, 4), float(step))), timeout=30)
        print(f"step {step}: norms {reply.norms.tolist()}")
