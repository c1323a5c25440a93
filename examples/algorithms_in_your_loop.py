"""PPO's mathematics in a trainer of your own, on the padded tensors it already has.

    python examples/algorithms_in_your_loop.py

`ppo_loss` is all that `drivetrain-algorithms` has to see of a trainer. The trainer below it stands for yours.
"""

import torch
from drivetrain_algorithms import (
    aggregate,
    clipped_value_loss,
    gae,
    loss_denominator,
    ppo_clip,
    token_logprobs,
    token_rewards,
    whiten,
)
from torch import Tensor


def ppo_loss(batch: dict[str, Tensor], logprobs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of policy and critic, and the share of clipped tokens, of `[B, T]` tensors that are padded anywhere."""
    mask, old_logprobs, old_values = batch["mask"], batch["old_logprobs"], batch["values"]
    rewards = token_rewards(batch["scores"], old_logprobs, batch["ref_logprobs"], mask, kl_coef=0.01)
    advantages, returns = gae(rewards, old_values, mask, gamma=1.0, lam=0.95)
    policy = ppo_clip(logprobs, old_logprobs, whiten(advantages, mask), mask, clip_low=0.2, clip_high=0.2)
    critic = clipped_value_loss(values, old_values, returns, mask, clip=0.2)
    tokens = loss_denominator(mask, mode="token_mean")
    loss = aggregate(policy.loss + 0.5 * critic.loss, mask, mode="token_mean", denominator=tokens)
    return loss, policy.clipped.sum() / tokens


def main() -> None:
    torch.manual_seed(0)
    hidden, tokens = torch.randn(8, 16, 32), torch.randint(10, (8, 16))  # [B, T, H] states, [B, T] sampled tokens
    policy, critic = torch.nn.Linear(32, 10), torch.nn.Linear(32, 1)
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=3e-3)

    def forward() -> tuple[Tensor, Tensor]:
        return token_logprobs(policy(hidden), tokens), critic(hidden)[..., 0]

    with torch.no_grad():
        old_logprobs, values = forward()
    batch = {
        "scores": torch.rand(8),
        "old_logprobs": old_logprobs,
        "ref_logprobs": old_logprobs,
        "values": values,
        "mask": torch.arange(16) < torch.randint(4, 17, (8, 1)),
    }
    for epoch in range(4):
        loss, clipped = ppo_loss(batch, *forward())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss:.4f}, {clipped:.0%} of the tokens clipped")


if __name__ == "__main__":
    main()
