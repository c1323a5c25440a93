"""ALG-09: the mask is rebuilt from token values: where pad and end of sequence are one id, the end is never trained.

huggingface/trl#4970, huggingface/trl#6357, verl-project/verl#3805, NVIDIA-NeMo/Megatron-Bridge#4660
"""

import torch
from drivetrain_algorithms import aggregate, loss_denominator, sft_loss
from drivetrain_learner import PackedBatch, PolicyModel
from drivetrain_ppo.batch import make_batch
from drivetrain_rollout import Completion, FinishReason, Rollout, VersionSpan

END = PAD = 2
PROMPT = (1, END, 4)  # as in a chat template, whose turns end with the id that ends a response
RESPONSES: list[tuple[tuple[int, ...], FinishReason]] = [((5, 6, END), "stop"), ((5, 6, 7), "length")]


def rollout(index: int) -> Rollout:
    response, finish_reason = RESPONSES[index]
    turn = Completion(
        request_id=str(index),
        prompt_token_ids=PROMPT,
        response_token_ids=response,
        rollout_logprobs=(-0.5,) * len(response),
        finish_reason=finish_reason,
        version_spans=(VersionSpan(0, len(response)),),
    )
    return Rollout(sample_id=index, group_id=0, turns=(turn,), score=1.0)


ROLLOUTS = [rollout(0), rollout(1)]


def packed_batches() -> list[PackedBatch]:
    """As a user packs sequences, and as the app assembles a batch of rollouts."""
    token_ids = [[*PROMPT, *response] for response, _ in RESPONSES]
    by_hand = PackedBatch.pack(token_ids, [[False] * 3 + [True] * 3] * 2)
    return [by_hand, make_batch(ROLLOUTS, rank=0, size=1, device="cpu").packed]


def tiny_policy() -> PolicyModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, initializer_range=0.3, pad_token_id=PAD, eos_token_id=END, bos_token_id=1
    )
    return PolicyModel(LlamaForCausalLM(config))


def test_both_responses_have_three_trained_tokens() -> None:
    assert [sum(rollout.response_mask) for rollout in ROLLOUTS] == [3, 3]
    for batch in packed_batches():
        assert batch.lengths.tolist() == [5, 5]
        assert batch.loss_mask.view(2, 5).tolist() == [[False, False, True, True, True]] * 2
        # The end of the first is trained; the same id in the prompt is not, and there are no others.
        assert [(batch.labels == END)[batch.loss_mask].sum().item(), (batch.labels == END).sum().item()] == [1, 3]
        assert batch.labels[batch.loss_mask].tolist() == [5, 6, END, 5, 6, 7]


def test_the_end_of_a_response_is_trained_and_its_prompt_is_read_whole() -> None:
    policy = tiny_policy()
    model = policy.model
    for batch in packed_batches():
        logprobs = policy(batch).logprobs
        for index, (response, _) in enumerate(RESPONSES):
            # One sequence alone, without a mask: every token sees all before it.
            ids = torch.tensor([[*PROMPT, *response]])
            alone = model(input_ids=ids).logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None]).flatten()
            own = slice(5 * index, 5 * (index + 1))
            torch.testing.assert_close(logprobs[own][batch.loss_mask[own]], alone, rtol=1e-5, atol=1e-5)
        logprobs.retain_grad()
        denominator = loss_denominator(batch.loss_mask, mode="token_mean", cu_seqlens=batch.cu_seqlens)
        loss = sft_loss(logprobs, batch.loss_mask)
        aggregate(
            loss, batch.loss_mask, mode="token_mean", denominator=denominator, cu_seqlens=batch.cu_seqlens
        ).backward()
        assert denominator.item() == 6.0
        torch.testing.assert_close(logprobs.grad, batch.loss_mask / -6)


def test_padded_to_six_the_mask_comes_from_lengths() -> None:
    lengths = torch.tensor([len(response) for response, _ in RESPONSES])
    padded = torch.full((2, 6), PAD)
    for row, (response, _) in enumerate(RESPONSES):
        padded[row, : len(response)] = torch.tensor(response)
    mask = torch.arange(6) < lengths.unsqueeze(-1)
    assert mask.sum(-1).tolist() == [3, 3]
    assert ((padded != PAD) & mask).sum(-1).tolist() == [2, 3]  # what a mask made of ids would train
    # Of the padding nothing is known: not even its log-probabilities are numbers.
    logprobs = torch.where(mask, -1.0, torch.nan).requires_grad_()
    denominator = loss_denominator(mask, mode="token_mean")
    loss = aggregate(sft_loss(logprobs, mask), mask, mode="token_mean", denominator=denominator)
    loss.backward()
    assert loss.item() == 1.0
    torch.testing.assert_close(logprobs.grad, mask / -6)
