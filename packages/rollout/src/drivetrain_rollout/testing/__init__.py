"""For tests: the contract that every engine keeps, an engine without a model, and tiny models with a reference.

The contract is a tuple of coroutine functions, each of which checks one promise and leaves the engine as it was:

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_contract(check, subject):
        asyncio.run(check(subject))

``check_close`` comes last, since nothing is served after it.
"""

from drivetrain_rollout.testing._contract import CONTRACT, Subject, check_close
from drivetrain_rollout.testing._models import load_tensors, reference_logprobs, sha256_digest, write_tiny_model
from drivetrain_rollout.testing._scripted import ScriptedEngine

__all__ = [
    "CONTRACT",
    "ScriptedEngine",
    "Subject",
    "check_close",
    "load_tensors",
    "reference_logprobs",
    "sha256_digest",
    "write_tiny_model",
]
