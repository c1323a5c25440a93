"""A plan moves every element once, from the closest holder, in rounds that fit; checked element by element."""

import math
import time
from collections import Counter, defaultdict

import pytest
import torch
from drivetrain_sharding import (
    Box,
    Layout,
    LayoutMismatch,
    Mesh,
    Parameter,
    Part,
    Split,
    TensorSpec,
    make_plan,
    train_layout,
    vllm_layout,
)
from hypothesis import given, settings
from random_layouts import cases, plan_of

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def layout(mesh, shapes, *, dtype=torch.float32, splits=(), ties=None):
    """Every tensor is a parameter of its own, all split in one way."""
    return Layout(
        mesh=Mesh(tuple(mesh.items())),
        tensors=tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()),
        parameters=tuple(Parameter(name=name, parts=(Part(tensor=name, splits=splits),)) for name in shapes),
        ties=ties or {},
    )


def all_transfers(plan):
    """(round, transfer), as the targets see it; round None: a copy at the target's place."""
    found = []
    for rank in range(plan.target.mesh.size):
        found += [(None, transfer) for transfer in plan.copies(rank)]
        found += [(number, transfer) for number, part in enumerate(plan.receives(rank)) for transfer in part]
    return found


def closeness(places, source, target):
    if places is None:
        return 0
    first, second = places[0][source].split("/"), places[1][target].split("/")
    return 2 if first == second else int(first[0] == second[0])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_every_element_arrives_once_where_it_belongs(case):
    source, target, places, bucket = case
    plan = plan_of(source, target, places, bucket)
    whole, start = {}, 1
    for spec in source.tensors:
        whole[spec.name] = torch.arange(start, start + math.prod(spec.shape)).reshape(spec.shape)
        start += math.prod(spec.shape)

    def memory(side, rank, filled):
        held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in side.parameter_shapes(rank).items()}
        for piece in side.pieces(rank) if filled else ():
            held[piece.parameter][tuple(map(slice, piece.at.start, piece.at.stop))] = piece.box.of(whole[piece.tensor])
        return held

    given_ = [memory(source, rank, True) for rank in range(source.mesh.size)]
    got = [memory(target, rank, False) for rank in range(target.mesh.size)]
    for _, transfer in all_transfers(plan):
        here = transfer.put[1].of(got[transfer.target][transfer.put[0]])
        assert not here.any()  # nothing comes twice
        here.copy_(transfer.taken[1].of(given_[transfer.source][transfer.taken[0]]).reshape(here.shape))
        assert torch.equal(here.reshape(transfer.box.shape), transfer.box.of(whole[transfer.tensor]))
        assert transfer.source_dtype == source.spec(transfer.tensor).dtype
        assert transfer.target_dtype == target.spec(transfer.tensor).dtype
    for rank in range(target.mesh.size):
        wanted = memory(target, rank, True)
        assert all(torch.equal(got[rank][name], wanted[name]) for name in wanted)  # padding is still 0


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cases())
def test_elements_come_from_the_closest_holder_and_copies_need_no_bucket(case):
    source, target, places, bucket = case
    plan = plan_of(source, target, places, bucket)
    best = {}
    for rank in range(target.mesh.size):
        for spec in source.tensors:
            best[rank, spec.name] = torch.full(spec.shape, -1)
        for giver in range(source.mesh.size):
            for piece in source.pieces(giver):
                box = piece.box.of(best[rank, piece.tensor])
                box.copy_(box.clamp(min=closeness(places, giver, rank)))
    for number, transfer in all_transfers(plan):
        close = closeness(places, transfer.source, transfer.target)
        assert (transfer.box.of(best[transfer.target, transfer.tensor]) == close).all()
        assert (number is None) == (close == 2)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cases())
