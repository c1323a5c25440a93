"""Both ends of a weight update: an engine in another process reads the learner's parameters and writes its own."""

import asyncio
import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from drivetrain_learner import PolicyModel, load_model
from drivetrain_ppo.weights import Push, SharedWeights, gather
from drivetrain_rollout import EngineConfig, GenerateRequest, RequestError, SamplingParams, WeightsRefused, WeightWrite
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine
from drivetrain_rollout.testing import reference_logprobs, write_tiny_model
from drivetrain_transport import Endpoint
from programs import environment

DEADLINE = 60.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Iterator[tuple[RemoteEngine, pathlib.Path]]:
    """Our own rollout worker with the transformers engine, in float32."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, tie_word_embeddings=True)
    config = EngineConfig(engine="transformers", model=str(folder), max_model_len=96, max_num_seqs=16)
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        command = [sys.executable, "-m", "drivetrain_ppo", "rollout-worker", "--join", endpoint.address]
        with subprocess.Popen(command, env=environment()) as child:
            try:
                yield RemoteEngine(endpoint.wait_for_peer(DEADLINE), config), folder
            finally:
                endpoint.close()
                child.wait(DEADLINE)


@pytest.fixture
def learner(worker) -> PolicyModel:
    return PolicyModel(load_model(str(worker[1]), device="cpu"))


def step(learner: PolicyModel) -> None:
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def send(engine: RemoteEngine, push: Push) -> None:
    [write] = push.updates
    assert isinstance(write, WeightWrite)
    state = asyncio.run(engine.write_weights(write))
    assert (state.policy_version, state.digest, state.status) == (push.policy_version, push.digest, "ready")


def off(engine: RemoteEngine, learner: PolicyModel, folder: pathlib.Path) -> float:
    """Largest difference between the log-probs that the engine reports and the learner's."""
    learner.model.save_pretrained(folder)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=8))
    found = [asyncio.run(engine.generate(request))]
    [expected] = reference_logprobs(folder, found, temperature=1.0)
    return max(abs(a - b) for a, b in zip(found[0].rollout_logprobs, expected, strict=True))


def test_the_engine_holds_each_version_and_both_ways_prove_it_by_the_same_digest(worker, learner, tmp_path):
    engine, _ = worker
    with contextlib.closing(SharedWeights(learner, [engine.info], dtype=torch.float32)) as shared:
        digests = set()
        for version in (1, 2, 3):
            step(learner)
            push = shared.push(version)
            assert push.digest == gather(learner, version, dtype=torch.float32, engines=1).digest
            assert push.nbytes == sum(parameter.nbytes for parameter in learner.parameters())
            send(engine, push)
            assert off(engine, learner, tmp_path / str(version)) < 1e-4
            digests.add(push.digest)
        assert len(digests) == 3


def test_memory_that_is_gone_is_refused_and_the_old_version_is_served(worker, learner, tmp_path):
    engine, _ = worker
    with contextlib.closing(SharedWeights(learner, [engine.info], dtype=torch.float32)) as shared:
        step(learner)
        send(engine, shared.push(11))
        served = engine.weights
        learner.model.save_pretrained(tmp_path)
        step(learner)
        push = shared.push(12)
    with pytest.raises(WeightsRefused, match="policy version 12: it cannot be written: the tensor's memory is gone"):
        send(engine, push)
    assert engine.weights == served
    assert off(engine, PolicyModel(load_model(str(tmp_path), device="cpu")), tmp_path / "again") < 1e-4


def test_parameters_that_change_while_they_are_read_end_serving(worker, learner):
    """The learner broke its promise: what the engine holds is no version at all, and the digest says so."""
    engine, _ = worker
    with contextlib.closing(SharedWeights(learner, [engine.info], dtype=torch.float32)) as shared:
        push = shared.push(21)
        [write] = push.updates
        assert isinstance(write, WeightWrite)
        torn = WeightWrite(policy_version=21, digest="0" * 64, message=write.message)
        with pytest.raises(WeightsRefused, match="the digest of what is in place now"):
            asyncio.run(engine.write_weights(torn))
        request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="complete weights"):
            asyncio.run(engine.generate(request))
        send(engine, shared.push(22))


def test_an_engine_of_another_model_is_refused_before_anything_is_sent(worker, learner):
    engine, _ = worker
    learner.model.config.vocab_size += 1
    with pytest.raises(ValueError, match="embed_tokens"):
        SharedWeights(learner, [engine.info], dtype=torch.float32)
