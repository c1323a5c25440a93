"""Weights that a writer puts in place: of a transformers model in this process, and behind the transport."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from drivetrain_rollout import (
    EngineConfig,
    GenerateRequest,
    RequestError,
    RolloutEngine,
    SamplingParams,
    WeightsRefused,
    WeightUpdate,
    WeightWrite,
)
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine, serve
from drivetrain_rollout.testing import ScriptedEngine, load_tensors, reference_logprobs, sha256_digest, write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_transport import Endpoint
from safetensors.torch import load, save
from torch import Tensor

DEADLINE = 60.0


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


def from_message(parameters: Mapping[str, Tensor], message: bytes) -> Callable[[], str]:
    """A writer: the values are in the message, as a safetensors file."""
    values = load(message)
    if misfits := [name for name in parameters if values[name].shape != parameters[name].shape]:
        raise ValueError(f"shapes of {misfits}")

    def write() -> str:
        for name, parameter in parameters.items():
            if values[name].isnan().any():
                raise FloatingPointError(f"NaN in {name}")
            parameter.copy_(values[name])
        return sha256_digest(parameters.items())

    return write


def write_of(tensors: list[tuple[str, Tensor]], version: int, digest: str | None = None) -> WeightWrite:
    message = save({name: tensor.contiguous() for name, tensor in tensors})
    return WeightWrite(policy_version=version, digest=digest or sha256_digest(tensors), message=message)


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=6))


@pytest.fixture(scope="module", params=["here", "behind the transport"])
def case(request, tmp_path_factory) -> Iterator[tuple[RolloutEngine, list[Path]]]:
    root = tmp_path_factory.mktemp("models")
    folders = [write_tiny_model(root / str(seed), seed=seed, tie_word_embeddings=True) for seed in (0, 1)]
    config = EngineConfig(engine="transformers", model=str(folders[0]), max_model_len=96, max_num_seqs=32)

    def factory(config: EngineConfig) -> RolloutEngine:
        return TransformersEngine(config, digest=sha256_digest, writer=from_message)

    if request.param == "here":
        engine = factory(config)
        yield engine, folders
        run(engine.close())
        return
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        thread = threading.Thread(target=serve, args=(endpoint.address,), kwargs={"factory": factory, "name": "w0"})
        thread.start()
        yield RemoteEngine(endpoint.wait_for_peer(DEADLINE), config), folders
    thread.join(DEADLINE)
    assert not thread.is_alive()


def off(engine: RolloutEngine, folder: Path) -> float:
    found = [run(engine.generate(request()))]
    [expected] = reference_logprobs(folder, found, temperature=1.0)
    return max(abs(a - b) for a, b in zip(found[0].rollout_logprobs, expected, strict=True))


def test_what_was_written_is_served_and_what_cannot_be_written_changes_nothing(case):
    engine, folders = case
    first, other = (load_tensors(folder) for folder in folders)
    assert engine.info.can_write
    state = run(engine.write_weights(write_of(other, 7)))
    assert (state.policy_version, state.digest, state.status) == (7, sha256_digest(other), "ready")
    assert state == engine.weights
    assert off(engine, folders[1]) < 1e-4 < off(engine, folders[0])

    misshapen = [(name, tensor[..., :-1]) for name, tensor in first]
    with pytest.raises(WeightsRefused, match="policy version 8: it cannot be written: shapes of"):
        run(engine.write_weights(write_of(misshapen, 8)))
    assert engine.weights == state
    assert off(engine, folders[1]) < 1e-4


def test_a_write_that_breaks_off_or_has_another_digest_ends_serving_until_an_update_succeeds(case):
    engine, folders = case
    first, other = (load_tensors(folder) for folder in folders)
    served = run(engine.write_weights(write_of(other, 1)))
    poisoned = [*first[:-1], (first[-1][0], first[-1][1] * torch.nan)]
    for write, why in (
        (write_of(poisoned, 2), "writing broke off"),
        (write_of(first, 2, digest="0" * 64), "the digest of what is in place now is"),
    ):
        with pytest.raises(WeightsRefused, match=f"policy version 2: {why}.*until a whole update succeeds"):
            run(engine.write_weights(write))
        state = engine.weights
        assert (state.policy_version, state.digest, state.status) == (1, served.digest, "refused")
        with pytest.raises(RequestError) as error:
            run(engine.generate(request()))
        assert error.value.reason == "stale_weights"
    # Both kinds of update mend it.
    run(engine.update_weights(WeightUpdate(policy_version=3, digest=sha256_digest(first), tensors=first)))
    assert off(engine, folders[0]) < 1e-4
    with pytest.raises(WeightsRefused):
        run(engine.write_weights(write_of(poisoned, 4)))
    run(engine.write_weights(write_of(other, 4)))
    assert off(engine, folders[1]) < 1e-4


def test_an_engine_without_a_writer_says_so():
    engine = ScriptedEngine()
    assert not engine.info.can_write
    with pytest.raises(RuntimeError, match=r"write_weights to version 1: scripted on cpu .*can_write is False"):
        run(engine.write_weights(WeightWrite(policy_version=1, digest="", message=b"")))
    run(engine.close())


def test_writes_keep_their_place_among_requests_and_wait_for_wake():
    engine = ScriptedEngine(writer=lambda parameters, message: lambda: f"{len(parameters)}{message.decode()}")

    async def scenario() -> None:
        write = WeightWrite(policy_version=5, digest="0x", message=b"x")
        found = await asyncio.gather(engine.generate(request("a")), engine.write_weights(write))
        assert found[0].max_policy_version == 0
        assert (await engine.generate(request("b"))).min_policy_version == 5
        await engine.sleep()
        with pytest.raises(RuntimeError, match="write_weights: the engine sleeps; wake it first"):
            await engine.write_weights(write)
        await engine.wake()
        await engine.close()

    run(scenario())
    assert engine.events == ["add a", "write", "add b", "sleep 1", "wake", "close"]
