"""Evaluate a policy on tasks with exact answers, many at once, through a pool of engines.

    python examples/evaluate_in_batches.py

The policy here is a tiny random Llama that reads and writes bytes, so it answers little rightly. With a model of your
own take its tokenizer for `encode` and `decode`, or `drivetrain_rollout.chat.Chat`, and `VLLMEngine` for the engines.
"""

import asyncio
import collections
import tempfile

import reasoning_gym
import torch
from drivetrain_rollout import EngineConfig, EnginePool, RequestError, RolloutEngine, SamplingParams, derive_seed
from drivetrain_rollout.adapters.reasoning_gym import ReasoningGymEnvironment
from drivetrain_rollout.environment import EpisodeError, run_episode
from drivetrain_rollout.transformers import TransformersEngine
from transformers import LlamaConfig, LlamaForCausalLM

TASKS, LONGEST = 64, 48


def encode(question: str) -> list[int]:
    return list(question.encode())[:LONGEST]


def decode(token_ids: tuple[int, ...]) -> str:
    return bytes(token_ids).decode(errors="replace")


async def evaluate(engine: RolloutEngine) -> None:
    tasks = reasoning_gym.create_dataset("chain_sum", size=TASKS, seed=1, min_terms=2, max_terms=2, max_digits=1)

    async def one(index: int) -> float | str:
        sampling = SamplingParams(max_tokens=4, stop_token_ids=(ord("\n"),), seed=derive_seed(1, index))
        environment = ReasoningGymEnvironment(tasks, index, encode=encode, decode=decode)
        try:
            rollout = await run_episode(engine, environment, sampling, sample_id=index)
        except (EpisodeError, RequestError) as error:
            return error.reason
        assert rollout.score is not None
        return rollout.score

    outcomes = await asyncio.gather(*map(one, range(TASKS)))
    scores = [outcome for outcome in outcomes if isinstance(outcome, float)]
    failed = collections.Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    print(f"{len(scores)} of {TASKS} answered, mean score {sum(scores) / len(scores):.3f}, failed {dict(failed)}")
    for member in engine.members if isinstance(engine, EnginePool) else []:
        print(f"{member.name}: {member.state}, up to {member.limit} requests at once")


async def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=LONGEST + 8))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engines = [TransformersEngine(EngineConfig(engine="transformers", model=folder)) for _ in range(2)]
    async with EnginePool(engines) as pool:
        await evaluate(pool)


if __name__ == "__main__":
    asyncio.run(main())
