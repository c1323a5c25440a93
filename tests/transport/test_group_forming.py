"""How tensor groups are formed, and formed again: who is named when not all come, and who is let in."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from drivetrain_transport import PeerRefused, load_keys, make_keys
from drivetrain_transport.device import GroupBroken, Rendezvous, TensorGroup
from tensor_groups import PAIR, member_process, members, said
from waiting import wait_until


def test_a_group_that_is_not_complete_in_time_names_who_is_absent_and_what_others_wait_for() -> None:
    with Rendezvous.host() as host, Rendezvous.join(host.address) as second, ThreadPoolExecutor(1) as pool:
        other = pool.submit(TensorGroup.form, ("b", "d"), "b", second, timeout=2)
        wait_until(other.running, "b to wait")
        with pytest.raises(GroupBroken, match=r"within 0.5 s: b waits for b, d .* instead; c did not come") as caught:
            TensorGroup.form(("a", "b", "c"), "a", host, timeout=0.5)
        assert caught.value.missing == ("b", "c")
        with pytest.raises(GroupBroken, match="d did not come"):
            other.result(10)


def test_members_with_other_terms_do_not_meet() -> None:
    with Rendezvous.host() as host, Rendezvous.join(host.address) as second, ThreadPoolExecutor(1) as pool:
        other = pool.submit(TensorGroup.form, PAIR, "b", second, timeout=1, bucket_bytes=32)
        with pytest.raises(GroupBroken, match="b waits for a, b with gloo, buckets of 32 bytes instead"):
            TensorGroup.form(PAIR, "a", host, timeout=0.5, bucket_bytes=16)
        assert isinstance(other.exception(10), GroupBroken)


def test_a_process_that_dies_while_it_waits_is_named_and_its_successor_takes_the_seat() -> None:
    names = ("a", "b", "c")
    with Rendezvous.host() as host:
        with member_process(host.address, "cpu", names, "idle") as child:
            said(child, "joining")
            with pytest.raises(GroupBroken, match="c did not come") as caught:
                TensorGroup.form(names, "a", host, timeout=1)
            assert caught.value.missing == ("c",)  # b waits
            child.send_signal(signal.SIGKILL)
            with pytest.raises(GroupBroken, match=r"b its process ended while it waited, .* s ago; c did") as caught:
                TensorGroup.form(names, "a", host, timeout=3)
            assert caught.value.missing == ("b", "c")
        with member_process(host.address, "cpu", PAIR, "idle") as child:
            with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                assert group.broken == ""


def test_a_restarted_member_breaks_the_idle_old_group_and_joins_the_next() -> None:
    with Rendezvous.host() as host:
        with member_process(host.address, "cpu", PAIR, "idle") as first:
            said(first, "joining")
            old = TensorGroup.form(PAIR, "a", host, timeout=20)
            said(first, "formed")
            with member_process(host.address, "cpu", PAIR, "broadcast") as second:
                wait_until(lambda: "b came back as a new process" in old.broken, "the old group to be broken")
                with pytest.raises(GroupBroken, match="came back as a new process"):
                    old.broadcast({"x": torch.zeros(4)}, "b", timeout=10)
                old.close()
                with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                    assert group.generation == old.generation + 1
                    x = torch.zeros(5)
                    group.broadcast({"x": x}, "b", timeout=20)
                    assert x.tolist() == [7.0] * 5
                said(second, "joining")


def test_members_that_leave_and_come_make_new_generations() -> None:
    """Three, then two, then three: each generation works, and the departed are named to those who did not know."""
    with Rendezvous.host() as host, ThreadPoolExecutor(3) as pool:
        ways = {"a": host, "b": Rendezvous.join(host.address), "c": Rendezvous.join(host.address)}
        for names in (("a", "b", "c"), PAIR, ("a", "b", "c")):
            forming = [pool.submit(TensorGroup.form, names, name, ways[name], timeout=20) for name in names]
            groups = [future.result(30) for future in forming]
            x = {name: torch.full((9,), float(len(names)) if name == "a" else 0.0) for name in names}
            for done in [pool.submit(group.broadcast, {"x": x[group.me]}, "a", timeout=20) for group in groups]:
                done.result(30)
            assert all(tensor.tolist() == [len(names)] * 9 for tensor in x.values())
            groups[-1].close()
            wait_until(lambda groups=groups: f"{groups[-1].me} left" in groups[0].broken, "the news of who left")
            for group in groups:
                group.close()
        for way in reversed(ways.values()):
            way.close()


def test_members_on_several_hosts_need_a_word_about_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["first 1 net", "second 2 net"])
    monkeypatch.setattr("drivetrain_transport.device._forming.machine", lambda: next(hosts))
    with pytest.raises((ValueError, GroupBroken), match=r"several hosts \(first, second\).*trusted_network=True|left"):
        with members():
            pass
    hosts = iter(["first 1 net", "second 2 net"])
    with members(trusted_network=True) as (a, b):
        x = torch.zeros(2)
        sent = a(lambda group: group.send({"x": torch.ones(2)}, "b", timeout=20))
        b(lambda group: group.receive({"x": x}, "a", timeout=20)).result(30)
        sent.result(30)
    assert x.tolist() == [1.0, 1.0]


def test_a_rendezvous_that_others_reach_needs_keys_and_lets_only_their_holders_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no keys"):
        Rendezvous.host("tcp://0.0.0.0:0")
    keys = make_keys(tmp_path / "ours")
    with Rendezvous.host("tcp://0.0.0.0:0", keys=keys) as host:
        address = f"tcp://127.0.0.1:{host.address.rpartition(':')[2]}"
        with pytest.raises((TimeoutError, PeerRefused)):
            Rendezvous.join(address, keys=make_keys(tmp_path / "theirs"), timeout=1)
        with Rendezvous.join(address, keys=load_keys(tmp_path / "ours")) as second, ThreadPoolExecutor(1) as pool:
            other = pool.submit(TensorGroup.form, PAIR, "b", second, timeout=20)
            with TensorGroup.form(PAIR, "a", host, timeout=20) as group:
                assert group.broken == ""
                other.result(10).close()
