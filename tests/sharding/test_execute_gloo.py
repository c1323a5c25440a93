"""Random layouts of random models over processes that talk by gloo: bit for bit there and back.

The processes, which run this file too, are started once and go through all layouts. A process may be a rank of both
layouts; those at one place read each other's parameters out of shared memory.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drivetrain_sharding import Executor, Layout, TorchExchange
from gloo_ranks import be_a_rank, run_ranks
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from layouts import held_by, random_whole, same_bits
from random_layouts import layouts, plan_of, tensor_shapes
from torch import Tensor

WORLD = 4
SECONDS = 20.0
KINDS = ("apart", "shared", "both")
REST = 7.0  # what padding holds, before and after


@st.composite
def pairs(draw, kind):
    """Two layouts over up to four processes, and places for them.

    Kinds: nobody is a rank of both, and each is at a place of its own; some share places; some are ranks of both.
    """
    shapes, tie, most = draw(tensor_shapes()), draw(st.booleans()), WORLD if kind == "both" else WORLD // 2
    one, other = draw(layouts(shapes, tie, most)), draw(layouts(shapes, tie, most))
    order, again = draw(st.permutations(range(WORLD))), draw(st.permutations(range(WORLD)))
    ranks = order[: one.mesh.size], (again if kind == "both" else order[::-1])[: other.mesh.size]
    names = [draw(st.sampled_from("ab" if kind == "shared" else "abcd")) for _ in range(WORLD)]
    places = None if kind == "apart" else [[names[number] for number in side] for side in ranks]
    return one, other, ranks, places, draw(st.sampled_from([128, 512, 1 << 20]))


class Watched:
    """An exchange that notes which messages it was given, and in which memory they lie."""

    def __init__(self, inner):
        self.inner, self.rounds, self.votes = inner, [], []
        self.memory = defaultdict(dict)

    def agree(self, ok):
        self.votes.append(ok)
        return self.inner.agree(ok)

    def start(self, sends, receives):
        self.rounds.append([[(peer, flat.nbytes) for peer, flat in some] for some in (sends, receives)])
        for way, some in (("out", sends), ("into", receives)):
            for _, flat in some:
                storage = flat.untyped_storage()
                self.memory[way][storage.data_ptr()] = storage.nbytes()
        return self.inner.start(sends, receives)


class Ranks:
    """One process's part in updates between two layouts, both ways, in memory that the other processes read too."""

    def __init__(self, number, one, other, ranks, places, bucket, folder):
        self.sides, self.folder = (one, other), folder
        self.mine = [list(side).index(number) if number in side else None for side in ranks]
        back = None if places is None else places[::-1]
        self.plans = [plan_of(one, other, places, bucket), plan_of(other, one, back, bucket)]
        self.held: list[dict[str, Tensor] | None] = [None, None]
        self.watched = []
        self.executors = []
        for plan, first in zip(self.plans, (0, 1), strict=True):
            watched = Watched(TorchExchange(ranks[first], ranks[1 - first], timeout=SECONDS))
            self.watched.append(watched)
            source, target = self.mine[first], self.mine[1 - first]
            memory = lambda rank, first=first: self.open(first, rank)  # noqa: E731
            if source is None and target is None:
                self.executors.append(None)
                continue
            self.executors.append(Executor(plan, watched, source_rank=source, target_rank=target, memory=memory))

    def open(self, side, rank):
        """A rank's parameters, out of files that are shared memory."""
        found = {}
        for name, like in held_by(self.sides[side], rank, {}, filled=False).items():
            path = str(self.folder / f"{side}-{rank}-{name}")
            flat = torch.from_file(path, shared=True, size=max(like.numel(), 1), dtype=like.dtype)
            found[name] = flat[: like.numel()].view(like.shape)
        return found

    def set(self, side, values):
        """Give this process's parameters of one side other values."""
        if self.mine[side] is None:
            return
        self.held[side] = self.held[side] or self.open(side, self.mine[side])
        for name, value in values.items():
            self.held[side][name].copy_(value)

    def expect(self, side, whole):
        return None if self.mine[side] is None else held_by(self.sides[side], self.mine[side], whole, rest=REST)

    def round_trip(self, seed):
        """What is wrong after values went from one layout to the other and back."""
        first, second = self.sides
        whole = random_whole(first, seed)
        there = {name: value.to(second.spec(name).dtype) for name, value in whole.items()}
        back = {name: value.to(first.spec(name).dtype) for name, value in there.items()}
        self.set(0, self.expect(0, whole) or {})
        empty = lambda side: {n: torch.full_like(t, REST) for n, t in (self.expect(side, whole) or {}).items()}  # noqa: E731
        self.set(1, empty(1))
        wrong = []
        for way, (executor, values) in enumerate(zip(self.executors, (there, back), strict=True)):
            dist.barrier()
            if executor is not None:
                executor.run(self.held[way], self.held[1 - way])
            dist.barrier()
            if self.mine[1 - way] is not None and not same_bits(self.held[1 - way], self.expect(1 - way, values)):
                wrong.append(f"way {way}, seed {seed}")
            if way == 0:
                self.set(0, empty(0))
        return wrong

    def misbehaved(self):
        """What is wrong with the messages and the memory they were in."""
        wrong = []
        for watched, plan in zip(self.watched, self.plans, strict=True):
            every = [peers for some in watched.rounds for peers in some]
            wrong += [f"{peers} are not one message for each rank" for peers in every if not _ordered(peers)]
            out, into = (watched.memory[way] for way in ("out", "into"))
            if len(out) > 2 or len(into) > 2:
                wrong.append(f"{len(out)} and {len(into)} buckets")
            if sum((out | into).values()) > 2 * plan.bucket_bytes:
                wrong.append(f"buckets of {out} and {into} bytes, the limit is {plan.bucket_bytes}")
        return wrong


def _ordered(peers):
    ranks = [rank for rank, _ in peers]
    return ranks == sorted(set(ranks))


def look() -> list[Any]:
    folder = Path(sys.argv[2])
    found = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        one, other, ranks, places, bucket = case
        memory = folder / str(number)
        memory.mkdir(exist_ok=True)
        part = Ranks(
            dist.get_rank(), Layout.from_json(one), Layout.from_json(other), ranks,
            None if places is None else tuple(places), bucket, memory,
        )  # fmt: skip
        wrong = [fault for seed in range(2) for fault in part.round_trip(seed)]
        found.append({
            "wrong": wrong + part.misbehaved(), "rounds": part.plans[0].rounds,
            "copied": part.plans[0].bytes_copied, "votes": [watched.votes for watched in part.watched],
            "roles": [mine is not None for mine in part.mine],
        })  # fmt: skip
    return found


def test_round_trips_between_random_layouts(tmp_path):
    cases: list[Any] = []
    for kind in KINDS:

        @settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
        @given(pairs(kind))
        def collect(case):
            one, other, *rest = case
            cases.append([one.to_json(), other.to_json(), *rest])

        collect()
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    found = run_ranks(__file__, tmp_path, world=WORLD)
    for rank in found:
        assert [(number, case["wrong"]) for number, case in enumerate(rank) if case["wrong"]] == []
        for case in rank:
            assert case["votes"] == [[True] * 4 * any(case["roles"])] * 2
    kinds = {(case["rounds"] > 2, case["copied"] > 0, all(case["roles"])) for rank in found for case in rank}
    copies = [(False, False), (True, False), (True, True)]  # who is both finds something at its own place
    assert kinds == {(many, *kind) for many in (False, True) for kind in copies}  # of all kinds there were some


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:], look, world=WORLD)
