"""A pool of rollout engines inside a PyTorch loop that you own: REINFORCE on a tiny random Llama.

    python examples/embed_rollout.py

The engines get the weights after each optimizer step, together with their digest; they serve them only if what arrived
has that digest. To sample with vLLM instead, take `VLLMEngine` from `drivetrain_rollout.vllm`; the loop stays as it is.
"""

import asyncio
import tempfile

import torch
from drivetrain_rollout import EngineConfig, EnginePool, GenerateRequest, RolloutEngine, SamplingParams, WeightUpdate
from drivetrain_rollout.transformers import TransformersEngine
from drivetrain_sharding import digest, named_tensors
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT, SAMPLING, WANTED = (1, 5), SamplingParams(max_tokens=8), 7


def start_engines(model: LlamaForCausalLM, count: int) -> EnginePool:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = EngineConfig(engine="transformers", model=folder)
        return EnginePool([TransformersEngine(config, digest=digest) for _ in range(count)])


async def sample(engine: RolloutEngine, count: int) -> torch.Tensor:
    """Token ids of prompt and response, [count, T]."""
    requests = [GenerateRequest(request_id=str(i), prompt_token_ids=PROMPT, sampling=SAMPLING) for i in range(count)]
    completions = await asyncio.gather(*map(engine.generate, requests))
    return torch.tensor([done.prompt_token_ids + done.response_token_ids for done in completions])


async def train(model: LlamaForCausalLM, engine: RolloutEngine, *, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for version in range(1, steps + 1):
        ids = await sample(engine, 64)
        rewards = (ids[:, len(PROMPT) :] == WANTED).float().mean(1)
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, len(PROMPT) - 1 :, 0]
        loss = -((rewards - rewards.mean())[:, None] * logprobs).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = dict(named_tensors(model))
        update = WeightUpdate(policy_version=version, digest=digest(weights), tensors=weights.items())
        state = await engine.update_weights(update)
        print(f"version {state.policy_version} ({update.digest[:8]}): reward {rewards.mean():.2f}")


async def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64))
    async with start_engines(model, 2) as pool:
        await train(model, pool, steps=20)


if __name__ == "__main__":
    asyncio.run(main())
