"""Single tensors between the members of a group: rounds of them, and what happens when two sides differ."""

import pytest
import torch
from drivetrain_transport.device import GroupBroken, Rendezvous, Round, TensorGroup
from tensor_groups import PAIR, member_process, members, on_each_device


def test_a_ring_of_three_exchanges_large_tensors_without_taking_turns() -> None:
    """Each sends before it receives: had they to take turns, nobody would begin."""
    names = ("a", "b", "c")

    def turn(group: TensorGroup) -> float:
        place = names.index(group.me)
        out, into = torch.full((1 << 21,), float(place)), torch.empty(1 << 21)
        group.exchange([(names[(place + 1) % 3], out)], [(names[place - 1], into)], timeout=20)
        assert into.min() == into.max()
        return into[0].item()

    with members(names) as run:
        assert [future.result(30) for future in [do(turn) for do in run]] == [2.0, 0.0, 1.0]


@on_each_device
def test_single_tensors_go_through_callables(devices: tuple[str, str]) -> None:
    def put(group: TensorGroup) -> None:
        send = group.sender(timeout=20)
        for number in range(3):
            send(torch.full((2, 3), number, device=group.device), "b")
        send(torch.empty(0, device=group.device), "b")

    def take(group: TensorGroup) -> list[int]:
        receive = group.receiver(timeout=20)
        tensors = [torch.zeros(2, 3, dtype=torch.int64, device=group.device) for _ in range(3)]
        for tensor in [*tensors, torch.empty(0, device=group.device)]:
            receive(tensor, "a")
        return [int(tensor.sum()) for tensor in tensors]

    with members(devices=devices) as (a, b):
        sent, taken = a(put), b(take)
        sent.result(30)
        assert taken.result(30) == [0, 6, 12]


def test_everyone_sends_to_everyone_with_two_rounds_in_flight() -> None:
    """Rounds are started before the one before is waited for, and each has its own numbers."""
    names = ("a", "b", "c")
    size, rounds = 1 << 18, 6

    def value(source: str, to: str, number: int) -> int:
        return number * 9 + names.index(source) * 3 + names.index(to)

    def work(group: TensorGroup) -> list[dict[str, list[int]]]:
        others = [name for name in names if name != group.me]
        out = [{name: torch.empty(size, dtype=torch.int32) for name in others} for _ in range(2)]
        into = [{name: torch.empty(size, dtype=torch.int32) for name in others} for _ in range(2)]

        def start(number: int) -> Round:
            for name, tensor in out[number % 2].items():
                tensor.fill_(value(group.me, name, number))
            return group.start([*out[number % 2].items()], [*into[number % 2].items()], timeout=30)

        got = []
        flying = [start(0)]
        for number in range(rounds):
            if number + 1 < rounds:
                flying.append(start(number + 1))
            flying[number].wait()
            got.append({name: tensor.unique().tolist() for name, tensor in into[number % 2].items()})
        return got

    with members(names) as run:
        for name, future in zip(names, [do(work) for do in run], strict=True):
            assert future.result(60) == [
                {other: [value(other, name, number)] for other in names if other != name} for number in range(rounds)
            ]
        stats = run[0](lambda group: group.stats).result()
    assert stats.bytes_sent == stats.bytes_received == rounds * 2 * size * 4


