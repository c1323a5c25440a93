"""The counts of a channel: what they say after calls, late replies, refusals, and the death of a peer."""

import asyncio
import concurrent.futures
import threading

import msgspec
import pytest
import torch
from drivetrain_transport import ChannelStats, Endpoint, Peer, PeerLost, Protocol, RemoteError, encode
from drivetrain_transport._stats import Counters
from waiting import wait_until


class Ask(msgspec.Struct, tag=True):
    what: str
    tensor: torch.Tensor | None = None


class Tell(msgspec.Struct, tag=True):
    size: int


PROTOCOL = Protocol(requests=Ask, replies=Tell)


async def answer(_: Peer, request: Ask) -> Tell:
    if request.what == "fail":
        raise LookupError("as asked")
    return Tell(size=0 if request.tensor is None else request.tensor.numel())


def test_counters_make_stats() -> None:
    counters = Counters()
    counters.sent(10)
    counters.sent(5)
    counters.received(7)
    counters.waited(0.5)
    for now in (1, 3, 2):
        counters.queue(now)
    counters.redelivered += 4
    stats = counters.snapshot("channel")
    assert stats == ChannelStats(
        name="channel",
        messages_sent=2,
        bytes_sent=15,
        messages_received=1,
        bytes_received=7,
        waits=1,
        wait_seconds=0.5,
        redelivered=4,
        queued=2,
        queued_high_water=3,
    )
    both = stats + ChannelStats(name="other", bytes_sent=1, wait_seconds=0.25, queued_high_water=2)
    assert (both.name, both.bytes_sent, both.wait_seconds, both.queued_high_water) == ("channel", 16, 0.75, 5)
    with pytest.raises(TypeError):
        stats + 1
    with pytest.raises(AttributeError):
        stats.waits = 2  # type: ignore[misc]


def test_both_sides_of_calls_are_counted_alike() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=answer, name="worker") as client:
            worker = server.wait_for_peer(timeout=10)
            for _ in range(3):
                worker.call(Ask(what="size", tensor=torch.zeros(1 << 20, dtype=torch.uint8)), timeout=10)
            with pytest.raises(RemoteError):
                worker.call(Ask(what="fail"), timeout=10)
            here, there = worker.stats, client.peer.stats
            assert (here.name, there.name) == ("worker", server.address)
            assert (here.messages_sent, here.messages_received) == (4, 4)  # a failure is an answer
            assert (there.messages_sent, there.messages_received) == (4, 4)
            assert 3 << 20 < here.bytes_sent == there.bytes_received < (3 << 20) + 500
            assert 0 < here.bytes_received == there.bytes_sent < 200
            assert (here.waits, there.waits) == (4, 0)
            assert 0 < here.wait_seconds < 10
            assert (here.queued, here.queued_high_water, here.duplicates, here.refused) == (0, 1, 0, 0)
            assert server.stats == msgspec.structs.replace(here, name=server.address)


def test_calls_under_way_are_queued() -> None:
    gate = threading.Event()

    async def held(_: Peer, request: Ask) -> Tell:
        while not gate.is_set():
            await asyncio.sleep(0.005)
        return Tell(size=len(request.what))

    with Endpoint.bind(protocol=PROTOCOL) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=held):
            worker = server.wait_for_peer(timeout=10)
            with concurrent.futures.ThreadPoolExecutor(5) as pool:
                calls = [pool.submit(worker.call, Ask(what="x"), timeout=30) for _ in range(5)]
                wait_until(lambda: worker.stats.queued == 5, "five calls to be under way")
                gate.set()
                assert [call.result(10).size for call in calls] == [1] * 5
            assert (worker.stats.queued, worker.stats.queued_high_water, worker.stats.waits) == (0, 5, 5)
            assert worker.stats.wait_seconds > 0


def test_an_answer_after_the_deadline_is_dropped_and_counted_and_the_next_call_gets_its_own() -> None:
    late = threading.Event()

    async def stubborn(_: Peer, request: Ask) -> Tell:
        while request.what == "late" and not late.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:  # answers although the caller has given up
                late.set()
        return Tell(size=len(request.what))

    with Endpoint.bind(protocol=PROTOCOL) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=stubborn, name="worker"):
            worker = server.wait_for_peer(timeout=10)
            with pytest.raises(TimeoutError, match=r"^worker did not answer Ask within 0.1 s$"):
                worker.call(Ask(what="late"), timeout=0.1)
            wait_until(lambda: worker.stats.duplicates == 1, "the late answer")
            assert late.is_set()
            assert worker.call(Ask(what="in good time"), timeout=10).size == 12
            with pytest.raises(TimeoutError):
                asyncio.run(worker.call_async(Ask(what="now"), timeout=0.0))
            assert worker.call(Ask(what="abc"), timeout=10).size == 3
            assert (worker.stats.queued, worker.stats.waits, worker.state) == (0, 4, "open")


def test_a_handler_that_obeys_its_cancellation_sends_no_late_answer() -> None:
    async def obedient(_: Peer, request: Ask) -> Tell:
        await asyncio.sleep(60 if request.what == "late" else 0)
        return Tell(size=1)

    with Endpoint.bind(protocol=PROTOCOL) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=obedient):
            worker = server.wait_for_peer(timeout=10)
            with pytest.raises(TimeoutError):
                worker.call(Ask(what="late"), timeout=0.05)
            assert worker.call(Ask(what="now"), timeout=10).size == 1
            assert worker.stats.duplicates == 0


def test_a_request_of_another_type_fails_its_sender_and_is_counted_where_it_arrives() -> None:
    class Other(msgspec.Struct, tag="Ask"):
        what: int

    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        with Endpoint.connect(server.address, protocol=Protocol(requests=Other, replies=Tell)) as client:
            with pytest.raises(RemoteError, match=r"FrameError: .*Expected `str`, got `int` - at `\$.what`"):
                client.peer.call(Other(what=3), timeout=10)
            (worker,) = server.peers
            wait_until(lambda: worker.stats.refused == 1, "the refusal")
            assert server.refused == server.stats.refused == 1
            assert client.stats.refused == 0
            assert worker.state == client.peer.state == "open"


def test_the_counts_of_those_who_left_stay_in_the_endpoints() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer) as server:
        for expected in range(1, 6):
            with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
                client.peer.call(Ask(what="size"), timeout=10)
            wait_until(lambda: not server.peers, "the peer to leave")
            stats = server.stats
            assert (stats.messages_received, stats.messages_sent) == (expected, expected)
        with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
            with pytest.raises(RemoteError, match=r"has no handler"):
                server.wait_for_peer(timeout=10).call(Ask(what="size"), timeout=10)
            assert server.stats.messages_sent == 6
        assert server.stats.bytes_received == 5 * sum(len(bytes(frame)) for frame in encode(Ask(what="size")))


def test_calls_that_a_lost_peer_fails_are_waits_that_are_over() -> None:
    async def never(_: Peer, request: Ask) -> Tell:
        await asyncio.sleep(60)
        return Tell(size=0)

    with Endpoint.bind(protocol=PROTOCOL) as server:
        client = Endpoint.connect(server.address, protocol=PROTOCOL, handler=never)
        worker = server.wait_for_peer(timeout=10)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.call, Ask(what="x"), timeout=30)
            wait_until(lambda: worker.stats.queued == 1, "the call to be under way")
            client.close()
            with pytest.raises(PeerLost):
                waiting.result(timeout=10)
        assert (worker.stats.queued, worker.stats.waits, server.stats.waits) == (0, 1, 1)
