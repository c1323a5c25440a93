"""An engine behind the transport: the contract again, and what happens when either side goes away."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from drivetrain_rollout import (
    EngineConfig,
    GenerateRequest,
    RequestError,
    RolloutEngine,
    SamplingParams,
    WeightUpdate,
)
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine, serve
from drivetrain_rollout.remote import _engine as remote_engine
from drivetrain_rollout.testing import CONTRACT, ScriptedEngine, Subject, check_close, sha256_digest
from drivetrain_transport import Endpoint, Peer, PeerLost
from programs import environment

DEADLINE = 30.0
SHAPES = {"a": (4, 2), "b": (3,), "c": ()}
CONFIG = EngineConfig(engine="scripted", model="none")


def tensors(value: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2))


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


@contextmanager
def worker(
    endpoint: Endpoint, factory: Callable[[EngineConfig], RolloutEngine]
) -> Iterator[tuple[Peer, threading.Thread]]:
    """A worker in a thread, joined to the endpoint."""
    thread = threading.Thread(target=serve, args=(endpoint.address,), kwargs={"factory": factory, "name": "w0"})
    thread.start()
    try:
        yield endpoint.wait_for_peer(DEADLINE), thread
    finally:
        endpoint.close()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the worker did not end with its controller"


@pytest.fixture
def subject() -> Iterator[Subject]:
    def factory(_config: EngineConfig) -> RolloutEngine:
        return ScriptedEngine(shapes=SHAPES, digest=sha256_digest, tokens_per_step=1, step_seconds=0.0003)

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        engine = RemoteEngine(peer, CONFIG)
        yield Subject(engine=engine, weights=tensors(), other_weights=tensors(1.0), digest=sha256_digest)


@pytest.mark.parametrize("check", [*CONTRACT, check_close], ids=lambda check: check.__name__)
def test_contract(check: Callable[[Subject], Awaitable[None]], subject: Subject):
    run(check(subject))


def test_the_worker_makes_the_engine_it_is_told_to_and_may_make_another():
    configs: list[EngineConfig] = []

    def factory(config: EngineConfig) -> RolloutEngine:
        configs.append(config)
        return ScriptedEngine(vocab_size=config.max_num_seqs)

    wanted = [
        EngineConfig(engine="scripted", model=model, max_num_seqs=size, engine_args={"deep": [1, {"er": True}]})
        for model, size in (("one", 16), ("two", 32))
    ]
    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        for config in wanted:
            engine = RemoteEngine(peer, config)
            assert engine.info.vocab_size == config.max_num_seqs
            with pytest.raises(RuntimeError, match="an engine was started here already; close it first"):
                RemoteEngine(peer, config)
            run(engine.close())
    assert configs == wanted


def test_what_the_factory_raises_reaches_the_controller_and_it_may_try_again():
    attempts: list[EngineConfig] = []

    def factory(config: EngineConfig) -> RolloutEngine:
        attempts.append(config)
        if len(attempts) == 1:
            raise ValueError("no such model: use another")
        return ScriptedEngine()

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        with pytest.raises(ValueError, match="start on worker w0: no such model: use another"):
            RemoteEngine(peer, CONFIG)
        assert len(run(RemoteEngine(peer, CONFIG).generate(request("a"))).response_token_ids) == 2


def test_weights_travel_in_buckets_and_are_served_only_after_the_commit(monkeypatch):
    monkeypatch.setattr(remote_engine, "BUCKET_BYTES", 4 * 9)
    engines: list[ScriptedEngine] = []
    sent: list[tuple[str, int]] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine(shapes=SHAPES | {"d": (5, 5)}, digest=sha256_digest))
        return engines[0]

    weights = [("a", torch.ones(4, 2)), ("c", torch.tensor(2.0)), ("b", torch.ones(3)), ("d", torch.ones(5, 5))]

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            sent.append((name, engine.weights.policy_version))
            yield name, tensor

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        engine = RemoteEngine(peer, CONFIG)
        buckets = list(remote_engine._buckets(weights))
        update = WeightUpdate(policy_version=3, digest=sha256_digest(weights), tensors=watched())
        state = run(engine.update_weights(update))
    assert [names for names, _ in buckets] == [("a", "c"), ("b",), ("d",)]
    assert sent == [("a", 0), ("c", 0), ("b", 0), ("d", 0)]
    assert (state.policy_version, state.digest, engines[0].weights) == (3, update.digest, state)
    assert engines[0].events == ["load 4", "close"]


def test_an_update_that_breaks_off_while_it_is_sent_leaves_nothing_behind(subject: Subject):
    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(1.0)[:2]
        raise OSError("the learner went away")

    with pytest.raises(OSError, match="the learner went away"):
        run(subject.engine.update_weights(WeightUpdate(policy_version=1, digest="", tensors=torn())))
    assert subject.engine.weights.policy_version == 0
    whole = WeightUpdate(policy_version=2, digest=sha256_digest(tensors(1.0)), tensors=tensors(1.0))
    assert run(subject.engine.update_weights(whole)).policy_version == 2


def test_hundreds_of_requests_are_in_flight_at_once():
    gate = threading.Event()

    def respond(_request: GenerateRequest) -> list[int]:
        assert gate.wait(DEADLINE)
        return [1, 2]

    engines: list[ScriptedEngine] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine(respond=respond))
        return engines[0]

    async def scenario(engine: RemoteEngine):
        jobs = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(300)]
        while len(engines[0].events) + engines[0]._loop._inbox.qsize() < 300:
            await asyncio.sleep(0.01)
        gate.set()
        return await asyncio.gather(*jobs)

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        completions = run(scenario(RemoteEngine(peer, CONFIG)))
    assert [completion.request_id for completion in completions] == [str(i) for i in range(300)]


def test_a_response_does_not_wait_for_the_others_it_was_asked_for_with():
    gate = threading.Event()

    def respond(wanted: GenerateRequest) -> list[int]:
        assert wanted.request_id == "fast" or gate.wait(DEADLINE)
        return [1, 2]

    async def scenario(engine: RemoteEngine):
        fast, slow = (asyncio.ensure_future(engine.generate(request(name))) for name in ("fast", "slow"))
        first = (await fast).request_id
        assert not slow.done()
        gate.set()
        return first, (await slow).request_id

    with (
        Endpoint.bind(protocol=PROTOCOL) as endpoint,
        worker(endpoint, lambda _: ScriptedEngine(respond=respond)) as (
            peer,
            _,
        ),
    ):
        assert run(scenario(RemoteEngine(peer, CONFIG))) == ("fast", "slow")


def test_a_message_that_cannot_be_sent_fails_its_requests_alone():
    with (
        Endpoint.bind(protocol=PROTOCOL, max_message_bytes=100_000) as endpoint,
        worker(endpoint, lambda _: ScriptedEngine()) as (peer, _),
    ):
        engine = RemoteEngine(peer, CONFIG)
        with pytest.raises(RequestError, match="100000") as caught:
            run(engine.generate(request("x" * 200_000)))
        assert caught.value.reason == "engine_failed"
        assert len(run(engine.generate(request("a"))).response_token_ids) == 2


def test_calls_keep_the_order_they_were_made_in():
    engines: list[ScriptedEngine] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine())
        return engines[0]

    async def scenario(engine: RemoteEngine):
        first = asyncio.ensure_future(engine.generate(request("first")))
        await asyncio.sleep(0)
        await engine.sleep(1)
        await asyncio.gather(first, engine.wake(), engine.generate(request("second")))

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        run(scenario(RemoteEngine(peer, CONFIG)))
    assert engines[0].events == ["add first", "sleep 1", "wake", "add second", "close"]


def test_an_event_loop_that_ends_gives_up_its_requests_at_the_worker():
    entered, gate = threading.Event(), threading.Event()
    engines: list[ScriptedEngine] = []

    def respond(_request: GenerateRequest) -> list[int]:
        entered.set()
        assert gate.wait(DEADLINE)
        return [1]

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine(respond=respond))
        return engines[0]

    async def leave_behind(engine: RemoteEngine):
        left = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(3)]
        await asyncio.to_thread(entered.wait, DEADLINE)
        return len(left)

    async def inbox_holds(count: int) -> None:
        while engines[0]._loop._inbox.qsize() < count:
            await asyncio.sleep(0.005)

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        engine = RemoteEngine(peer, CONFIG)
        assert run(leave_behind(engine)) == 3
        run(inbox_holds(3))
        gate.set()
        run(engine.health())
    assert engines[0].events == ["add 0", "add 1", "add 2", "abort 1", "abort 2", "close"]


def test_a_cancelled_request_is_cancelled_at_the_worker():
    entered, gate = threading.Event(), threading.Event()

    def respond(_request: GenerateRequest) -> list[int]:
        entered.set()
        assert gate.wait(DEADLINE)
        return [1]

    engines: list[ScriptedEngine] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine(respond=respond))
        return engines[0]

    async def inbox_holds(count: int) -> None:
        while engines[0]._loop._inbox.qsize() < count:
            await asyncio.sleep(0.005)

    async def scenario(engine: RemoteEngine):
        first = asyncio.ensure_future(engine.generate(request("first")))
        await asyncio.to_thread(entered.wait, DEADLINE)
        second = asyncio.ensure_future(engine.generate(request("second")))
        await inbox_holds(1)
        second.cancel()
        await inbox_holds(2)
        gate.set()
        await first
        await engine.health()

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, _):
        run(scenario(RemoteEngine(peer, CONFIG)))
    assert engines[0].events == ["add first", "close"]


def test_a_controller_that_leaves_ends_the_worker_and_closes_its_engine():
    engines: list[ScriptedEngine] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        engines.append(ScriptedEngine())
        return engines[0]

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, thread):
        RemoteEngine(peer, CONFIG)
        endpoint.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert engines[0].events == ["close"]


def test_a_controller_that_leaves_while_the_engine_is_made_leaves_no_engine():
    making, go_on = threading.Event(), threading.Event()
    engines: list[ScriptedEngine] = []

    def factory(_config: EngineConfig) -> RolloutEngine:
        making.set()
        assert go_on.wait(DEADLINE)
        engines.append(ScriptedEngine())
        return engines[0]

    errors: list[BaseException] = []

    def start(peer: Peer) -> None:
        try:
            RemoteEngine(peer, CONFIG)
        except RuntimeError as error:
            errors.append(error)

    with Endpoint.bind(protocol=PROTOCOL) as endpoint, worker(endpoint, factory) as (peer, thread):
        starting = threading.Thread(target=start, args=(peer,))
        starting.start()
        assert making.wait(DEADLINE)
        endpoint.close()
        starting.join(DEADLINE)
        go_on.set()
        thread.join(DEADLINE)
    assert isinstance(errors[0].__cause__, PeerLost)
    assert engines[0].events == ["close"]


WORKER = """
import sys, time
from drivetrain_rollout.remote import serve
from drivetrain_rollout.testing import ScriptedEngine
serve(sys.argv[1], factory=lambda config: ScriptedEngine(respond=lambda request: time.sleep(60)), name="w1")
"""


def test_a_killed_worker_fails_the_requests_in_flight_and_the_later_ones():
    with Endpoint.bind(protocol=PROTOCOL, liveness=2.0) as endpoint:
        process = subprocess.Popen([sys.executable, "-c", WORKER, endpoint.address])
        try:
            engine = RemoteEngine(endpoint.wait_for_peer(DEADLINE), CONFIG)

            async def scenario():
                jobs = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(3)]
                await asyncio.sleep(0)
                process.send_signal(signal.SIGKILL)
                found = await asyncio.gather(*jobs, return_exceptions=True)
                later = await asyncio.gather(engine.generate(request("later")), engine.health(), return_exceptions=True)
                await engine.close()
                return found, later

            found, later = run(scenario())
        finally:
            process.kill()
            process.wait(DEADLINE)
    assert [(error.request_id, error.reason) for error in found] == [(str(i), "engine_failed") for i in range(3)]
    assert all(isinstance(error.__cause__, PeerLost) for error in [*found, *later])
    assert isinstance(later[0], RequestError)
    assert isinstance(later[1], RuntimeError)
    assert engine.weights.status == "refused"


def paced_worker(endpoint: Endpoint, pace: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("pool_worker.py")), endpoint.address, "w0", pace]
    return subprocess.Popen(command, env=environment())


def long_request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=100, seed=3))


def test_a_response_is_told_over_the_wire_as_it_grows():
    with Endpoint.bind(protocol=PROTOCOL) as endpoint, paced_worker(endpoint, "0.02") as process:
        try:
            engine = RemoteEngine(endpoint.wait_for_peer(DEADLINE), CONFIG)

            async def scenario() -> None:
                chunks = [chunk async for chunk in engine.stream(long_request("r"), every=0.05)]
                assert len(chunks) > 3
                completion = chunks[-1].completion
                assert completion is not None
                tokens = tuple(token for chunk in chunks for token in chunk.response_token_ids)
                assert tokens == completion.response_token_ids
                async for _ in engine.stream(long_request("left"), every=0.02):
                    break
                while (await engine.metrics()).running:
                    await asyncio.sleep(0.01)

            run(scenario())
        finally:
            process.kill()


@pytest.mark.parametrize("progress", [0.02, None])
def test_what_a_killed_worker_had_told_is_known(progress: float | None):
    with Endpoint.bind(protocol=PROTOCOL) as endpoint, paced_worker(endpoint, "0.02") as process:
        try:
            engine = RemoteEngine(endpoint.wait_for_peer(DEADLINE), CONFIG, progress=progress)

            async def scenario() -> RequestError:
                answer = asyncio.ensure_future(engine.generate(long_request("r")))
                while (await engine.metrics()).running == 0:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                process.kill()
                [error] = await asyncio.gather(answer, return_exceptions=True)
                return error

            error = run(scenario())
        finally:
            process.kill()
    assert error.reason == "engine_failed"
    if progress is None:
        assert error.partial is None
        return
    assert error.partial.finish_reason == "abort"
    assert 0 < len(error.partial.response_token_ids) < 100

    async def alone() -> None:
        async with ScriptedEngine() as other:
            whole = await other.generate(long_request("r"))
            continued = msgspec.structs.replace(long_request("r"), continued=error.partial)
            assert (await other.generate(continued)).response_token_ids == whole.response_token_ids

    run(alone())


def test_no_controller_is_an_error_that_names_the_address():
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:9"):
        serve("127.0.0.1:9", factory=lambda _: ScriptedEngine(), name="w0", timeout=0.5)
