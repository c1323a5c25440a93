"""The contract, one coroutine function a promise. Each leaves the engine as it was."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain_rollout.engine import DigestFunction, RequestError, RolloutEngine, WeightsRefused, WeightUpdate
from drivetrain_rollout.types import Completion, GenerateRequest, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

DEADLINE = 60.0
"""Seconds that each wait in a check may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test."""

    engine: RolloutEngine
    weights: Sequence[tuple[str, Tensor]]
    """What it was started with."""
    other_weights: Sequence[tuple[str, Tensor]]
    """Of the same model, with other values."""
    digest: DigestFunction
    """The one that the engine was made with."""


_names = itertools.count()


def _request(
    prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int = 8, temperature: float = 1.0, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"check-{next(_names)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling),
    )


async def _all(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(DEADLINE):
        return await asyncio.gather(*awaitables, return_exceptions=True)


async def _greedy(subject: Subject) -> Completion:
    return await asyncio.wait_for(subject.engine.generate(_request(temperature=0.0)), DEADLINE)


async def _push(subject: Subject, tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Update to the next version; returns it."""
    version = subject.engine.weights.policy_version + 1
    update = WeightUpdate(policy_version=version, digest=subject.digest(tensors), tensors=tensors)
    state = await asyncio.wait_for(subject.engine.update_weights(update), DEADLINE)
    assert state == subject.engine.weights
    assert (state.policy_version, state.digest, state.status) == (version, update.digest, "ready")
    return version


async def check_completions_are_what_was_asked(subject: Subject) -> None:
    """Each request gets its own prompt back, at most as many tokens as it asked for, and a log-prob for each."""
    engine = subject.engine
    requests = [_request((1, 2 + i % 7, 3), max_tokens=1 + i % 9) for i in range(48)]
    version = engine.weights.policy_version
    for request, completion in zip(requests, await _all(map(engine.generate, requests)), strict=True):
        assert isinstance(completion, Completion), completion
        assert completion.request_id == request.request_id
        assert completion.prompt_token_ids == request.prompt_token_ids
        assert len(completion.response_token_ids) == request.sampling.max_tokens
        assert all(0 <= token < engine.info.vocab_size for token in completion.response_token_ids)
        assert all(math.isfinite(value) and value <= 0 for value in completion.rollout_logprobs)
        assert completion.finish_reason == "length"
        assert completion.min_policy_version == completion.max_policy_version == version


async def check_siblings_differ(subject: Subject) -> None:
    """A group of 8 without seeds has more than one answer."""
    completions = await _all(subject.engine.generate(_request()) for _ in range(8))
    assert len({completion.response_token_ids for completion in completions}) > 1


async def check_seeds_repeat(subject: Subject) -> None:
    """Equal seeds draw equally and others do not, whatever else is served."""
    seeds = [7, 8, 7, 9, 7]
    noise = [_request((5, 6)) for _ in range(6)]
    requests = [_request((1, 2, 3, 4), seed=seed) for seed in seeds]
    found = [completion.response_token_ids for completion in await _all(map(subject.engine.generate, requests + noise))]
    assert found[0] == found[2] == found[4]
    assert len({found[0], found[1], found[3]}) > 1
    alone = await asyncio.wait_for(subject.engine.generate(_request((1, 2, 3, 4), seed=7)), DEADLINE)
    assert alone.response_token_ids == found[0]


async def check_stop_tokens_end_a_response(subject: Subject) -> None:
    """A listed token ends the response and stays in it; a one-token response is one."""
    every = tuple(range(subject.engine.info.vocab_size))
    first, free = await _all(
        [subject.engine.generate(_request(stop_token_ids=every)), subject.engine.generate(_request(temperature=0.0))]
    )
    assert (len(first.response_token_ids), len(first.rollout_logprobs), first.finish_reason) == (1, 1, "stop")
    stop = free.response_token_ids[3]
    stopped = await subject.engine.generate(_request(temperature=0.0, stop_token_ids=(stop,)))
    end = free.response_token_ids.index(stop) + 1
    assert stopped.response_token_ids == free.response_token_ids[:end]
    assert stopped.finish_reason == "stop"


async def check_the_longest_prompts(subject: Subject) -> None:
    """One token of room gives one token; no room is an error of that request alone."""
    longest = subject.engine.info.max_model_len
    lengths = [3, longest + 1, longest, longest - 1, 3]
    found = await _all(subject.engine.generate(_request([1] * length)) for length in lengths)
    assert [error.reason for error in found[1:3]] == ["prompt_too_long", "prompt_too_long"]
    assert (len(found[3].response_token_ids), found[3].finish_reason) == (1, "length")
    assert [len(found[index].response_token_ids) for index in (0, 4)] == [8, 8]