def test_rounds_fit_and_both_sides_agree(case):
    source, target, places, bucket = case
    plan = plan_of(source, target, places, bucket)
    names = places or ([f"s{r}" for r in range(source.mesh.size)], [f"t{r}" for r in range(target.mesh.size)])
    sent, received = defaultdict(list), defaultdict(list)
    out, into = Counter(), Counter()
    for rank in range(source.mesh.size):
        assert len(plan.sends(rank)) == plan.rounds
        for number, part in enumerate(plan.sends(rank)):
            for transfer in part:
                assert transfer.source == rank
                sent[number, rank, transfer.target].append(transfer)
                out[number, names[0][rank]] += transfer.room
    for rank in range(target.mesh.size):
        for number, part in enumerate(plan.receives(rank)):
            for transfer in part:
                received[number, transfer.source, rank].append(transfer)
                into[number, names[1][rank]] += transfer.room
    assert sent == received
    peak = 0
    for place in {*names[0], *names[1]}:
        both = place in names[0] and place in names[1]
        for number in range(plan.rounds):
            assert max(out[number, place], into[number, place]) <= plan.bucket_bytes // (1 + both)
            held = out[number, place] + out[number + 1, place] + into[number, place] + into[number - 1, place]
            peak = max(peak, held)
    assert plan.peak_bytes == peak <= 2 * plan.bucket_bytes
    traffic = torch.zeros(source.mesh.size, target.mesh.size, dtype=torch.int64)
    for _, transfer in all_transfers(plan):
        traffic[transfer.source, transfer.target] += transfer.nbytes
    assert torch.equal(plan.traffic(), traffic)
    assert plan.bytes_moved == sum(transfer.nbytes for part in sent.values() for transfer in part)
    assert plan.bytes_moved + plan.bytes_copied == int(traffic.sum())
    peers = Counter(key for number, s, t in sent for key in ((number, "s", s), (number, "t", t)))
    assert f"a rank has {max(peers.values(), default=0)} messages in a round at most" in plan.describe()


def test_a_plan_is_the_same_wherever_it_is_made():
    source = layout({"copy": 3, "dp": 2}, {"w": (9, 5), "v": (7,)}, splits=(Split(over="dp", dim=0),))
    target = layout({"tp": 4}, {"w": (9, 5), "v": (7,)}, dtype=torch.bfloat16)
    places = (["h0/0", "h0/1", "h1/0", "h1/1", "h2/0", "h2/1"], ["h0/0", "h1/5", "h3/0", "h3/1"])
    here = make_plan(source, target, places=places)
    there = make_plan(Layout.from_json(source.to_json()), Layout.from_json(target.to_json()), places=places)
    assert all_transfers(here) == all_transfers(there)


def test_the_narrower_dtype_travels():
    wide, narrow = layout({}, {"w": (3, 5)}), layout({}, {"w": (3, 5)}, dtype=torch.bfloat16)
    for source, target in ((wide, narrow), (narrow, wide)):
        plan = make_plan(source, target)
        [[transfer]] = plan.receives(0)
        assert transfer.wire_dtype == torch.bfloat16
        assert (transfer.nbytes, transfer.room, plan.bytes_moved) == (30, 32, 30)


@pytest.mark.parametrize(("copies", "targets"), [(2, 3), (4, 3), (3, 8)])
def test_copies_share_the_sending(copies, targets):
    shapes = {f"w{index}": (8, 8) for index in range(12)}
    plan = make_plan(layout({"dp": copies}, shapes), layout({"replica": targets}, shapes))
    sent = plan.traffic().sum(1)
    assert int(sent.max() - sent.min()) <= 8 * 8 * 4  # one tensor
    assert int(sent.sum()) == targets * 12 * 8 * 8 * 4


def test_tensors_of_different_kinds_share_the_sending():
    shapes = {"w0": (8, 8), "w1": (8, 8), "w2": (8, 8), "v": (64,)}
    plan = make_plan(layout({"dp": 2}, shapes), layout({}, shapes))
    assert plan.traffic().tolist() == [[2 * 256], [2 * 256]]


def test_who_has_no_choice_is_served_first():
    shapes = {f"w{index}": (8, 8) for index in range(5)}
    places = (["h0/0", "h1/0"], ["h0/1", "h2/0"])
    plan = make_plan(layout({"dp": 2}, shapes), layout({"replica": 2}, shapes), places=places)
    assert plan.traffic().tolist() == [[5 * 256, 0], [0, 5 * 256]]
    assert "0 B copied in place, 1.25 KiB within hosts, 1.25 KiB between hosts" in plan.describe()


