"""DPO in a plain Hugging Face training loop: a model learns from pairs which of two responses was preferred.

    python examples/dpo_with_transformers.py

The model is a tiny random Llama. The pairs are made up: the preferred response repeats the prompt's token more often
than the other. Accuracy is taken on pairs that were never trained on.
"""

import copy

import torch
from drivetrain_algorithms import PreferenceLoss, dpo_loss, sequence_logprobs, token_logprobs
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, PAIRS, MICRO_BATCH, STEPS = 8, 6, 128, 32, 60


def make_model() -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def make_pairs(count: int) -> tuple[Tensor, Tensor]:
    """Ids `[2, count, 1 + LENGTH]`, the preferred responses first, and the mask of the responses' own tokens."""
    prompts, responses = torch.randint(VOCABULARY, (count, 1)), torch.randint(VOCABULARY, (2, count, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (2, count, 1))
    hits = ((responses == prompts) & mask).sum(-1)
    differing = hits[0] != hits[1]
    preferred = hits.argmax(0)[differing]
    order, rows = torch.stack((preferred, 1 - preferred)), torch.arange(count)[differing]
    return torch.cat((prompts[rows].expand(2, -1, -1), responses[order, rows]), -1), mask[order, rows]


def log_probabilities(model: LlamaForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Of whole responses, `[2, count]`: one pass for the preferred ones and the others."""
    flat = ids.flatten(0, 1)
    logprobs = token_logprobs(model(flat[:, :-1]).logits, flat[:, 1:])
    return sequence_logprobs(logprobs, mask.flatten(0, 1)).view(2, -1)


def loss_of(model: LlamaForCausalLM, reference: LlamaForCausalLM, ids: Tensor, mask: Tensor) -> PreferenceLoss:
    with torch.no_grad():
        references = log_probabilities(reference, ids, mask)
    return dpo_loss(*log_probabilities(model, ids, mask), *references, beta=0.5)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model, threads cost more than they bring
    model = make_model()
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held_out = make_pairs(512)
    for step in range(STEPS + 1):
        if step % 20 == 0:
            with torch.no_grad():
                result = loss_of(model, reference, *held_out)
            print(
                f"step {step}: loss {result.loss.mean():.3f}, accuracy {result.accurate.float().mean():.2f}, "
                f"margin {result.margins.mean():.2f}"
            )
        ids, mask = make_pairs(PAIRS)
        count = ids.shape[1]  # pairs of the whole step: what every micro-batch divides by
        for pairs in torch.arange(count).split(MICRO_BATCH):
            (loss_of(model, reference, ids[:, pairs], mask[:, pairs]).loss.sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