async def check_bad_requests_fail_alone(subject: Subject) -> None:
    """Each bad request gets its reason; the good ones among them are served."""
    size = subject.engine.info.vocab_size
    bad = {
        "empty_prompt": [_request(())],
        "token_out_of_vocabulary": [_request((1, size)), _request((-1,))],
        "bad_sampling": [
            _request(max_tokens=0),
            _request(temperature=-1.0),
            _request(temperature=0.001),
            _request(temperature=math.nan),
            _request(top_p=0.0),
            _request(top_k=-1),
            _request(seed=-1),
            _request(stop_token_ids=(size,)),
        ],
    }
    for reason, requests in bad.items():
        *errors, good = await _all(map(subject.engine.generate, [*requests, _request()]))
        for request, error in zip(requests, errors, strict=True):
            assert isinstance(error, RequestError), (request, error)
            assert (error.reason, error.request_id) == (reason, request.request_id)
        assert len(good.response_token_ids) == 8


async def check_updates_are_served(subject: Subject) -> None:
    """After an update completions carry its version; the first weights again give the first greedy answer again."""
    before = await _greedy(subject)
    version = await _push(subject, subject.other_weights)
    during = await _greedy(subject)
    assert during.min_policy_version == during.max_policy_version == version
    await _push(subject, list(reversed(subject.weights)))
    after = await _greedy(subject)
    assert after.response_token_ids == before.response_token_ids
    assert max(abs(a - b) for a, b in zip(after.rollout_logprobs, before.rollout_logprobs, strict=True)) < 1e-4


async def check_bad_updates_are_refused(subject: Subject) -> None:
    """An unknown, missing, repeated or mis-shaped name, or another digest: an error that says so, nothing changed."""
    engine, tensors = subject.engine, list(subject.other_weights)
    (first, tensor), (last, _) = tensors[0], tensors[-1]
    before, state = await _greedy(subject), engine.weights
    bad = [
        ([*tensors, ("model._orig_mod.extra", tensor)], ["model._orig_mod.extra (unknown to the model)"]),
        (tensors[1:-1], [f"{first} (missing)", f"{last} (missing)"]),
        ([*tensors, tensors[0]], [f"{first} (given twice)"]),
        ([(first, tensor[..., :-1]), *tensors[1:]], [f"{first} (shape"]),
    ]
    updates = [
        (WeightUpdate(policy_version=99, digest=subject.digest(named), tensors=named), texts) for named, texts in bad
    ]
    good = WeightUpdate(policy_version=99, digest=subject.digest(tensors), tensors=tensors)
    updates.append((replace(good, digest="0" * 64), ["0" * 64]))
    for update, texts in updates:
        [error] = await _all([engine.update_weights(update)])
        assert isinstance(error, WeightsRefused), error
        assert all(text in str(error) for text in texts), (texts, str(error))
        assert engine.weights == state
    after = await _greedy(subject)
    assert (after.response_token_ids, after.min_policy_version) == (before.response_token_ids, state.policy_version)


async def check_updates_wait_for_requests(subject: Subject) -> None:
    """Requests before an update end with the old version, requests after it wait for the new one."""
    engine, old = subject.engine, subject.engine.weights.policy_version
    early = [asyncio.ensure_future(engine.generate(_request(max_tokens=32))) for _ in range(8)]
    await asyncio.sleep(0)
    update = asyncio.ensure_future(_push(subject, subject.other_weights))
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(engine.generate(_request())) for _ in range(8)]
    new = (await _all([update]))[0]
    assert new == old + 1
    assert {(c.min_policy_version, c.max_policy_version) for c in await _all(early)} == {(old, old)}
    assert {c.min_policy_version for c in await _all(late)} <= {old, new}
    assert (await _greedy(subject)).min_policy_version == new
    await _push(subject, subject.weights)