def test_what_is_at_the_target_is_copied_whole_and_in_no_round():
    shapes = {"w": (1000, 100)}
    source = layout({"dp": 2}, shapes, splits=(Split(over="dp", dim=0),))
    plan = make_plan(source, layout({"tp": 2}, shapes), bucket_bytes=4096, places=(["a", "b"], ["a", "b"]))
    [copy] = plan.copies(1)
    assert (copy.source, copy.box) == (1, Box((500, 0), (1000, 100)))
    assert plan.bytes_copied == plan.bytes_moved == 1000 * 100 * 4
    assert all(sum(t.room for t in part) <= 2048 for part in plan.receives(1))
    nowhere = make_plan(source, source, places=(["a", "b"], ["a", "b"]))
    assert (nowhere.rounds, nowhere.bytes_moved, nowhere.peak_bytes) == (0, 0, 0)
    assert "0 rounds" in nowhere.describe()


def test_a_tensor_larger_than_the_bucket_is_cut_into_bands():
    plan = make_plan(layout({}, {"w": (64, 100)}), layout({}, {"w": (64, 100)}), bucket_bytes=4096)
    boxes = [transfer.box for part in plan.receives(0) for transfer in part]
    assert all(box.start[1] == 0 and box.stop[1] == 100 for box in boxes)  # whole rows: one run of memory
    assert plan.rounds == math.ceil(64 * 100 * 4 / 4096)


def test_experts_on_different_ranks_are_sent_side_by_side():
    """Each source rank holds one expert: one after the other, they would take four times the rounds."""
    names = [f"e{index}" for index in range(4)]
    specs = tuple(TensorSpec(name=name, dtype=torch.float32, shape=(64, 64)) for name in names)
    parts = tuple(Part(tensor=name, expert=index) for index, name in enumerate(names))
    experts = Parameter(name="experts", parts=parts, experts=Split(over="ep", dim=0))
    source = Layout(mesh=Mesh((("ep", 4),)), tensors=specs, parameters=(experts,))
    target = layout({"tp": 4}, dict.fromkeys(names, (64, 64)), splits=(Split(over="tp", dim=0),))
    plan = make_plan(source, target, bucket_bytes=1024)
    assert plan.rounds == 64 * 64 * 4 // 1024
    assert all(len({t.source for t in part}) == 4 for part in plan.receives(0))


def test_overlapping_boxes_are_sent_once():
    """Of one tensor, a rank can hold rows in one parameter and columns in another."""
    spec = TensorSpec(name="w", dtype=torch.float32, shape=(6, 6))
    rows = Parameter(name="rows", parts=(Part(tensor="w", splits=(Split(over="dp", dim=0),)),))
    columns = Parameter(name="columns", parts=(Part(tensor="w", splits=(Split(over="dp", dim=1),)),))
    source = Layout(mesh=Mesh((("dp", 3),)), tensors=(spec,), parameters=(rows, columns))
    plan = make_plan(source, layout({}, {"w": (6, 6)}))
    assert plan.bytes_moved == 6 * 6 * 4
    count = torch.zeros(6, 6)
    for _, transfer in all_transfers(plan):
        transfer.box.of(count).add_(1)
    assert (count == 1).all()


def test_all_mismatches_are_in_one_error():
    source = layout({"dp": 2}, {"a": (4, 4), "mine": (2,), "shape": (2, 3), "embed": (8, 2)}, ties={"head": "embed"})
    target = layout({"dp": 2}, {"a": (4, 4), "theirs": (2,), "shape": (6,), "embed": (8, 2), "head": (8, 2)})
    with pytest.raises(LayoutMismatch) as raised:
        make_plan(source, target)
    text = str(raised.value)
    assert len(raised.value.problems) == 5
    for problem in (
        "only the source has mine",
        "only the target has theirs",
        "shape has shape (2, 3) in the source, (6,) in the target",
        "head is tied to embed in the source, to none in the target",
        "embed is tied to head in the source, to none in the target",
    ):
        assert problem in text, problem
        assert problem in raised.value.problems


