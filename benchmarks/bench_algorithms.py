"""What the functions cost: `gae` beside a loop over tokens, and each loss beside its bare formula in one fused pass.

`gae` at [512, 4096] is to be 10 times faster than the loop over time steps that other trainers run.

A loss may cost 1.3 times the bare formula, in time and in memory, forward and backward. Both sides are compiled, as a
trainer would compile its loss. The bare formula knows finite numbers only; what comes on top of it is that masked slots
may hold anything, that ratios may be beyond a float, and that errors are not hidden. On a GPU, such a pass reads each
input once and writes one gradient, which is the least there is. `memory_ratio` compares the peaks of memory, inputs
included, and `eager_ratio` the loss without compilation with the fused formula.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import drivetrain_algorithms as algorithms
import pytest
import torch
from drivetrain_algorithms import aggregate, gae
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own imports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, LAM = 0.99, 0.95
GAE_SHAPE = (512, 4096)
SHAPE = (1024, 4096) if DEVICE == "cuda" else (256, 2048)
"""Sequences and tokens, of the losses."""
OWED = 1 / 1.3

Loss = Callable[..., Tensor]


def policy(name: str, **keywords: Any) -> Loss:
    function = getattr(algorithms, name)
    return lambda *tensors: function(*tensors, **keywords).loss


def bare_ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, _: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -3.0 * advantages), loss)


def bare_decoupled(logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (proximal - behaviour).exp().clamp(max=5.0) * bare_ppo(logprobs, proximal, advantages, mask)


def bare_gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    mean = torch.where(mask, logprobs - old, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio = (mean.detach() + logprobs - logprobs.detach()).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(0.9997, 1.0004) * advantages)


def bare_gmpo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logprobs - old
    sign = advantages.sign()
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
    mean = torch.where(mask, held, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return -advantages * (mean.detach() + held - held.detach()).exp()


def bare_cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, _: Tensor) -> Tensor:
    return -(logprobs - old).exp().detach().clamp(0.0, 5.0) * advantages * logprobs


def bare_sapo(logprobs: Tensor, old: Tensor, advantages: Tensor, _: Tensor) -> Tensor:
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return -4.0 / tau * sigmoid(tau * ((logprobs - old).exp() - 1.0)) * advantages


def bare_dppo_tv(logprobs: Tensor, old: Tensor, advantages: Tensor, _: Tensor) -> Tensor:
    now, then = logprobs.detach().exp(), old.exp()
    out = (now - then).abs() > 0.2
    dropped = (out & (advantages > 0) & (now > then)) | (out & (advantages < 0) & (now < then))
    return torch.where(dropped, 0.0, -(logprobs - old).detach().exp() * advantages * logprobs)


def bare_dppo_kl(logprobs: Tensor, old: Tensor, advantages: Tensor, _: Tensor) -> Tensor:
    now, then = logprobs.detach().exp(), old.exp()
    divergence = then * (old - logprobs.detach()) + (1 - then) * ((1 - then) / (1 - now)).log()
    out = divergence > 0.05
    dropped = (out & (advantages > 0) & (now > then)) | (out & (advantages < 0) & (now < then))
    return torch.where(dropped, 0.0, -(logprobs - old).detach().exp() * advantages * logprobs)


def bare_value(new: Tensor, old: Tensor, returns: Tensor, _: Tensor) -> Tensor:
    return 0.5 * torch.maximum((new - returns).square(), (old + (new - old).clamp(-0.2, 0.2) - returns).square())


def bare_huber(new: Tensor, returns: Tensor, _: Tensor) -> Tensor:
    size = (new - returns).abs()
    return torch.where(size <= 0.5, 0.5 * size.square(), 0.5 * (size - 0.25))


def bare_k3(logprobs: Tensor, reference: Tensor, _: Tensor) -> Tensor:
    return torch.expm1(reference - logprobs) - (reference - logprobs)


def pairs(function: Loss) -> Loss:
    """A loss of pairs of sequences, as one of their tokens: the first half of the batch against the second."""

    def loss(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        return function(*logprobs.chunk(2), *reference.chunk(2), mask)

    return loss


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, mask: Tensor) -> Tensor:
    masks = mask.chunk(2)
    sums = [
        algorithms.sequence_logprobs(logprobs, mask)
        for logprobs, mask in zip((chosen, rejected, ref_chosen, ref_rejected), masks * 2, strict=True)
    ]
    return algorithms.dpo_loss(*sums, beta=0.1).loss.repeat(2).unsqueeze(1).expand(mask.shape)


def bare_dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, mask: Tensor) -> Tensor:
    first, second = mask.chunk(2)
    gap = torch.where(first, chosen - ref_chosen, 0.0).sum(1) - torch.where(second, rejected - ref_rejected, 0.0).sum(1)
    return -logsigmoid(0.1 * gap).repeat(2).unsqueeze(1).expand(mask.shape)


LOSSES: dict[str, tuple[int, Loss, Loss]] = {
    "ppo_clip": (3, policy("ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0), bare_ppo),
    "decoupled_ppo": (
        4,
        policy("decoupled_ppo", clip_low=0.2, clip_high=0.28, dual_clip=3.0, clamp=(0.0, 5.0)),
        bare_decoupled,
    ),
    "reinforce": (3, policy("reinforce"), lambda logprobs, _old, advantages, _mask: -advantages * logprobs),
    "gspo": (3, policy("gspo", clip_low=3e-4, clip_high=4e-4), bare_gspo),
    "gmpo": (3, policy("gmpo", clip_low=0.4, clip_high=0.4), bare_gmpo),
    "cispo": (3, policy("cispo", clip_low=1.0, clip_high=4.0), bare_cispo),
    "sapo": (3, policy("sapo"), bare_sapo),
    "dppo_tv": (3, policy("dppo_tv", clip_low=0.2, clip_high=0.2), bare_dppo_tv),
    "dppo_kl": (3, policy("dppo_kl", clip_low=0.05, clip_high=0.05), bare_dppo_kl),
    "clipped_value_loss": (3, policy("clipped_value_loss", clip=0.2), bare_value),
    "value_loss": (2, lambda *tensors: algorithms.value_loss(*tensors, kind="huber", delta=0.5).loss, bare_huber),
    "kl_estimate": (2, partial(algorithms.kl_estimate, kind="k3"), bare_k3),
    "entropy_bonus": (1, partial(algorithms.entropy_bonus, coef=0.01), lambda entropies, _mask: -0.01 * entropies),
    "sft_loss": (1, algorithms.sft_loss, lambda logprobs, _mask: -logprobs),
    "dpo_loss": (2, pairs(dpo), pairs(bare_dpo)),
}
"""How many tensors a loss takes before the mask, the loss per token, and its bare formula. Gradients flow to the first
tensor. `clip_cov` and `kl_cov` are `ppo_clip` and a term, on tokens that were selected before."""


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    first, *others = torch.rand((count, *SHAPE), generator=generator, device=DEVICE).neg().sub(0.01).unbind()
    if count > 2:
        others[-1] = torch.randn(SHAPE, generator=generator, device=DEVICE)  # advantages
    lengths = torch.randint(SHAPE[1] // 4, SHAPE[1] + 1, (SHAPE[0], 1), generator=generator, device=DEVICE)
    return [first.clone().requires_grad_(), *others, torch.arange(SHAPE[1], device=DEVICE) < lengths]


class Step:
    """Forward and backward of a loss, to the end of the work."""

    def __init__(self, loss: Loss, tensors: list[Tensor], *, bare: bool = False) -> None:
        denominator = tensors[-1].sum().double()

        def scalar(*tensors: Tensor) -> Tensor:
            per_token = loss(*tensors)
            if bare:
                return torch.where(tensors[-1], per_token, 0.0).sum() / denominator.float()
            return aggregate(per_token, tensors[-1], mode="token_mean", denominator=denominator)

        self.tensors = tensors
        self.scalar = scalar
        self.compiled = torch.compile(scalar, fullgraph=True, dynamic=False)

    def __call__(self) -> None:
        self.run(self.compiled)

    def run(self, scalar: Callable[..., Tensor]) -> None:
        self.tensors[0].grad = None
        scalar(*self.tensors).backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def gradient(self) -> Tensor:
        self()
        assert self.tensors[0].grad is not None
        return self.tensors[0].grad

    def peak_bytes(self) -> int:
        """The most memory that was allocated at once, the inputs included."""
        self.tensors[0].grad = None
        peak = held = sum(tensor.nbytes for tensor in self.tensors)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self()
            return held + torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self()
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


def seconds(work: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


@pytest.mark.parametrize("name", LOSSES)
def test_loss(against, benchmark, name):
    torch.compiler.reset()
    count, loss, bare = LOSSES[name]
    tensors = inputs(count)
    ours, fused = Step(loss, tensors), Step(bare, tensors, bare=True)
    torch.testing.assert_close(ours.gradient(), fused.gradient(), rtol=1e-4, atol=1e-9)
    memory_ratio = fused.peak_bytes() / ours.peak_bytes()
    against(ours, fused, owed=OWED, rounds=30)
    benchmark.extra_info["memory_ratio"] = memory_ratio
    benchmark.extra_info["eager_ratio"] = seconds(fused, 10) / seconds(partial(ours.run, ours.scalar), 10)
    assert memory_ratio >= OWED


def plain_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """One step at a time, for batches in which every slot is a step."""
    advantage = values.new_zeros(len(values))
    advantages = []
    for t in reversed(range(values.shape[1])):
        next_values = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        advantage = delta + GAMMA * LAM * advantage
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1], dim=1)
    return stacked, stacked + values


def masked_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same for batches with slots that are no steps: these are passed over."""
    mask = mask.to(values.dtype)
    next_values = advantage = values.new_zeros(len(values))
    advantages = []
    for t in reversed(range(values.shape[1])):
        step = mask[:, t]
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        next_values = values[:, t] * step + (1 - step) * next_values
        advantage = (delta + GAMMA * LAM * advantage) * step + (1 - step) * advantage
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1], dim=1) * mask
    return stacked, (stacked + values) * mask


def finished(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result, once it is there."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("loop", [plain_loop, masked_loop])
def test_gae(against, benchmark, loop):
    generator = torch.Generator(DEVICE).manual_seed(0)
    rewards, values = torch.randn(2, *GAE_SHAPE, generator=generator, device=DEVICE)
    mask = torch.ones(GAE_SHAPE, dtype=torch.bool, device=DEVICE)
    if loop is masked_loop:
        lengths = torch.randint(
            GAE_SHAPE[1] // 8, GAE_SHAPE[1] + 1, (GAE_SHAPE[0], 1), generator=generator, device=DEVICE
        )
        steps = torch.rand(GAE_SHAPE, generator=generator, device=DEVICE) > 0.1
        mask = (torch.arange(GAE_SHAPE[1], device=DEVICE) < lengths) & steps

    def ours() -> tuple[Tensor, Tensor]:
        return finished(gae(rewards, values, mask, gamma=GAMMA, lam=LAM))

    def theirs() -> tuple[Tensor, Tensor]:
        return finished(loop(rewards, values, mask))

    for mine, other in zip(ours(), theirs(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    against(ours, theirs, owed=10, rounds=11)
    benchmark.extra_info["threads"] = torch.get_num_threads()