async def check_cancelled_requests_end(subject: Subject) -> None:
    """Cancelling a request neither harms the others nor holds up an update."""
    tasks = [asyncio.ensure_future(subject.engine.generate(_request(max_tokens=64))) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await _all(tasks)
    assert all(isinstance(result, asyncio.CancelledError) for result in found[::2])
    assert all(len(result.response_token_ids) == 64 for result in found[1::2])
    await _push(subject, subject.weights)


async def check_sleep(subject: Subject) -> None:
    """Asleep it refuses, awake it serves; weights dropped by level 2 must be pushed again first. Or it cannot sleep."""
    engine = subject.engine
    if not engine.info.can_sleep:
        [error] = await _all([engine.sleep()])
        assert isinstance(error, RuntimeError), error
        return
    before = await _greedy(subject)
    await asyncio.wait_for(engine.sleep(1), DEADLINE)
    refused = await _all([engine.generate(_request()), engine.sleep(1), _push(subject, subject.weights)])
    assert refused[0].reason == "engine_asleep"
    assert [type(error) for error in refused[1:]] == [RuntimeError, RuntimeError]
    await asyncio.wait_for(engine.wake(), DEADLINE)
    assert (await _greedy(subject)).response_token_ids == before.response_token_ids
    await asyncio.wait_for(engine.sleep(2), DEADLINE)
    await asyncio.wait_for(engine.wake(), DEADLINE)
    assert engine.weights.status == "refused"
    assert (await _all([engine.generate(_request())]))[0].reason == "stale_weights"
    await _push(subject, subject.weights)
    assert (await _greedy(subject)).response_token_ids == before.response_token_ids
    [error] = await _all([engine.wake()])
    assert isinstance(error, RuntimeError), error


async def check_streams(subject: Subject) -> None:
    """Chunks are the response in order, the last one holds it whole; one that is left early is stopped."""
    engine, request = subject.engine, _request(max_tokens=48, seed=5)
    whole = await asyncio.wait_for(engine.generate(request), DEADLINE)
    async with asyncio.timeout(DEADLINE):
        chunks = [chunk async for chunk in engine.stream(request, every=0.0)]
    completion = chunks[-1].completion
    assert completion is not None
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert tuple(t for chunk in chunks for t in chunk.response_token_ids) == completion.response_token_ids
    assert tuple(x for chunk in chunks for x in chunk.rollout_logprobs) == completion.rollout_logprobs
    assert sum(span.tokens for chunk in chunks for span in chunk.version_spans) == 48
    if engine.info.dtype == "float32":
        assert completion.response_token_ids == whole.response_token_ids
    stream = engine.stream(_request(max_tokens=64), every=0.0)
    async with asyncio.timeout(DEADLINE):
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    await _push(subject, subject.weights)  # it waits for what is running
    [error] = await _all([anext(engine.stream(_request(()), every=0.0))])
    assert error.reason == "empty_prompt"


async def _begun(subject: Subject, count: int, *, temperature: float) -> list[asyncio.Task[Completion]]:
    """Requests of which the engine has begun to sample one at least."""
    engine = subject.engine
    requests = [_request(max_tokens=64, temperature=temperature) for _ in range(count)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    async with asyncio.timeout(DEADLINE):
        while (await engine.metrics()).running == 0 and not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
    return tasks


async def check_a_pause_that_waits(subject: Subject) -> None:
    """What was begun ends whole before the pause holds; what comes during it waits; updates need not."""
    engine = subject.engine
    tasks = await _begun(subject, 2, temperature=1.0)
    await asyncio.wait_for(engine.pause("wait"), DEADLINE)
    done, _ = await asyncio.wait(tasks, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
    assert done
    late = asyncio.ensure_future(engine.generate(_request()))
    version = await _push(subject, subject.other_weights)
    assert not late.done()
    await asyncio.wait_for(engine.resume(), DEADLINE)
    found = await _all([*tasks, late])
    assert [len(completion.response_token_ids) for completion in found] == [64, 64, 8]
    assert found[-1].min_policy_version == version
    await asyncio.wait_for(engine.resume(), DEADLINE)
    await _push(subject, subject.weights)
    [error] = await _all([engine.pause("soon")])  # type: ignore[arg-type]
    assert isinstance(error, ValueError), error


async def check_a_pause_that_keeps(subject: Subject) -> None:
    """Responses that are held go on with the weights that came meanwhile, and say which token came from which."""
    engine, old = subject.engine, subject.engine.weights.policy_version
    tasks = await _begun(subject, 4, temperature=0.0)
    await asyncio.wait_for(engine.pause("keep"), DEADLINE)
    new = await _push(subject, subject.other_weights)
    await asyncio.wait_for(engine.resume(), DEADLINE)
    found: list[Completion] = await _all(tasks)
    for completion in found:
        assert len(completion.response_token_ids) == 64
        assert completion.finish_reason == "length"
        assert [span.policy_version for span in completion.version_spans] in ([old], [new], [old, new])
        if [span.policy_version for span in completion.version_spans] != [old, new]:
            continue
        before = completion.version_spans[0].tokens
        compared = 64 if engine.info.dtype == "float32" else before + 1
        begun = _part(completion, before)
        again = msgspec.structs.replace(_request(max_tokens=compared, temperature=0.0), continued=begun)
        expected = await asyncio.wait_for(engine.generate(again), DEADLINE)
        assert completion.response_token_ids[:compared] == expected.response_token_ids
    await _push(subject, subject.weights)


async def check_a_pause_that_aborts(subject: Subject) -> None:
    """Responses end with what they have, and can be continued."""
    engine = subject.engine
    tasks = await _begun(subject, 3, temperature=1.0)
    await asyncio.wait_for(engine.pause("abort"), DEADLINE)
    late = asyncio.ensure_future(engine.generate(_request()))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.resume(), DEADLINE)
    found: list[Completion] = await _all([*tasks, late])
    assert found.pop().finish_reason == "length"
    for completion in found:
        tokens = len(completion.response_token_ids)
        assert (completion.finish_reason, tokens < 64) in (("abort", True), ("length", False))
        if completion.finish_reason == "abort":
            whole = await asyncio.wait_for(
                engine.generate(msgspec.structs.replace(_request(max_tokens=tokens + 4), continued=completion)),
                DEADLINE,
            )
            assert whole.response_token_ids[:tokens] == completion.response_token_ids
            assert whole.rollout_logprobs[:tokens] == completion.rollout_logprobs
            assert len(whole.response_token_ids) == tokens + 4


async def check_continued_responses(subject: Subject) -> None:
    """With the same seed, what follows a response that broke off is what would have followed."""
    engine = subject.engine
    whole = await asyncio.wait_for(engine.generate(_request(max_tokens=24, seed=11)), DEADLINE)
    for tokens in (0, 1, 10, 24):
        request = msgspec.structs.replace(_request(max_tokens=24, seed=11), continued=_part(whole, tokens))
        found = await asyncio.wait_for(engine.generate(request), DEADLINE)
        assert found.rollout_logprobs[:tokens] == whole.rollout_logprobs[:tokens]
        assert (len(found.response_token_ids), found.finish_reason) == (24, "length")
        assert len(found.version_spans) == 1
        if engine.info.dtype == "float32":
            assert found.response_token_ids == whole.response_token_ids
    elsewhere = msgspec.structs.replace(_request((3, 2, 1)), continued=_part(whole, 3))
    ended = msgspec.structs.replace(_request(max_tokens=48), continued=whole)
    refused = await _all([engine.generate(elsewhere), engine.generate(ended)])
    assert [error.reason for error in refused] == ["bad_continuation", "bad_continuation"]


async def check_metrics(subject: Subject) -> None:
    """It counts what it did, and what failed by reason; nothing runs or waits when all have ended."""
    engine = subject.engine
    before = await asyncio.wait_for(engine.metrics(), DEADLINE)
    await _all([*(engine.generate(_request(max_tokens=5)) for _ in range(3)), engine.generate(_request(()))])
    after = await asyncio.wait_for(engine.metrics(), DEADLINE)
    assert (after.running, after.waiting) == (0, 0)
    assert after.completed - before.completed == 3
    assert after.response_tokens - before.response_tokens == 15
    assert after.failed.get("empty_prompt", 0) - before.failed.get("empty_prompt", 0) == 1


def _part(whole: Completion, tokens: int) -> Completion:
    """The beginning of a response, as if it had been told to stop there."""
    version = whole.min_policy_version
    return msgspec.structs.replace(
        whole,
        response_token_ids=whole.response_token_ids[:tokens],
        rollout_logprobs=whole.rollout_logprobs[:tokens],
        version_spans=(VersionSpan(version, tokens),),
        finish_reason="abort",
    )


async def check_health(subject: Subject) -> None:
    """It answers, also while it samples."""
    busy = asyncio.ensure_future(subject.engine.generate(_request(max_tokens=64)))
    await asyncio.wait_for(subject.engine.health(), DEADLINE)
    assert len((await asyncio.wait_for(busy, DEADLINE)).response_token_ids) == 64


async def check_close(subject: Subject) -> None:
    """After close, and twice is harmless, requests fail with ``engine_closed`` and other calls with RuntimeError."""
    await asyncio.wait_for(subject.engine.close(), DEADLINE)
    await asyncio.wait_for(subject.engine.close(), DEADLINE)
    request, update, health = await _all(
        [subject.engine.generate(_request()), _push(subject, subject.weights), subject.engine.health()]
    )
    assert request.reason == "engine_closed"
    assert [type(update), type(health)] == [RuntimeError, RuntimeError]


CONTRACT: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    check_completions_are_what_was_asked,
    check_siblings_differ,
    check_seeds_repeat,
    check_stop_tokens_end_a_response,
    check_the_longest_prompts,
    check_bad_requests_fail_alone,
    check_updates_are_served,
    check_bad_updates_are_refused,
    check_updates_wait_for_requests,
    check_cancelled_requests_end,
    check_sleep,
    check_streams,
    check_a_pause_that_waits,
    check_a_pause_that_keeps,
    check_a_pause_that_aborts,
    check_continued_responses,
    check_metrics,
    check_health,
)
"""Every promise but the end's."""
