"""GRPO in a plain Hugging Face training loop: sample, score, compare with siblings, two epochs of clipped updates.

    python examples/grpo_with_transformers.py

The model is a tiny random Llama, the task to say the prompt's token as often as it fits. Everything that is GRPO is in
`update`. With `baseline="leave_one_out", scale="none"` it is RLOO; with `gspo` for `ppo_clip`, and clips of a few
ten-thousandths, it is GSPO.
"""

import torch
from drivetrain_algorithms import (
    aggregate,
    group_advantages,
    loss_denominator,
    ppo_clip,
    spread_over_tokens,
    token_logprobs,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, BEGIN, END, MAX_NEW_TOKENS = 8, 1, 2, 6
PROMPTS, SIBLINGS, STEPS = 16, 8, 40


def make_model() -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=0)
    return LlamaForCausalLM(config)


def response_logprobs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """`[B, T]`, aligned with the responses, which follow a prompt of two tokens."""
    return token_logprobs(model(ids[:, :-1]).logits, ids[:, 1:])[:, 1:]


def sample(model: LlamaForCausalLM) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, the mask of the responses, their scores, and the group each belongs to."""
    wanted = torch.randint(3, VOCABULARY, (PROMPTS, 1)).repeat_interleave(SIBLINGS, 0)
    prompts = torch.cat((torch.full_like(wanted, BEGIN), wanted), 1)
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS
    )
    ends = (ids[:, 2:] == END).int()
    mask = ends.cumsum(1) - ends == 0  # up to the first end, which the policy chose too; padding is what follows it
    scores = ((ids[:, 2:] == wanted) & mask).sum(1) / MAX_NEW_TOKENS
    return ids, mask, scores, torch.arange(PROMPTS).repeat_interleave(SIBLINGS)


def update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> None:
    ids, mask, scores, group_ids = batch
    advantages = group_advantages(scores, group_ids, baseline="mean", scale="std")
    advantages = spread_over_tokens(advantages, mask)
    with torch.no_grad():
        old_logprobs = response_logprobs(model, ids)
    denominator = loss_denominator(mask, mode="seq_mean_token_mean")
    for _epoch in range(2):
        for rows in torch.arange(len(ids)).split(64):  # micro-batches: of any size, the step stays the same
            logprobs = response_logprobs(model, ids[rows])
            policy = ppo_clip(logprobs, old_logprobs[rows], advantages[rows], mask[rows], clip_low=0.2, clip_high=0.2)
            aggregate(policy.loss, mask[rows], mode="seq_mean_token_mean", denominator=denominator).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model, threads cost more than they bring
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        _ids, mask, scores, _group_ids = batch = sample(model)
        print(f"step {step}: reward {scores.mean():.2f}, {mask.sum(1).float().mean():.1f} tokens a response")
        update(model, optimizer, batch)
    print(f"after {STEPS} steps: reward {sample(model)[2].mean():.2f}")


if __name__ == "__main__":
    main()
