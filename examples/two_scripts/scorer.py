"""One of two scripts that share no code: scores vectors for whoever connects. Start it, then learner.py beside it.

python examples/two_scripts/scorer.py tcp://127.0.0.1:5555
"""

import sys

import msgspec
import numpy as np
from drivetrain_transport import Endpoint, Protocol

Score = msgspec.defstruct("Score", [("vectors", np.ndarray)])
Scores = msgspec.defstruct("Scores", [("norms", np.ndarray)])


async def answer(_, request):
    return Scores(norms=np.linalg.norm(request.vectors, axis=-1))


with Endpoint.bind(sys.argv[1], protocol=Protocol(requests=Score, replies=Scores), handler=answer):
    input("serving until a line comes in\n")