def test_a_round_moves_while_its_starter_does_something_else() -> None:
    """Nobody waits for the first round before the second and a broadcast are through."""

    def work(group: TensorGroup) -> list[float]:
        other = "b" if group.me == "a" else "a"
        x = {n: torch.full((1 << 16,), n + (group.me == "a") * 10.0) for n in (1, 2)}
        y = {n: torch.zeros(1 << 16) for n in x}
        z = torch.full((3,), 5.0) if group.me == "a" else torch.zeros(3)
        first, second = (group.start([(other, x[n])], [(other, y[n])], timeout=20) for n in x)
        group.broadcast({"z": z}, "a", timeout=20)
        second.wait()
        first.wait()
        first.wait()  # again, and nothing happens
        return [y[1].mean().item(), y[2].mean().item(), z.mean().item()]

    with members() as (a, b):
        there, here = a(work), b(work)
        assert there.result(30) == [1, 2, 5]
        assert here.result(30) == [11, 12, 5]


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [
        ([torch.ones(8)], [torch.zeros(4)], ("0", r"float32 \(8,\)", r"float32 \(4,\)")),
        ([torch.ones(4)], [torch.zeros(8)], ("0", r"float32 \(4,\)", r"float32 \(8,\)")),
        ([torch.ones(2, 3)], [torch.zeros(6)], ("0", r"float32 \(2, 3\)", r"float32 \(6,\)")),
        (
            [torch.ones(2), torch.ones(2, dtype=torch.int32)],
            [torch.zeros(2), torch.zeros(2)],
            ("1", r"int32 \(2,\)", r"float32 \(2,\)"),
        ),
        ([torch.ones(2)] * 2, [torch.zeros(2)], ("1", r"float32 \(2,\)", "nothing")),
        ([torch.ones(0)], [torch.zeros(1)], ("0", r"float32 \(0,\)", r"float32 \(1,\)")),
    ],
    ids=["too small", "too large", "shape", "dtype", "number", "empty"],
)
def test_two_sides_that_differ_are_told_both_and_the_group_goes_on(
    sent: list[torch.Tensor], expected: list[torch.Tensor], words: tuple[str, str, str]
) -> None:
    number, theirs, mine = words
    with members() as (a, b):
        out = a(lambda group: group.exchange([("b", tensor) for tensor in sent], [], timeout=20))
        with pytest.raises(ValueError, match=f"tensor {number} from a: {mine} is expected, and {theirs} is sent there"):
            b(lambda group: group.exchange([], [("a", tensor) for tensor in expected], timeout=20)).result(30)
        with pytest.raises(ValueError, match=f"tensor {number} to b: {theirs} is sent, and {mine} is expected there"):
            out.result(30)
        assert not any(tensor.any() for tensor in expected)
        out = a(lambda group: group.exchange([("b", torch.ones(3))], [], timeout=20))
        b(lambda group: group.exchange([], [("a", into := torch.zeros(3))], timeout=20) or into.sum().item())
        out.result(30)
        assert b(lambda group: group.broken).result() == ""


def test_callables_that_differ_are_told_and_go_on() -> None:
    x = torch.zeros(4)
    with members() as (a, b):
        sent = a(lambda group: group.sender(timeout=20)(torch.ones(9), "b"))
        with pytest.raises(ValueError, match=r"receive from a.*float32 \(4,\) is expected, and float32 \(9,\) is sent"):
            b(lambda group: group.receiver(timeout=20)(x, "a")).result(30)
        with pytest.raises(ValueError, match=r"send to b.*float32 \(9,\) is sent, and float32 \(4,\) is expected"):
            sent.result(30)
        assert x.sum() == 0
        sent = a(lambda group: group.sender(timeout=20)(torch.ones(4), "b"))
        b(lambda group: group.receiver(timeout=20)(x, "a")).result(30)
        sent.result(30)
    assert x.sum() == 4


def test_a_pair_that_differs_does_not_stop_the_others() -> None:
    names = ("a", "b", "c")

    def work(group: TensorGroup) -> list[float]:
        into = {name: torch.zeros(5 if (group.me, name) == ("b", "a") else 4) for name in names if name != group.me}
        out = [(name, torch.full((4,), float(names.index(group.me) + 1))) for name in into]
        if group.me == "c":
            group.exchange(out, [*into.items()], timeout=20)
        else:
            with pytest.raises(ValueError, match=r"tensor 0 (to|from) (a|b): float32"):
                group.exchange(out, [*into.items()], timeout=20)
        return [tensor.sum().item() for tensor in into.values()]

    with members(names) as run:
        for _ in range(2):  # nothing of the first time is in the way of the second
            assert [future.result(30) for future in [do(work) for do in run]] == [[0, 12], [0, 12], [4, 8]]


