"""The engine's thread: order, failures, deadlines. With an engine that has no model."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch
from drivetrain_rollout import (
    EngineConfig,
    GenerateRequest,
    RequestError,
    SamplingParams,
    WeightsRefused,
    WeightUpdate,
)
from drivetrain_rollout._threaded import ThreadedEngine
from drivetrain_rollout.testing import CONTRACT, ScriptedEngine, Subject, check_close, sha256_digest

DEADLINE = 20.0
SHAPES = {"a": (4, 2), "b": (3,), "c": ()}


def tensors(value: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]


def update(version: int, value: float = 0.0) -> WeightUpdate:
    return WeightUpdate(policy_version=version, digest=sha256_digest(tensors(value)), tensors=tensors(value))


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2))


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


@pytest.fixture
def subject() -> Iterator[Subject]:
    engine = ScriptedEngine(shapes=SHAPES, digest=sha256_digest, tokens_per_step=1, step_seconds=0.0003)
    yield Subject(engine=engine, weights=tensors(), other_weights=tensors(1.0), digest=sha256_digest)
    run(engine.close())


@pytest.mark.parametrize("check", [*CONTRACT, check_close], ids=lambda check: check.__name__)
def test_contract(check: Callable[[Subject], Awaitable[None]], subject: Subject):
    run(check(subject))


class Gate:
    """A response that waits until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, _request: GenerateRequest) -> list[int]:
        self.entered.set()
        assert self.open.wait(DEADLINE), "the test never opened the gate"
        return [3, 4]


def test_an_update_waits_for_what_runs_and_holds_back_what_comes_later():
    gate = Gate()
    engine = ScriptedEngine(respond=gate, shapes=SHAPES, digest=sha256_digest)

    async def scenario():
        first = asyncio.ensure_future(engine.generate(request("first")))
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        jobs = [
            asyncio.ensure_future(job)
            for job in (
                engine.generate(request("second")),
                engine.update_weights(update(7)),
                engine.generate(request("third")),
                engine.sleep(1),
                engine.wake(),
                engine.generate(request("fourth")),
            )
        ]
        await asyncio.sleep(0)
        assert engine.weights.policy_version == 0
        gate.open.set()
        found = await asyncio.gather(first, *jobs)
        await engine.close()
        return [found[0], found[1], found[3], found[6]]

    completions = run(scenario())
    assert engine.events == [
        "add first", "add second", "load 3", "add third", "sleep 1", "wake", "add fourth", "close",
    ]  # fmt: skip
    assert [(c.min_policy_version, c.max_policy_version) for c in completions] == [(0, 0), (0, 0), (7, 7), (7, 7)]


def test_a_crash_fails_everything_that_waits_and_everything_later_with_its_cause():
    gate = Gate()

    def crash(request: GenerateRequest) -> list[int]:
        gate(request)
        raise MemoryError("out of pages")

    engine = ScriptedEngine(respond=crash, shapes=SHAPES)

    async def scenario():
        jobs = [asyncio.ensure_future(engine.generate(request("running")))]
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        jobs += [
            asyncio.ensure_future(job)
            for job in (engine.generate(request("waiting")), engine.update_weights(update(1)), engine.health())
        ]
        await asyncio.sleep(0)
        gate.open.set()
        before = await asyncio.gather(*jobs, return_exceptions=True)
        after = await asyncio.gather(
            engine.generate(request("later")), engine.update_weights(update(1)), return_exceptions=True
        )
        await engine.close()
        return before + after

    errors = run(scenario())
    assert all("the engine failed: MemoryError('out of pages')" in str(error) for error in errors)
    assert all(isinstance(error.__cause__, MemoryError) for error in errors)
    requests = [error for error in errors if isinstance(error, RequestError)]
    assert [(error.request_id, error.reason) for error in requests] == [
        ("running", "engine_failed"), ("waiting", "engine_failed"), ("later", "engine_failed"),
    ]  # fmt: skip


def test_closing_fails_what_still_runs():
    gate = Gate()
    engine = ScriptedEngine(respond=gate)

    async def scenario():
        jobs = [asyncio.ensure_future(engine.generate(request(name))) for name in "ab"]
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        gate.open.set()
        await closing
        return await asyncio.gather(*jobs, return_exceptions=True)

    served, refused = run(scenario())
    assert served.response_token_ids == (3, 4)
    assert (refused.request_id, refused.reason) == ("b", "engine_closed")


def test_a_request_the_backend_refuses_fails_alone(subject: Subject):
    engine = subject.engine
    add = engine._loop._backend.add

    def picky(key: int, wanted: GenerateRequest) -> None:
        if wanted.request_id == "bad":
            raise ValueError("no such thing")
        add(key, wanted)

    engine._loop._backend.add = picky

    async def scenario():
        jobs = [engine.generate(request(name)) for name in ("good", "bad", "fine")]
        return await asyncio.gather(*jobs, return_exceptions=True)

    good, bad, fine = run(scenario())
    assert (bad.request_id, bad.reason, bad.message) == ("bad", "engine_refused", "no such thing")
    assert [good.request_id, fine.request_id] == ["good", "fine"]


