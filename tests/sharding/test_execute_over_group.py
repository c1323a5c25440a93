"""An executor over the tensor groups of drivetrain-transport: neither library knows the other, a dozen lines join them.

The ranks are members of a group on gloo, as threads.
"""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from drivetrain_sharding import Executor, Mesh, TransferFailed, make_plan, train_layout, vllm_layout
from drivetrain_sharding.exchange import Message
from drivetrain_transport.device import TensorGroup
from layouts import held_by, random_whole, same_bits
from tensor_groups import members

CONFIG = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 70, "tie_word_embeddings": True,
}  # fmt: skip
SOURCE = train_layout(CONFIG, Mesh((("dp", 3),)), dtype=torch.float32, fsdp="dp")
TARGET = vllm_layout(CONFIG, tp=2, dtype=torch.bfloat16)
PLAN = make_plan(SOURCE, TARGET, bucket_bytes=4096)
NAMES = ("source0", "source1", "source2", "target0", "target1")


class GroupExchange:
    """An `Exchange` over a group whose members are called as above."""

    def __init__(self, group: TensorGroup, timeout: float) -> None:
        self.group, self.timeout = group, timeout

    def agree(self, ok: bool) -> bool:
        others = [name for name in self.group.members if name != self.group.me]
        votes = [torch.zeros(1, dtype=torch.bool) for _ in others]
        mine = torch.tensor([ok])
        self.group.exchange(
            [(name, mine) for name in others], list(zip(others, votes, strict=True)), timeout=self.timeout
        )
        return ok and all(votes)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        return self.group.start(
            [(f"target{rank}", flat) for rank, flat in sends],
            [(f"source{rank}", flat) for rank, flat in receives],
            timeout=self.timeout,
        ).wait


class Part:
    """A member, and what it holds."""

    def __init__(self, group: TensorGroup, timeout: float = 20) -> None:
        self.side, self.rank = group.me[:-1], int(group.me[-1])
        layout = SOURCE if self.side == "source" else TARGET
        self.held = held_by(layout, self.rank, {}, filled=False)
        ranks = {f"{self.side}_rank": self.rank}
        self.executor = Executor(PLAN, GroupExchange(group, timeout), **ranks)

    def update(self, seed: int) -> bool:
        """Whether the rank holds what it should after an update with other values."""
        whole = random_whole(SOURCE, seed)
        if self.side == "source":
            for name, tensor in held_by(SOURCE, self.rank, whole).items():
                self.held[name].copy_(tensor)
        self.executor.run(**{self.side: self.held})
        return self.side == "source" or same_bits(self.held, held_by(TARGET, self.rank, whole))


def test_updates_over_a_group():
    assert PLAN.rounds > 3
    with members(NAMES) as runs:
        parts = [work.result(30) for work in [run(Part) for run in runs]]
        for seed in (1, 2, 3):
            done = [
                run(lambda _, part=part, seed=seed: part.update(seed)) for run, part in zip(runs, parts, strict=True)
            ]
            assert all(work.result(60) for work in done)


def test_a_misfit_on_one_member_is_refused_on_all_and_the_group_is_as_it_was():
    def attempt(group: TensorGroup, part: Part, fits: bool) -> str:
        held, before = part.held, {name: tensor.clone() for name, tensor in part.held.items()}
        if not fits:
            held = {name: tensor.to(torch.float16) for name, tensor in held.items()}
        with pytest.raises(ValueError, match="nothing was sent") as raised:
            part.executor.run(**{part.side: held})
        assert same_bits(part.held, before)
        assert not group.broken
        return str(raised.value)

    with members(NAMES) as runs:
        parts = [work.result(30) for work in [run(Part) for run in runs]]
        tried = [run(attempt, part, number != 1) for number, (run, part) in enumerate(zip(runs, parts, strict=True))]
        said = [work.result(60) for work in tried]
        assert "torch.float16" in said[1]
        assert all("another one is not" in text for number, text in enumerate(said) if number != 1)
        done = [run(lambda _, part=part: part.update(4)) for run, part in zip(runs, parts, strict=True)]
        assert all(work.result(60) for work in done)


def test_a_member_that_leaves_in_a_round_is_an_error_on_all():
    def leave(group: TensorGroup, part: Part) -> str:
        exchange = part.executor._exchange
        start, rounds = exchange.start, iter(range(PLAN.rounds))

        def stop(*messages: Sequence[Message]) -> Callable[[], None]:
            if next(rounds) == PLAN.rounds // 2:
                group.close()
            return start(*messages)

        if group.me == "source1":
            exchange.start = stop
        with pytest.raises(TransferFailed) as raised:
            part.update(5)
        return str(raised.value)

    with members(NAMES) as runs:
        parts = [work.result(30) for work in [run(Part, 10) for run in runs]]
        said = [work.result(60) for work in [run(leave, part) for run, part in zip(runs, parts, strict=True)]]
    assert f"round {PLAN.rounds // 2 + 1} of {PLAN.rounds}" in said[1]
    # Whoever asks first hears that it is not there, the others perhaps that it has left.
    assert all(re.search("source1 (did not arrive|left)", text) for text in (*said[:1], *said[2:])), said
    assert all("ranks" in text and "weight" in text for text in said)