def test_a_member_with_nothing_to_move_need_not_come() -> None:
    with members(("a", "b", "c")) as (a, b, c):
        into = torch.zeros(3)
        sent = a(lambda group: group.exchange([("b", torch.ones(3))], [], timeout=20))
        b(lambda group: group.exchange([], [("a", into)], timeout=20)).result(30)
        sent.result(30)
        assert into.sum() == 3
        c(lambda group: group.exchange([], [], timeout=20)).result(30)


def test_who_does_not_come_to_a_round_is_named() -> None:
    with members(("a", "b", "c")) as (a, b, c):
        astray = c(lambda group: group.receive({"x": torch.zeros(1)}, "b", timeout=60))
        x = {name: torch.zeros(2) for name in ("b", "c")}
        waits = a(lambda group: group.exchange([*x.items()], [], timeout=2))
        sent = b(lambda group: group.exchange([], [("a", torch.zeros(2))], timeout=60))
        with pytest.raises(GroupBroken, match=r"timeout 2 s.*c did not arrive, it is in receive from b") as caught:
            waits.result(30)
        assert caught.value.missing == ("c",)
        for future in (astray, sent):
            with pytest.raises(GroupBroken, match="c did not arrive"):
                future.result(30)


def test_a_list_on_one_side_and_single_tensors_on_the_other_break_the_group_by_name() -> None:
    x = torch.zeros(1 << 16)
    with members() as (a, b):
        sent = a(lambda group: group.send({"x": x}, "b", timeout=20))
        with pytest.raises(GroupBroken, match="a does something else meanwhile"):
            b(lambda group: group.receiver(timeout=20)(x, "a")).result(30)
        with pytest.raises(GroupBroken, match="a does something else meanwhile"):
            sent.result(30)
    with members() as (a, b):
        sent = a(lambda group: group.sender(timeout=20)(x, "b"))
        with pytest.raises(GroupBroken, match="the other side moves no named list"):
            b(lambda group: group.receive({"x": x}, "a", timeout=20)).result(30)
        with pytest.raises(GroupBroken, match="the other side moves no named list"):
            sent.result(30)


def test_all_agree_or_nobody_does() -> None:
    with members(("a", "b", "c")) as run:
        for votes, wanted in (((True,) * 3, True), ((True, False, True), False), ((False, True, True), False)):
            answers = [do(lambda group, ok=ok: group.agree(ok, timeout=20)) for do, ok in zip(run, votes, strict=True)]
            assert [answer.result(30) for answer in answers] == [wanted] * 3


def test_who_agrees_with_one_who_does_something_else_is_told() -> None:
    with members() as (a, b):
        moves = b(lambda group: group.exchange([("a", torch.zeros(9))], [], timeout=20))
        with pytest.raises(GroupBroken, match="does something else meanwhile"):
            a(lambda group: group.agree(True, timeout=20)).result(30)
        with pytest.raises(GroupBroken, match="does something else meanwhile"):
            moves.result(30)


def test_a_death_between_start_and_wait_is_an_error_of_wait() -> None:
    with Rendezvous.host() as host, member_process(host.address, "cpu", PAIR, "die in a round"):
        with TensorGroup.form(PAIR, "a", host, timeout=60) as group:
            started = group.start([("b", torch.ones(1 << 22))], [], timeout=60)
            with pytest.raises(GroupBroken, match=r"exchange with b.*b is gone") as caught:
                started.wait()
            assert caught.value.missing == ("b",)
            with pytest.raises(GroupBroken, match="b is gone"):
                started.wait()


def test_tensors_made_in_inference_mode_are_filled_outside_it() -> None:
    """As engines' weights are."""
    with torch.inference_mode():
        small, large = torch.zeros(4), torch.zeros(1 << 12)
    with members() as (a, b):
        for number in (1, 2):
            source = {"small": torch.full((4,), float(number)), "large": torch.full((1 << 12,), float(number))}
            sent = a(lambda group, source=source: group.broadcast(source, "a", timeout=20))
            b(lambda group: group.broadcast({"small": small, "large": large}, "a", timeout=20)).result(30)
            sent.result(30)
            assert small.tolist() == [number] * 4
            assert large.mean() == number
