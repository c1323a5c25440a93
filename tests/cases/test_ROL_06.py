"""ROL-06: every engine draws from the same seed, so that siblings are copies; or the user's seed changes nothing.

NVIDIA-NeMo/RL#53, NVIDIA-NeMo/RL#171, verl-project/verl#5179, huggingface/trl#7040, vllm-project/vllm#11953: no error,
and less exploration. Here both engines of a pool are started with the same seed on purpose.
"""

from collections.abc import Iterator

import pytest
from drivetrain_rollout import EngineConfig, EnginePool, GenerateRequest, PoolConfig, SamplingParams, derive_seed
from drivetrain_rollout.testing import write_tiny_model
from drivetrain_rollout.transformers import TransformersEngine
from engines import PROMPTS, run, sample

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TransformersEngine]]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    found = [TransformersEngine(EngineConfig(engine="transformers", model=str(folder))) for _ in range(2)]
    yield found
    for engine in found:
        run(engine.close())


def request(name: int, prompt: Ids, *, seed: int | None = None, group: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=12, seed=seed),
        group_id=group,
    )


def answers(pool: EnginePool, requests: list[GenerateRequest]) -> list[Ids]:
    return [completion.response_token_ids for completion in sample(pool, requests)]


def test_engines_of_a_pool_draw_apart(engines: list[TransformersEngine]):
    pool = EnginePool(engines)
    twice = answers(pool, [request(index, (1, 2, 3)) for index in range(8)])
    assert len(set(twice)) == 8
    group = answers(pool, [request(index, (4, 5), group=1) for index in range(8)])
    assert len(set(group)) > 4


def run_of(pool: EnginePool, seed: int) -> list[Ids]:
    """What one run with this seed samples: prompts in groups of two."""
    samples = [(index, prompt) for index, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(2))]
    requests = [request(index, prompt, seed=derive_seed(seed, index)) for index, prompt in samples]
    return answers(pool, requests)


def test_a_runs_seed_decides_and_the_engine_does_not(engines: list[TransformersEngine]):
    both, first = EnginePool(engines), EnginePool(engines[:1])
    one = run_of(both, 1)
    assert run_of(both, 1) == one
    assert run_of(first, 1) == one  # whichever engine serves a request
    other = run_of(both, 2)
    assert sum(a != b for a, b in zip(one, other, strict=True)) > len(one) // 2
    assert all(one[index] != one[index + 1] for index in range(0, len(one), 2))  # siblings


def test_pools_without_seeds_differ_by_their_own(engines: list[TransformersEngine]):
    requests = [request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    found = {seed: answers(EnginePool(engines, PoolConfig(seed=seed)), requests) for seed in (1, 2)}
    assert found[1] != found[2]
    assert answers(EnginePool(engines, PoolConfig(seed=1)), requests) == found[1]