def test_a_load_that_breaks_off_serves_nothing_until_a_whole_update(subject: Subject):
    engine = subject.engine
    load = engine._loop._backend.load

    def broken(_tensors: object) -> None:
        raise OSError("half-way")

    async def scenario():
        engine._loop._backend.load = broken
        [error] = await asyncio.gather(engine.update_weights(update(1, 1.0)), return_exceptions=True)
        assert isinstance(error, WeightsRefused)
        assert "half-way" in str(error)
        assert (engine.weights.policy_version, engine.weights.status) == (0, "refused")
        [refused] = await asyncio.gather(engine.generate(request("a")), return_exceptions=True)
        assert (refused.request_id, refused.reason) == ("a", "stale_weights")
        engine._loop._backend.load = load
        await engine.update_weights(update(2, 1.0))
        return await engine.generate(request("b"))

    assert run(scenario()).min_policy_version == 2


def test_tensors_that_cannot_be_read_change_nothing(subject: Subject):
    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(1.0)[:1]
        raise ConnectionError("the learner went away")

    with pytest.raises(ConnectionError, match="the learner went away"):
        run(subject.engine.update_weights(WeightUpdate(policy_version=1, digest="", tensors=torn())))
    assert (subject.engine.weights.policy_version, subject.engine.weights.status) == (0, "ready")
    assert run(subject.engine.generate(request("a"))).min_policy_version == 0


def test_a_cancelled_request_leaves_the_backend():
    gate = Gate()
    engine = ScriptedEngine(respond=gate)

    async def scenario():
        first = asyncio.ensure_future(engine.generate(request("first")))
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        second = asyncio.ensure_future(engine.generate(request("second")))
        gate.entered.clear()
        gate.open.set()
        await first
        await asyncio.gather(second, return_exceptions=True)
        gate.open.clear()
        third, fourth = (asyncio.ensure_future(engine.generate(request(name))) for name in ("third", "fourth"))
        gate.entered.clear()
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        fourth.cancel()
        await asyncio.gather(fourth, return_exceptions=True)
        gate.open.set()
        await third
        await engine.close()

    run(scenario())
    assert engine.events == ["add first", "add second", "add third", "add fourth", "abort fourth", "close"]


def test_an_engine_that_stands_still_is_reported_with_what_was_waited_for():
    gate = Gate()
    engine = ScriptedEngine(respond=gate, stall_timeout=0.2)

    async def scenario():
        stuck = asyncio.ensure_future(engine.generate(request("a")))
        await asyncio.to_thread(gate.entered.wait, DEADLINE)
        errors = await asyncio.gather(stuck, engine.health(), return_exceptions=True)
        gate.open.set()
        await engine.close()
        return errors

    stuck, silent = run(scenario())
    assert (stuck.request_id, stuck.reason) == ("a", "engine_failed")
    assert "request 'a': scripted has not moved for" in str(stuck)
    assert isinstance(silent, TimeoutError)
    assert str(silent).startswith("health: scripted has not moved")


def test_slow_but_moving_is_not_standing_still():
    moving = threading.Event()
    engine = ScriptedEngine(respond=lambda _: [1] if not moving.wait(0.25) else [2], stall_timeout=1.5)

    async def scenario():
        completions = await asyncio.gather(*(engine.generate(request(str(i))) for i in range(8)))
        await engine.close()
        return completions

    assert [c.response_token_ids for c in run(scenario())] == [(1,)] * 8


def test_what_building_the_model_raises_reaches_the_constructor():
    def build():
        raise ValueError("no such model: use another")

    with pytest.raises(ValueError, match="no such model: use another"):
        ThreadedEngine(build, EngineConfig(engine="e", model="m"), digest=None)


def test_a_model_that_does_not_come_up_is_a_timeout_that_names_it():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"slow has not loaded big within 0 s \(start_timeout\)"):
        ThreadedEngine(
            lambda: release.wait(DEADLINE), EngineConfig(engine="slow", model="big", start_timeout=0.1), digest=None
        )
    release.set()


def test_two_event_loops_share_an_engine(subject: Subject):
    found: list[object] = []

    def other_loop() -> None:
        found.append(run(subject.engine.generate(request("other"))))

    async def scenario():
        thread = threading.Thread(target=other_loop)
        thread.start()
        found.append(await subject.engine.generate(request("this")))
        await asyncio.to_thread(thread.join, DEADLINE)

    run(scenario())
    assert {completion.request_id for completion in found} == {"this", "other"}


def test_requests_sent_together_start_together():
    gate = Gate()
    gate.open.set()
    engine = ScriptedEngine(respond=gate)
    started: list[int] = []
    step = engine._loop._backend.step

    def counting():
        started.append(len(engine._loop._backend._added))
        return step()

    engine._loop._backend.step = counting

    async def scenario():
        await asyncio.gather(*(engine.generate(request(str(i))) for i in range(64)))
        await engine.close()

    run(scenario())
    assert started[0] == 64


