"""Many engines as one: who serves a request, and what becomes of it when an engine fails, leaves or gets weights."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch
from drivetrain_rollout import (
    Completion,
    EnginePool,
    GenerateRequest,
    LimitConfig,
    PoolConfig,
    RequestError,
    SamplingParams,
    VersionSpan,
    WeightsRefused,
    WeightUpdate,
)
from drivetrain_rollout.testing import CONTRACT, ScriptedEngine, Subject, check_close, sha256_digest

DEADLINE = 20.0
SHAPES = {"a": (4, 2), "b": (3,)}


def tensors(value: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]


def update(version: int, value: float = 1.0) -> WeightUpdate:
    return WeightUpdate(policy_version=version, digest=sha256_digest(tensors(value)), tensors=iter(tensors(value)))


def scripted(**options) -> ScriptedEngine:
    return ScriptedEngine(shapes=SHAPES, digest=sha256_digest, **options)


def request(name: str, *, tokens: int = 4, group: int | None = None, prompt=(1, 2), **sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=tokens, **sampling),
        group_id=group,
    )


def run(awaitable: Awaitable):
    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await awaitable

    return asyncio.run(bounded())


def added(engine: ScriptedEngine) -> list[str]:
    return [event.removeprefix("add ") for event in engine.events if event.startswith("add ")]


class Slow:
    """An engine that gives a token in a step, and stands still when it has given some, until it is let go."""

    def __init__(self, stand_at: int = 3) -> None:
        self.going = threading.Event()
        self.stands = threading.Event()
        self.steps = 0
        self.stand_at = stand_at
        self.engine = scripted(tokens_per_step=1)
        backend = self.engine._loop._backend  # type: ignore[attr-defined]
        step = backend.step

        def slowly():
            self.steps += 1
            if self.steps > self.stand_at:
                self.stands.set()
                assert self.going.wait(DEADLINE)
            return step()

        backend.step = slowly

    async def stands_still(self) -> None:
        assert await asyncio.to_thread(self.stands.wait, DEADLINE)


@pytest.fixture(params=["wait", "keep", "abort"])
def subject(request) -> Iterator[Subject]:
    paced = {"tokens_per_step": 1, "step_seconds": 0.0003}
    pool = EnginePool([scripted(**paced), scripted(**paced)], PoolConfig(updates=request.param))
    yield Subject(engine=pool, weights=tensors(), other_weights=tensors(1.0), digest=sha256_digest)
    run(pool.close())


@pytest.mark.parametrize("check", [*CONTRACT, check_close], ids=lambda check: check.__name__)
def test_contract(check: Callable[[Subject], Awaitable[None]], subject: Subject):
    if check.__name__ == "check_updates_wait_for_requests" and subject.engine._config.updates != "wait":
        pytest.skip("this pool was told not to wait")
    run(check(subject))


def test_requests_go_to_the_emptiest_engine_and_groups_stay_together():
    async def scenario():
        engines = [scripted(), scripted(), scripted()]
        async with EnginePool(engines) as pool:
            prompts = [(1, group) for group in range(12)]
            wanted = [request(f"{g}-{i}", group=g, prompt=p) for g, p in enumerate(prompts) for i in range(8)]
            found = await asyncio.gather(*map(pool.generate, wanted))
        assert [completion.request_id for completion in found] == [one.request_id for one in wanted]
        served = [added(engine) for engine in engines]
        assert sorted(name for names in served for name in names) == sorted(one.request_id for one in wanted)
        homes = [{name.split("-")[0] for name in names} for names in served]
        assert sum(map(len, homes)) == 12  # each group has one home
        assert [len(names) for names in served] == [32, 32, 32]

    run(scenario())


def test_a_prompt_goes_where_its_beginning_was_unless_that_engine_is_fuller():
    async def scenario():
        engines = [scripted(), scripted()]
        async with EnginePool(engines) as pool:
            for i in range(3):
                await pool.generate(request(f"a{i}", prompt=(1,)))
                await pool.generate(request(f"b{i}", prompt=(2,)))
            homes = [{name[0] for name in added(engine)} for engine in engines]
            assert sorted(map(len, homes)) == [0, 2]  # an idle pool has no reason to move either
            await asyncio.gather(*(pool.generate(request(f"c{i}", prompt=(1,))) for i in range(64)))
            assert min(len(added(engine)) for engine in engines) >= 20

    run(scenario())


def test_a_beginning_that_all_prompts_share_does_not_crowd_one_engine():
    async def scenario():
        engines = [scripted(), scripted()]
        async with EnginePool(engines) as pool:
            shared = tuple(range(40)) * 2
            wanted = [request(str(i), prompt=(*shared, i % 64), group=i) for i in range(200)]
            await asyncio.gather(*map(pool.generate, wanted))
        served = [len(added(engine)) for engine in engines]
        assert max(served) <= 110, served

    run(scenario())


def test_more_than_the_limit_wait_in_order():
    async def scenario():
        slow = Slow(stand_at=0)
        config = PoolConfig(limit=LimitConfig(first=2, least=1, most=2))
        async with EnginePool([slow.engine], config) as pool:
            tasks = [asyncio.ensure_future(pool.generate(request(str(i), tokens=1))) for i in range(6)]
            await slow.stands_still()
            assert added(slow.engine) == ["0", "1"]
            assert pool.members[0].running == 2
            assert pool._members.waiting == 4
            tasks[3].cancel()
            slow.going.set()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[3], asyncio.CancelledError)
        assert added(slow.engine) == ["0", "1", "2", "4", "5"]

    run(scenario())


def test_a_response_goes_on_elsewhere_behind_what_a_failed_engine_had_sampled():
    async def scenario():
        slow, other = Slow(stand_at=3), scripted()
        pool = EnginePool({"slow": slow.engine, "other": other})
        answer = asyncio.ensure_future(pool.generate(request("r", tokens=9, seed=7)))
        await slow.stands_still()
        closing = asyncio.ensure_future(slow.engine.close())
        await asyncio.sleep(0)  # it has told the engine's thread
        slow.going.set()
        completion = await answer
        await closing
        alone = await other.generate(request("alone", tokens=9, seed=7))
        assert completion.response_token_ids == alone.response_token_ids
        assert completion.timings.attempts == 2
        [moved] = [event for event in other.events if event == "add r"]
        assert moved
        states = {member.name: member.state for member in pool.members}
        assert states == {"slow": "failed", "other": "serving"}
        await pool.close()

    run(scenario())


def test_the_last_attempts_failure_is_the_callers_with_what_was_sampled():
    def raise_(_):
        raise OSError("broken")

    async def scenario():
        pool = EnginePool([scripted(respond=raise_) for _ in range(5)], PoolConfig(attempts=2))
        with pytest.raises(RequestError, match="broken") as raised:
            await pool.generate(request("r"))
        assert raised.value.reason == "engine_failed"
        assert [member.state for member in pool.members].count("failed") == 2
        assert (await pool.metrics()).failed == {"engine_failed": 1}
        await asyncio.gather(pool.close(), return_exceptions=True)

    run(scenario())


def test_no_engine_is_an_error_after_a_while():
    async def scenario():
        engine = scripted()
        pool = EnginePool([engine], PoolConfig(no_engine_timeout=0.3, look_every=0.05, attempts=9))
        await engine.close()
        with pytest.raises(RequestError, match="engine-0 is failed") as raised:
            await pool.generate(request("r"))
        assert raised.value.reason == "no_engine"
        await pool.close()
        with pytest.raises(RequestError, match="closed"):
            await pool.generate(request("r"))

    run(scenario())


def test_a_deadline_gives_back_what_was_sampled():
    async def scenario():
        slow = Slow(stand_at=50)
        slow.engine._loop._backend._tokens_per_step = 1  # type: ignore[attr-defined]
        pool = EnginePool([slow.engine], PoolConfig(deadline=0.5))
        step = slow.engine._loop._backend.step  # type: ignore[attr-defined]
        tick = threading.Event()

        def paced():
            tick.wait(0.03)
            return step()

        slow.engine._loop._backend.step = paced  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match=r"within 0.5 s") as raised:
            await pool.generate(request("r", tokens=120, seed=3))
        partial = raised.value.partial
        assert raised.value.reason == "deadline"
        assert partial is not None
        assert 0 < len(partial.response_token_ids) < 120
        slow.going.set()
        whole = await scripted().generate(request("r", tokens=120, seed=3))
        assert whole.response_token_ids[: len(partial.response_token_ids)] == partial.response_token_ids
        await pool.close()

    run(scenario())


def test_an_engine_that_missed_an_update_is_stale_until_it_holds_one():
    async def scenario():
        one, two = scripted(), scripted()
        two._loop.changes._digest = lambda _: "wrong"  # type: ignore[attr-defined]
        pool = EnginePool({"one": one, "two": two})
        state = await pool.update_weights(update(1))
        assert (state.policy_version, pool.weights) == (1, state)
        assert {m.name: m.state for m in pool.members} == {"one": "serving", "two": "stale"}
        assert "wrong" in (pool.members[1].error or "")
        before = len(added(two))
        found = await asyncio.gather(*(pool.generate(request(str(i))) for i in range(10)))
        assert {completion.min_policy_version for completion in found} == {1}
        assert len(added(two)) == before
        two._loop.changes._digest = sha256_digest  # type: ignore[attr-defined]
        await pool.update_weights(update(2, 2.0))
        assert {m.state for m in pool.members} == {"serving"}
        await pool.close()

    run(scenario())


def test_an_update_that_too_few_engines_take_is_an_error():
    async def scenario():
        one, two = scripted(), scripted()
        two._loop.changes._digest = lambda _: "wrong"  # type: ignore[attr-defined]
        async with EnginePool([one, two], PoolConfig(min_updated=2)) as pool:
            with pytest.raises(WeightsRefused, match="1 of 2 engines took the update"):
                await pool.update_weights(update(1))
            assert [m.state for m in pool.members] == ["serving", "stale"]
        async with EnginePool([scripted(), scripted()]) as pool:
            bad = WeightUpdate(policy_version=1, digest="0" * 64, tensors=tensors())
            with pytest.raises(WeightsRefused, match="0 of 2"):
                await pool.update_weights(bad)
            assert (pool.weights.policy_version, [m.state for m in pool.members]) == (0, ["serving"] * 2)

    run(scenario())


def test_an_engine_that_joins_is_brought_to_the_pools_weights():
    async def scenario():
        async def refresh(engine) -> None:
            await engine.update_weights(update(1))

        late, later = scripted(), scripted()
        pool = EnginePool({"first": scripted()}, refresh=refresh)
        await pool.update_weights(update(1))
        await pool.add("late", late)
        assert (late.weights, pool.members[1].state) == (pool.weights, "serving")
        with pytest.raises(ValueError, match="'late' already"):
            await pool.add("late", scripted())
        with pytest.raises(ValueError, match="64"):
            await pool.add("other", scripted(vocab_size=9))
        pool._refresh = None
        await pool.add("later", later)
        assert pool.members[2].state == "stale"
        assert "version" in (pool.members[2].error or "")
        await pool.close()

    run(scenario())


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_leaves(drain: bool):
    async def scenario():
        slow, other = Slow(stand_at=2), scripted(tokens_per_step=1)
        pool = EnginePool({"slow": slow.engine, "other": other})
        answer = asyncio.ensure_future(pool.generate(request("r", tokens=6, seed=1)))
        await slow.stands_still()
        leaving = asyncio.ensure_future(pool.remove("slow", drain=drain))
        await asyncio.sleep(0.05)
        slow.going.set()
        completion = await answer
        assert await leaving is slow.engine
        assert len(completion.response_token_ids) == 6
        assert ("add r" in other.events) == (not drain)
        assert [member.name for member in pool.members] == ["other"]
        with pytest.raises(ValueError, match="no engine 'slow'"):
            await pool.remove("slow")
        await asyncio.gather(pool.close(), slow.engine.close())

    run(scenario())


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_responses_go_on_under_new_weights(mode):
    async def scenario() -> Completion:
        slow = Slow(stand_at=3)
        async with EnginePool([slow.engine], PoolConfig(updates=mode)) as pool:
            answer = asyncio.ensure_future(pool.generate(request("r", tokens=9, seed=4)))
            await slow.stands_still()
            pushed = asyncio.ensure_future(pool.update_weights(update(5)))
            await asyncio.sleep(0.05)
            slow.going.set()
            await pushed
            return await answer

    completion = run(scenario())
    first, second = completion.version_spans
    assert (first.policy_version, second.policy_version) == (0, 5)
    assert first.tokens >= 3
    assert first.tokens + second.tokens == 9
    assert completion.finish_reason == "length"


def test_a_pause_that_aborts_gives_the_callers_what_there_is():
    async def scenario():
        slow = Slow(stand_at=3)
        async with EnginePool([slow.engine]) as pool:
            answer = asyncio.ensure_future(pool.generate(request("r", tokens=9)))
            await slow.stands_still()
            pausing = asyncio.ensure_future(pool.pause("abort"))
            await asyncio.sleep(0.05)
            slow.going.set()
            await pausing
            completion = await answer
            assert completion.finish_reason == "abort"
            assert 3 <= len(completion.response_token_ids) < 9
            await pool.resume()
            whole = await pool.generate(
                GenerateRequest(
                    request_id="r",
                    prompt_token_ids=(1, 2),
                    sampling=SamplingParams(max_tokens=9),
                    continued=completion,
                )
            )
            assert whole.response_token_ids[: len(completion.response_token_ids)] == completion.response_token_ids
            assert whole.version_spans == (VersionSpan(0, 9),)

    run(scenario())


def test_pools_are_made_of_engines_that_are_alike():
    with pytest.raises(ValueError, match="at least one"):
        EnginePool([])
    one, other = scripted(), scripted(vocab_size=9)
    with pytest.raises(ValueError, match="9 ids"):
        EnginePool([one, other])
    for bad in ({"attempts": 0}, {"deadline": -1.0}, {"updates": "now"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PoolConfig(**bad)

    async def scenario():
        ahead = scripted()
        await ahead.update_weights(update(3))
        with pytest.raises(ValueError, match="start them alike"):
            EnginePool([one, ahead])
        await asyncio.gather(one.close(), other.close(), ahead.close())

    run(scenario())


def test_a_pool_of_pools_streams():
    async def scenario():
        async with EnginePool([EnginePool([scripted(tokens_per_step=2)])]) as pool:
            chunks = [chunk async for chunk in pool.stream(request("r", tokens=9, seed=2), every=0.0)]
            tokens = [token for chunk in chunks for token in chunk.response_token_ids]
            assert chunks[-1].completion is not None
            assert tuple(tokens) == chunks[-1].completion.response_token_ids

    run(scenario())
