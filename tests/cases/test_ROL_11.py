"""ROL-11: an answer without tokens, or of its end alone, ends the step; or it is skipped, and never punished.

thinking-machines-lab/tinker-cookbook#848, huggingface/trl#6714, hiyouga/LlamaFactory#380: `tokens[:-1]` is empty, the
minimum of nothing is taken, or a slice ends at -0.

The path of a step is walked here: engine, buffer, advantages, loss, gradient.
"""

import asyncio

import torch
from drivetrain_algorithms import aggregate, group_advantages, loss_denominator, ppo_clip
from drivetrain_buffer import RolloutBuffer
from drivetrain_learner import PolicyModel
from drivetrain_ppo.batch import make_batch
from drivetrain_rollout import Completion, Rollout, VersionSpan
from drivetrain_rollout.testing import ScriptedEngine
from drivetrain_rollout.types import GenerateRequest, SamplingParams

END = 2


def rollout(index: int, response: tuple[int, ...], score: float) -> Rollout:
    turn = Completion(
        request_id=str(index),
        prompt_token_ids=(1, 3, 4),
        response_token_ids=response,
        rollout_logprobs=(-0.5,) * len(response),
        finish_reason="stop" if response else "abort",
        version_spans=(VersionSpan(0, len(response)),),
    )
    return Rollout(sample_id=index, group_id=0, turns=(turn,), score=score)


def policy() -> PolicyModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)))


def gradient(responses: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step's loss by the log-probs [N], and the loss mask [N]."""
    rollouts = [rollout(i, response, score=float(i == len(responses) - 1)) for i, response in enumerate(responses)]
    batch = make_batch(rollouts, rank=0, size=1, device="cpu")
    packed = batch.packed
    advantages = group_advantages(
        batch.scores, torch.zeros(len(rollouts), dtype=torch.long), baseline="mean", scale="none"
    )
    lengths = packed.cu_seqlens.diff()
    logprobs = policy()(packed).logprobs
    logprobs.retain_grad()
    loss = ppo_clip(
        logprobs,
        logprobs.detach(),
        advantages.repeat_interleave(lengths),
        packed.loss_mask,
        clip_low=0.2,
        clip_high=0.2,
    ).loss
    denominator = loss_denominator(packed.loss_mask, mode="token_mean", cu_seqlens=packed.cu_seqlens)
    total = aggregate(loss, packed.loss_mask, mode="token_mean", denominator=denominator, cu_seqlens=packed.cu_seqlens)
    assert total.isfinite()
    total.backward()
    assert logprobs.grad is not None
    return logprobs.grad, packed.loss_mask


def test_the_end_alone_is_trained_and_nothing_contributes_nothing():
    slopes, mask = gradient([(), (END,), (5, 6, 7, 5, 6, 7, END)])
    assert mask.sum() == 8
    assert (slopes[mask] != 0).all()
    assert (slopes[~mask] == 0).all()
    own = torch.cat([mask.new_zeros(2), mask.new_tensor([0, 0, 1]), mask.new_zeros(len(mask) - 5)])
    assert slopes[own].item() > 0  # its advantage is below the mean: to stop at once becomes less likely


def test_a_step_without_any_token_is_no_crash():
    slopes, mask = gradient([(), ()])
    assert mask.sum() == 0
    assert (slopes == 0).all()


def test_they_pass_the_buffer_and_none_is_skipped():
    rollouts = [rollout(0, (), 0.0), rollout(1, (END,), 0.0), rollout(2, (5, 6, 7, 5, 6, 7, END), 1.0)]
    stale: list[Rollout] = []
    buffer = RolloutBuffer(
        8, policy_version=lambda each: each.min_policy_version, max_staleness=0, on_stale=stale.append
    )
    for each in rollouts:
        buffer.add(each, timeout=0.0)
    taken = buffer.take_fresh(learner_version=0)
    buffer.close()
    assert not stale
    assert [sum(each.response_mask) for each in taken] == [0, 1, 7]
    assert [each.finish_reason for each in taken] == ["abort", "stop", "stop"]
    assert make_batch(taken, rank=0, size=1, device="cpu").packed.loss_mask.sum() == 8


def test_an_engine_tells_them_apart():
    async def scenario() -> list[Completion]:
        answers = {"end": [END], "long": [5, 6, 7, 5, 6, 7, END]}
        async with ScriptedEngine(respond=lambda request: answers[request.request_id]) as engine:
            sampling = SamplingParams(max_tokens=9, stop_token_ids=(END,))
            return await asyncio.gather(
                *(
                    engine.generate(GenerateRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling))
                    for name in answers
                )
            )

    end, long = asyncio.run(scenario())
    assert (end.response_token_ids, end.finish_reason, len(end.rollout_logprobs)) == ((END,), "stop", 1)
    assert len(long.response_token_ids) == 7
