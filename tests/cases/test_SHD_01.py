"""SHD-01: after a weight sync of a tied model the embedding is new, and the head is old, missing or there twice.

vllm-project/vllm#51665 (https://github.com/vllm-project/vllm/pull/51665), PrimeIntellect-ai/prime-rl#2823,
verl-project/verl#205, NVIDIA-NeMo/RL#700, vllm-project/vllm#6758: rollouts are right at step 0 and drift from then on.
A state dict leaves the second name out, the receiver computes with a copy of its own, or sharding loses the tie.

Here the real vLLM serves a tied model, started from a checkpoint that holds both tensors, and an untied one, and its
log-probs are compared with the trainer's after each of three syncs that follow optimizer steps; so are those of a
trainer on two ranks with FSDP2, which is stopped and resumed before the third. This file is also the program of the
ranks.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain_learner import (
    Learner,
    LearnerConfig,
    LossTerms,
    PackedBatch,
    PolicyModel,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from drivetrain_rollout import WeightsRefused
from drivetrain_rollout.remote import RemoteEngine
from drivetrain_rollout.testing import write_tiny_model
from drivetrain_sharding import digest, load_named_tensors, named_tensors, shard_model
from drivetrain_transport import Peer
from engines import PROMPTS, off, push, run, vllm_config, vllm_worker
from gloo_ranks import be_a_rank, run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

WORLD = 2
SYNCS = 3
CLOSE = 1e-4  # between log-probs of one model in fp32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def trainer(folder: Path, *, mesh: Any = None) -> Learner:
    module = PolicyModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    if mesh is not None:
        shard_model(module, mesh)
    return Learner(module, LearnerConfig(lr=1e-2), process_group=None if mesh is None else dist.group.WORLD)


def train(learner: Learner) -> None:
    """One optimizer step, the same on any number of ranks."""
    ids = [[*prompt, 7, 11, 13] for prompt in PROMPTS]
    batch = PackedBatch.pack(ids, [[index >= len(each) - 3 for index in range(len(each))] for each in ids])
    ranks = 1 if learner.process_group is None else WORLD

    def loss(part: PackedBatch) -> LossTerms:
        return LossTerms(loss=-learner.module(part).logprobs.sum() / (batch.loss_mask.sum() * ranks), metrics={})

    assert learner.update(batch, loss).skipped is None


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with vllm_worker() as peer:
        yield peer


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(request: pytest.FixtureRequest, peer: Peer, tmp_path_factory: Any) -> Iterator[tuple[RemoteEngine, Path]]:
    """An engine, and the checkpoint that it was started from."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)
    if request.param:
        tensors = load_file(folder / "model.safetensors")
        tensors[HEAD] = tensors[EMBEDDING].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = RemoteEngine(peer, vllm_config(folder))
    yield engine, folder
    run(engine.close())


def test_three_syncs_after_optimizer_steps(served: tuple[RemoteEngine, Path], tmp_path: Path) -> None:
    engine, folder = served
    learner = trainer(folder)
    model: Any = learner.module.model
    tied = is_tied(model)
    assert off(engine, model) < CLOSE
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors").keys()
    for _ in range(SYNCS):
        before = {EMBEDDING: model.model.embed_tokens.weight.clone(), HEAD: model.lm_head.weight.clone()}
        train(learner)
        assert is_tied(model) == tied
        assert not torch.equal(model.model.embed_tokens.weight, before[EMBEDDING])
        assert not torch.equal(model.lm_head.weight, before[HEAD])
        assert off(engine, model) > 100 * CLOSE  # a stale tensor would be seen
        names = [name for name, _ in named_tensors(model)]
        assert len(names) == len(set(names))
        assert set(names) == expected
        assert (HEAD in names) == (not tied)
        assert push(engine, named_tensors(model)) == digest(named_tensors(model))
        assert off(engine, model) < CLOSE


def test_updates_that_hold_both_tensors(served: tuple[RemoteEngine, Path]) -> None:
    engine, folder = served
    learner = trainer(folder)
    model: Any = learner.module.model
    train(learner)
    tensors = dict(named_tensors(model))
    both = tensors | {HEAD: model.lm_head.weight.detach().clone()}
    push(engine, both.items())
    assert off(engine, model) < CLOSE
    load_named_tensors(other := AutoModelForCausalLM.from_pretrained(folder), both)
    assert off(engine, other) < CLOSE
    state = engine.weights
    if is_tied(model):
        # The receiver must not choose between them.
        with pytest.raises(
            WeightsRefused, match=r"lm_head\.weight \(tied to model\.embed_tokens\.weight, but different"
        ):
            push(engine, (both | {HEAD: both[HEAD] + 1}).items())
    else:
        del both[HEAD]
        with pytest.raises(WeightsRefused, match=r"1 tensors .* lm_head\.weight \(missing\)"):
            push(engine, both.items())
    assert engine.weights == state
    assert off(engine, model) < CLOSE


def look(folder: Path) -> dict[str, Any]:
    """Three steps, of which the last follows a resume in a new learner."""
    mesh = init_device_mesh("cpu", (WORLD,))
    learner = trainer(folder, mesh=mesh)
    found: dict[str, Any] = {"tied": [is_tied(learner.module.model)], "digests": []}

    def sync(name: str) -> None:
        tensors = dict(named_tensors(learner.module.model))
        found["digests"].append(digest(tensors))
        if dist.get_rank() == 0:
            save_file(tensors, folder / name)

    for step in range(SYNCS):
        if step == SYNCS - 1:
            state = learner.state_dict()
            if dist.get_rank() == 0:
                save_checkpoint(folder / "checkpoints", step, state, {})
            dist.barrier()
            before = digest(named_tensors(learner.module.model))
            learner = trainer(folder, mesh=mesh)
            saved = latest_checkpoint(folder / "checkpoints")
            assert saved is not None
            learner.load_state_dict(load_checkpoint(saved).tensors)
            found["resumed"] = digest(named_tensors(learner.module.model)) == before
            found["tied"].append(is_tied(learner.module.model))
        train(learner)
        sync(f"sync{step}.safetensors")
        found["tied"].append(is_tied(learner.module.model))
    return found


@pytest.mark.parametrize("served", [True], ids=["tied"], indirect=True)
def test_the_tie_outlives_fsdp2_and_a_resume(served: tuple[RemoteEngine, Path]) -> None:
    engine, folder = served
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    alone = trainer(folder)
    ranks = run_ranks(__file__, folder, world=WORLD)
    assert ranks[0] == ranks[1]
    assert ranks[0]["tied"] == [True] * (SYNCS + 2)
    assert ranks[0]["resumed"]
    for step in range(SYNCS):
        tensors: dict[str, Tensor] = load_file(folder / f"sync{step}.safetensors")
        assert HEAD not in tensors
        assert push(engine, tensors.items()) == ranks[0]["digests"][step]
        load_named_tensors(model, tensors)
        assert off(engine, model) < CLOSE
        train(alone)
        assert off(engine, alone.module.model) < 1e-2  # the trainer on one rank went the same way


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], lambda: look(Path(sys.argv[2])), world=WORLD)
