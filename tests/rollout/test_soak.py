"""A pool of worker processes that are killed at random while weights change: every prompt is answered exactly once."""

import asyncio
import collections
import gc
import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from drivetrain_rollout import (
    Completion,
    EngineConfig,
    EnginePool,
    GenerateRequest,
    PoolConfig,
    SamplingParams,
    WeightUpdate,
    derive_seed,
)
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine
from drivetrain_rollout.testing import ScriptedEngine, sha256_digest
from drivetrain_transport import Endpoint
from programs import environment

WORKER = Path(__file__).with_name("pool_worker.py")
SHAPES = {"a": (64, 64), "b": (3,)}
GROUP = 4
PACES = ("0.0005", "0.001", "0.004")
"""Seconds a step: one worker is slow."""


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, float(version))) for name, shape in SHAPES.items()]


def update(version: int) -> WeightUpdate:
    named = tensors(version)
    return WeightUpdate(policy_version=version, digest=sha256_digest(named), tensors=named)


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Workers:
    """Processes, and the pool's engines on them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.numbers = itertools.count()

    def start(self, pace: str) -> tuple[str, RemoteEngine]:
        name = f"worker-{next(self.numbers)}"
        self.alive[name] = subprocess.Popen(
            [sys.executable, WORKER, self.endpoint.address, name, pace], env=environment()
        )
        deadline = time.monotonic() + 60
        while not (peers := [peer for peer in self.endpoint.peers if peer.name == name]):
            assert time.monotonic() < deadline, f"{name} did not join"
            time.sleep(0.02)
        return name, RemoteEngine(peers[0], EngineConfig(engine="scripted", model="none", seed=1), progress=0.02)

    def kill(self, name: str) -> None:
        worker = self.alive.pop(name)
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)


async def soak(prompts: int, *, kill_every: float, update_every: float, kills: int) -> None:
    source = random.Random(5)
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        workers = Workers(endpoint)
        engines = dict([workers.start(pace) for pace in PACES])
        state = {"version": 0}

        async def refresh(engine: RemoteEngine) -> None:
            await engine.update_weights(update(state["version"]))

        config = PoolConfig(attempts=50, look_every=0.2, updates="keep", no_engine_timeout=60)
        pool = EnginePool(engines, config, refresh=refresh)  # type: ignore[arg-type]
        running = True
        versions = {0}
        answers: collections.Counter[str] = collections.Counter()
        killed = 0

        async def kill() -> None:
            nonlocal killed
            while running:
                await asyncio.sleep(kill_every)
                name = source.choice(list(workers.alive))
                workers.kill(name)
                killed += 1
                late, engine = await asyncio.to_thread(workers.start, source.choice(PACES))
                await pool.add(late, engine)
                await pool.remove(name, drain=False)

        async def push() -> None:
            while running:
                await asyncio.sleep(update_every)
                state["version"] += 1
                versions.add(state["version"])
                await pool.update_weights(update(state["version"]))

        async def one(prompt: int, sample: int) -> Completion:
            sampling = SamplingParams(max_tokens=24, seed=derive_seed(1, prompt, sample))
            name = f"{prompt}-{sample}"
            request = GenerateRequest(
                request_id=name, prompt_token_ids=(1, prompt % 64), sampling=sampling, group_id=prompt
            )
            found = await pool.generate(request)
            answers[name] += 1
            return found

        helpers = [asyncio.ensure_future(kill()), asyncio.ensure_future(push())]
        try:
            half = prompts // 2
            groups, sizes = [], []
            for part in (range(half), range(half, prompts)):
                groups += await asyncio.gather(
                    *(asyncio.gather(*(one(prompt, sample) for sample in range(GROUP))) for prompt in part)
                )
                gc.collect()
                sizes.append(resident())
        finally:
            running = False
            await asyncio.gather(*helpers)
        final = await pool.generate(
            GenerateRequest(request_id="last", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=3))
        )
        await asyncio.gather(pool.close(), return_exceptions=True)
        endpoint.close()
        for worker in workers.alive.values():
            assert worker.wait(30) == 0

    assert killed >= kills
    assert len(versions) >= 3
    assert set(answers.values()) == {1}
    assert len(answers) == prompts * GROUP
    assert [len(group) for group in groups] == [GROUP] * prompts
    assert final.min_policy_version == max(versions)
    async with ScriptedEngine() as alone:
        for prompt, group in enumerate(groups):
            for sample, found in enumerate(group):
                assert found.request_id == f"{prompt}-{sample}"
                assert len(found.response_token_ids) == 24
                assert {span.policy_version for span in found.version_spans} <= versions
                if prompt % 50 == 0:  # whoever served it, and however often it was begun
                    again = GenerateRequest(
                        request_id="again",
                        prompt_token_ids=found.prompt_token_ids,
                        sampling=SamplingParams(max_tokens=24, seed=derive_seed(1, prompt, sample)),
                    )
                    assert (await alone.generate(again)).response_token_ids == found.response_token_ids
    assert sizes[1] - sizes[0] < 100 << 20, sizes


@pytest.mark.timeout(120)
def test_a_short_soak():
    asyncio.run(asyncio.wait_for(soak(150, kill_every=1.0, update_every=0.4, kills=1), 110))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_prompts():
    asyncio.run(asyncio.wait_for(soak(2000, kill_every=3.0, update_every=2.0, kills=5), 880))