class Steps:
    """Lets a scripted engine, which gives a token in a step, make only the steps that it is given."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._given = threading.Semaphore(0)
        self._asked = threading.Semaphore(0)
        backend = engine._loop._backend
        step = backend.step

        def given():
            self._asked.release()
            assert self._given.acquire(timeout=DEADLINE), "the test gave no more steps"
            return step()

        backend.step = given

    async def give(self, steps: int) -> None:
        self._given.release(steps)
        for _ in range(steps):
            assert await asyncio.to_thread(self._asked.acquire, timeout=DEADLINE)

    async def when_asked(self, job: Awaitable, *, last: int = 1) -> object:
        """Await a job that reaches the engine while it is in a step, then let that step, and ``last`` in all, end."""
        task = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        self._given.release(last)
        return await task


async def caught_after_three(engine: ScriptedEngine, mode: str) -> tuple[Steps, asyncio.Task, asyncio.Task]:
    """One request that has 3 of its 6 tokens and one that has none, when the engine is told to pause."""
    steps = Steps(engine)
    wanted = [
        GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=6))
        for name in ("first", "second")
    ]
    tasks = [asyncio.ensure_future(engine.generate(each)) for each in wanted]
    assert await asyncio.to_thread(steps._asked.acquire, timeout=DEADLINE)
    await steps.give(2)
    await steps.when_asked(engine.pause(mode), last=1 if mode != "wait" else 10)
    return steps, *tasks


def one_token_a_step() -> ScriptedEngine:
    return ScriptedEngine(
        respond=lambda request: [10 + i for i in range(6)], shapes=SHAPES, digest=sha256_digest, tokens_per_step=1
    )


def test_what_a_pause_keeps_goes_on_with_the_new_weights_and_says_which_token_is_whose():
    engine = one_token_a_step()

    async def scenario():
        steps, *tasks = await caught_after_three(engine, "keep")
        held = (await engine.metrics(), [task.done() for task in tasks])
        await engine.update_weights(update(7))
        await engine.update_weights(update(8))
        await engine.resume()
        steps._given.release(9)
        found = await asyncio.gather(*tasks)
        await engine.close()
        return held, found

    (metrics, done), (first, second) = run(scenario())
    assert (metrics.running, metrics.waiting, done) == (1, 1, [False, False])
    assert first.response_token_ids == second.response_token_ids == (10, 11, 12, 13, 14, 15)
    assert [(span.policy_version, span.tokens) for span in first.version_spans] == [(0, 3), (8, 3)]
    assert [(span.policy_version, span.tokens) for span in second.version_spans] == [(8, 6)]


def test_what_a_pause_aborts_ends_with_what_it_has_and_can_be_continued():
    engine = one_token_a_step()

    async def scenario():
        steps, *tasks = await caught_after_three(engine, "abort")
        first, second = await asyncio.gather(*tasks)
        await engine.update_weights(update(7))
        await engine.resume()
        steps._given.release(3)
        again = GenerateRequest(
            request_id="again", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=6), continued=first
        )
        whole = await engine.generate(again)
        await engine.close()
        return first, second, whole

    first, second, whole = run(scenario())
    assert [(c.response_token_ids, c.finish_reason) for c in (first, second)] == [
        ((10, 11, 12), "abort"),
        ((), "abort"),
    ]
    assert (whole.response_token_ids, whole.finish_reason) == ((10, 11, 12, 13, 14, 15), "length")
    assert [(span.policy_version, span.tokens) for span in whole.version_spans] == [(0, 3), (7, 3)]


def test_a_pause_that_waits_returns_when_what_was_begun_has_ended():
    engine = one_token_a_step()

    async def scenario():
        steps, *tasks = await caught_after_three(engine, "wait")
        done = [task.done() for task in tasks]
        late = asyncio.ensure_future(engine.generate(request("late")))
        await engine.update_weights(update(7))
        waiting = (await engine.metrics()).waiting
        await engine.resume()
        steps._given.release(6)
        found = [*(await asyncio.gather(*tasks)), await late]
        await engine.close()
        return done, waiting, found

    done, waiting, (first, second, late) = run(scenario())
    assert (done, waiting) == ([True, True], 1)
    assert {first.max_policy_version, second.max_policy_version} == {0}
    assert late.version_spans[0].policy_version == 7


def test_what_is_kept_fails_by_name_when_the_weights_that_came_are_broken():
    engine = one_token_a_step()

    async def scenario():
        _, *tasks = await caught_after_three(engine, "keep")

        def broken(_tensors: object) -> None:
            raise OSError("half-way")

        engine._loop._backend.load = broken
        [refused] = await asyncio.gather(engine.update_weights(update(7)), return_exceptions=True)
        await engine.resume()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
        return refused, found

    refused, (first, second) = run(scenario())
    assert isinstance(refused, WeightsRefused)
    assert [error.reason for error in (first, second)] == ["stale_weights", "stale_weights"]
    assert (first.partial.response_token_ids, second.partial.response_token_ids) == ((10, 11, 12), ())
    assert [(span.policy_version, span.tokens) for span in first.partial.version_spans] == [(0, 3)]