def test_a_tie_may_have_either_name_first():
    shapes = {"w": (4, 2)}
    source, target = layout({}, {"embed": (4, 2)}, ties={"head": "embed"}), layout({}, shapes, ties={})
    with pytest.raises(LayoutMismatch, match="only the source has embed"):
        make_plan(source, target)
    turned = layout({}, {"head": (4, 2)}, ties={"embed": "head"})
    [[transfer]] = make_plan(source, turned).receives(0)
    assert (transfer.tensor, transfer.taken[0], transfer.put[0]) == ("head", "embed", "head")
    with pytest.raises(LayoutMismatch, match="only the source has head"):
        make_plan(source, layout({}, {"embed": (4, 2)}))


def test_only_float_casts_are_planned():
    integers = layout({}, {"w": (4,)}, dtype=torch.int32)
    assert make_plan(integers, integers).bytes_moved == 16
    for other in (torch.float32, torch.int64):
        with pytest.raises(LayoutMismatch, match=r"w is torch\.int32 in the source"):
            make_plan(integers, layout({}, {"w": (4,)}, dtype=other))


def test_elements_that_nobody_holds_are_named():
    whole = layout({"dp": 2}, {"w": (4, 4)})
    diagonal = layout({"dp": 2}, {"w": (4, 4)}, splits=(Split(over="dp", dim=0), Split(over="dp", dim=1)))
    with pytest.raises(LayoutMismatch, match=r"no source rank holds all of w that target ranks \[0, 1\] need"):
        make_plan(diagonal, whole)
    with pytest.raises(LayoutMismatch, match="no target rank holds 8 elements of w"):
        make_plan(whole, diagonal)
    missing = Layout(mesh=Mesh(()), tensors=whole.tensors, parameters=())
    with pytest.raises(LayoutMismatch, match="no target rank holds 16 elements of w"):
        make_plan(whole, missing)
    with pytest.raises(LayoutMismatch, match="no source rank holds all of w"):
        make_plan(missing, whole)


def test_what_cannot_be_asked():
    side = layout({"dp": 2}, {"w": (4, 4)})
    with pytest.raises(LayoutMismatch, match="the target's mesh has 2 ranks, places names 1"):
        make_plan(side, side, places=(["a", "b"], ["c"]))
    with pytest.raises(ValueError, match="bucket_bytes=8"):
        make_plan(side, side, bucket_bytes=8)
    with pytest.raises(ValueError, match=r"bucket_bytes=32 is too small for w: .* 64 of the 32 bytes"):
        make_plan(layout({}, {"w": (4, 4)}), layout({"dp": 4}, {"w": (4, 4)}), bucket_bytes=32)
    plan = make_plan(side, side)
    for ask in (plan.sends, plan.receives, plan.copies):
        with pytest.raises(ValueError, match=r"rank 2: the .* ranks are 0 to 1"):
            ask(2)


def test_a_70b_over_1024_ranks_is_planned_in_seconds():
    source = train_layout(LLAMA_70B, Mesh((("dp", 512),)), dtype=torch.float32, fsdp="dp")
    target = vllm_layout(LLAMA_70B, tp=8, replicas=64, dtype=torch.bfloat16)
    start = time.monotonic()
    plan = make_plan(source, target)
    assert time.monotonic() - start < 30.0  # takes about one
    traffic = plan.traffic()
    shards = [sum(piece.box.numel for piece in target.pieces(rank)) * 2 for rank in range(8)]
    assert traffic.sum(0).tolist() == shards * 64
    assert int(traffic.sum(1).max()) < 1.01 * int(traffic.sum()) / 512
    fewest = math.ceil(max(int(traffic.sum(0).max()), int(traffic.sum(1).max())) / plan.bucket_bytes)
    assert plan.rounds <= 1.1 * fewest
    received = [transfer for part in plan.receives(200) for transfer in part if transfer.source == 77]
    assert received == [transfer for part in plan.sends(77) for transfer in part if transfer.target == 200]
    assert sum(transfer.nbytes for transfer in received) == traffic[77, 200]
