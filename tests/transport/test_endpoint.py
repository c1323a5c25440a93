"""Calls between two endpoints of one process: what arrives, what fails, by which name, and what is left afterwards."""

import asyncio
import concurrent.futures
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from drivetrain_transport import Endpoint, FrameError, Handler, Peer, PeerLost, Protocol, RemoteError, make_keys
from waiting import wait_until


class Add(msgspec.Struct, tag=True, frozen=True):
    x: int
    y: int


class Range(msgspec.Struct, tag=True):
    """Asks for the smallest and the largest value."""

    tensor: torch.Tensor


class Number(msgspec.Struct, tag=True):
    value: int


class Filled(msgspec.Struct, tag=True):
    tensor: torch.Tensor


PROTOCOL = Protocol(requests=Add | Range, replies=Number | Filled)


async def answer(peer: Peer, request: Add | Range) -> Number | Filled:
    match request:
        case Add(x=x, y=y) if y < 0:
            raise LookupError(f"no y below zero: {x} {y}")
        case Add(x=x, y=y):
            return Number(value=x + y)
        case Range(tensor=tensor):
            return Filled(tensor=torch.stack([tensor.min(), tensor.max()]))


@contextmanager
def pair(
    bound: Handler | None = answer, connected: Handler | None = answer, **options: object
) -> Iterator[tuple[Peer, Peer]]:
    """The binding side's peer, and the connecting side's."""
    with Endpoint.bind(protocol=PROTOCOL, handler=bound, **options) as server:  # type: ignore[arg-type]
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=connected, name="worker") as client:
            yield server.wait_for_peer(timeout=10), client.peer


def test_either_side_asks() -> None:
    with pair() as (worker, server):
        assert worker.call(Add(x=1, y=2), timeout=10) == Number(value=3)
        assert server.call(Add(x=40, y=2), timeout=10) == Number(value=42)
        assert worker.name == "worker"
        assert server.name.startswith("tcp://127.0.0.1:")
        assert (worker.state, server.state) == ("open", "open")


def test_calls_in_flight_are_matched_to_their_replies_in_any_order() -> None:
    gates: dict[int, asyncio.Event] = {}
    order: list[int] = []

    async def held(peer: Peer, request: Add) -> Number:
        gates[request.x] = asyncio.Event()
        if request.x == 2:  # the last one in lets the others go, last first
            for number in (2, 1, 0):
                gates[number].set()
        await gates[request.x].wait()
        order.append(request.x)
        return Number(value=request.x * 10)

    async def ask(peer: Peer) -> list[Number]:
        return await asyncio.gather(*(peer.call_async(Add(x=x, y=0), timeout=10) for x in range(3)))

    with pair(connected=held) as (worker, _):
        assert [reply.value for reply in asyncio.run(ask(worker))] == [0, 10, 20]
    assert sorted(order) == [0, 1, 2]


def test_ten_thousand_numbered_calls_arrive_once_each_with_a_slow_receiver() -> None:
    seen: list[int] = []

    async def slow(peer: Peer, request: Add) -> Number:
        seen.append(request.x)
        if request.x % 500 == 0:
            time.sleep(0.02)  # holds up the receiving loop
        return Number(value=request.x)

    async def ask(peer: Peer) -> list[Number]:
        return await asyncio.gather(*(peer.call_async(Add(x=x, y=0), timeout=60) for x in range(10_000)))

    with pair(connected=slow) as (worker, _):
        assert [reply.value for reply in asyncio.run(ask(worker))] == list(range(10_000))
    assert seen == list(range(10_000))


def test_many_threads_call_at_once() -> None:
    with pair() as (worker, _), concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda x: worker.call(Add(x=x, y=1), timeout=30).value, range(400)))
    assert replies == list(range(1, 401))


def test_a_request_tensor_may_be_overwritten_when_the_call_returns() -> None:
    """Frames alias the caller's memory until they are written; a reply says that they were."""
    buffer = torch.empty(1 << 20, dtype=torch.int32)  # 4 MiB
    with pair() as (worker, _):
        for k in range(100):
            buffer.fill_(k)
            reply = worker.call(Range(tensor=buffer), timeout=30)
            buffer.fill_(-1)
            assert reply.tensor.tolist() == [k, k]


def test_a_request_tensor_may_be_dropped_at_once() -> None:
    async def ask(peer: Peer) -> list[list[int]]:
        calls = [
            asyncio.ensure_future(peer.call_async(Range(tensor=torch.full((1 << 18,), k)), timeout=60))
            for k in range(50)
        ]
        await asyncio.sleep(0)
        gc.collect()
        return [reply.tensor.tolist() for reply in await asyncio.gather(*calls)]

    with pair() as (worker, _):
        assert asyncio.run(ask(worker)) == [[k, k] for k in range(50)]


def test_tensors_arrive_writable_without_a_copy_of_the_frame() -> None:
    async def fill(peer: Peer, request: Range) -> Filled:
        assert request.tensor.storage_offset() == 0
        request.tensor.add_(1)
        return Filled(tensor=request.tensor)

    source = torch.zeros(1 << 20)
    with pair(connected=fill) as (worker, _):
        reply = worker.call(Range(tensor=source), timeout=10)
        reply.tensor.add_(1)
    assert (reply.tensor.min(), reply.tensor.max(), source.max()) == (2, 2, 0)


def test_a_handler_that_raises_fails_its_caller_only(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as (worker, _):
        with pytest.raises(RemoteError, match=r"^worker: LookupError: no y below zero: 7 -1$") as caught:
            worker.call(Add(x=7, y=-1), timeout=10)
        assert caught.value.kind == "LookupError"
        assert caught.value.message == "no y below zero: 7 -1"
        assert worker.call(Add(x=7, y=1), timeout=10).value == 8
    assert "LookupError" in caplog.text


def test_a_handler_that_returns_something_else_is_an_error_at_the_caller() -> None:
    async def wrong(peer: Peer, request: Add) -> int:
        return 3

    with pair(connected=wrong) as (worker, _):
        with pytest.raises(RemoteError, match=r"TypeError: the handler returned a int, which is no reply"):
            worker.call(Add(x=1, y=1), timeout=10)


def test_an_endpoint_without_a_handler_says_so() -> None:
    with pair(connected=None) as (worker, _):
        with pytest.raises(RemoteError, match=r"this endpoint has no handler"):
            worker.call(Add(x=1, y=1), timeout=10)


def test_something_that_is_no_request_is_refused_before_it_is_sent() -> None:
    with pair() as (worker, _):
        with pytest.raises(ValueError, match=r"Number is no request of the protocol: it has Add, Range"):
            worker.call(Number(value=1), timeout=10)


def test_messages_over_the_limit_are_refused_by_their_sender() -> None:
    async def large(peer: Peer, request: Add) -> Filled:
        return Filled(tensor=torch.zeros(5000, dtype=torch.uint8))

    with pair(bound=large, max_message_bytes=4000) as (worker, server):
        with pytest.raises(ValueError, match=r"a Range of .* bytes is over the limit of 4000"):
            worker.call(Range(tensor=torch.zeros(5000, dtype=torch.uint8)), timeout=10)
        with pytest.raises(RemoteError, match=r"ValueError: a Filled of .* bytes is over the limit of 4000"):
            server.call(Add(x=1, y=1), timeout=10)
        assert worker.call(Add(x=1, y=1), timeout=10).value == 2


def test_the_smaller_limit_of_the_two_sides_holds() -> None:
    with Endpoint.bind(protocol=PROTOCOL, handler=answer, max_message_bytes=4000) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=answer, max_message_bytes=3000) as client:
            for peer in (server.wait_for_peer(timeout=10), client.peer):
                with pytest.raises(ValueError, match=r"over the limit of 3000"):
                    peer.call(Range(tensor=torch.zeros(3500, dtype=torch.uint8)), timeout=10)
                assert peer.call(Add(x=1, y=1), timeout=10).value == 2


def test_an_endpoint_that_fails_says_so_to_everyone(caplog: pytest.LogCaptureFixture) -> None:
    async def never(peer: Peer, request: Add) -> Number:
        await asyncio.sleep(60)
        return Number(value=0)

    server = Endpoint.bind(protocol=PROTOCOL)
    with Endpoint.connect(server.address, protocol=PROTOCOL, handler=never) as client:
        worker = server.wait_for_peer(timeout=10)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.call, Add(x=1, y=1), timeout=30)
            wait_until(lambda: bool(worker._pending), "the call to be under way")
            server._core.post(lambda: int("no number"))
            with pytest.raises(PeerLost, match=r"this endpoint failed with ValueError"):
                waiting.result(timeout=10)
        assert client.wait_closed(timeout=10) == "lost"
        with pytest.raises(RuntimeError, match=f"the endpoint at {server.address} failed") as caught:
            server.close()
        assert isinstance(caught.value.__cause__, ValueError)
        server.close()


def test_a_deadline_names_peer_request_and_seconds_and_cancels_the_handler() -> None:
    log: list[str] = []

    async def sleepy(peer: Peer, request: Add) -> Number:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        return Number(value=0)

    with pair(connected=sleepy) as (worker, _):
        with pytest.raises(TimeoutError, match=r"^worker did not answer Add within 0.1 s$"):
            worker.call(Add(x=1, y=1), timeout=0.1)
        wait_until(lambda: log == ["cancelled"], "the handler's cancellation")
        with pytest.raises(TimeoutError, match=r"^worker did not answer Add within 0.1 s$"):
            asyncio.run(worker.call_async(Add(x=1, y=1), timeout=0.1))
        wait_until(lambda: log == ["cancelled"] * 2, "the second cancellation")


def test_calls_given_up_at_once_leave_nothing_at_the_other_side() -> None:
    with pair() as (worker, server):
        for _ in range(50):
            with pytest.raises(TimeoutError):
                worker.call(Add(x=1, y=1), timeout=0)
        assert worker.call(Add(x=1, y=1), timeout=10).value == 2
        wait_until(lambda: not server._tasks, "the handlers' end")
        assert not worker._pending


def test_a_cancelled_call_cancels_the_handler() -> None:
    log: list[str] = []

    async def sleepy(peer: Peer, request: Add) -> Number:
        log.append("started")
        try:
            await asyncio.sleep(60)
        finally:
            log.append("ended")
        return Number(value=0)

    async def ask(peer: Peer) -> None:
        call = asyncio.ensure_future(peer.call_async(Add(x=1, y=1), timeout=60))
        async with asyncio.timeout(10):
            while not log:
                await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with pair(connected=sleepy) as (worker, _):
        asyncio.run(ask(worker))
        wait_until(lambda: log == ["started", "ended"], "the handler's end")


def test_a_handler_may_call_back_but_not_block() -> None:
    async def back(peer: Peer, request: Add) -> Number:
        if request.y == 0:
            peer.call(Add(x=1, y=1), timeout=1)
        reply = await peer.call_async(Add(x=request.x, y=100), timeout=10)
        return Number(value=reply.value)

    with pair(connected=back) as (worker, _):
        assert worker.call(Add(x=5, y=1), timeout=10).value == 105
        with pytest.raises(RemoteError, match=r"RuntimeError: Peer.call would block the loop"):
            worker.call(Add(x=5, y=0), timeout=10)


def test_a_computing_owner_does_not_delay_the_endpoint() -> None:
    with pair() as (worker, _):
        busy = threading.Event()

        def compute() -> None:
            while not busy.is_set():
                sum(range(1000))

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            assert worker.call(Add(x=1, y=2), timeout=10).value == 3
        finally:
            busy.set()
            thread.join()


def test_a_goodbye_fails_what_waits_and_names_it() -> None:
    async def never(peer: Peer, request: Add) -> Number:
        await asyncio.sleep(60)
        return Number(value=0)

    with Endpoint.bind(protocol=PROTOCOL) as server:
        client = Endpoint.connect(server.address, protocol=PROTOCOL, handler=never, name="worker")
        worker = server.wait_for_peer(timeout=10)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.call, Add(x=1, y=1), timeout=30)
            wait_until(lambda: bool(worker._pending), "the call to be under way")
            client.close()
            with pytest.raises(PeerLost, match=r"^worker said goodbye: Add gets no reply$"):
                waiting.result(timeout=10)
        assert worker.state == "goodbye"
        assert server.peers == ()
        with pytest.raises(PeerLost, match=r"^worker said goodbye: Add gets no reply$"):
            worker.call(Add(x=1, y=1), timeout=10)
        assert client.wait_closed(timeout=10) == "closed"
        with pytest.raises(PeerLost, match=r"was left: this endpoint closed: Add gets no reply"):
            client.peer.call(Add(x=1, y=1), timeout=10)


def test_the_connecting_side_learns_that_the_other_closed_after_all_its_replies() -> None:
    async def large(peer: Peer, request: Add) -> Filled:
        return Filled(tensor=torch.full((1 << 22,), request.x))

    server = Endpoint.bind(protocol=PROTOCOL, handler=large)
    with Endpoint.connect(server.address, protocol=PROTOCOL) as client:
        with pytest.raises(TimeoutError, match=r"is still there after 0.05 s"):
            client.wait_closed(timeout=0.05)
        assert client.peer.call(Add(x=3, y=0), timeout=30).tensor[-1] == 3
        server.close()
        assert client.wait_closed(timeout=10) == "goodbye"
        assert client.peers == ()


def test_waiting_for_peers_counts_them() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server:
        with pytest.raises(TimeoutError, match=f"0 of 1 peers joined {server.address} within 0.05 s"):
            server.wait_for_peer(timeout=0.05)
        clients = [Endpoint.connect(server.address, protocol=PROTOCOL, handler=answer, name=f"w{k}") for k in range(3)]
        peers = server.wait_for_peers(3, timeout=10)
        assert [peer.name for peer in peers] == ["w0", "w1", "w2"]
        assert [peer.call(Add(x=k, y=0), timeout=10).value for k, peer in enumerate(peers)] == [0, 1, 2]
        clients[1].close()
        wait_until(lambda: len(server.peers) == 2, "a peer to leave")
        assert [peer.name for peer in server.peers] == ["w0", "w2"]
        with pytest.raises(TimeoutError, match=r"2 of 3 peers"):
            server.wait_for_peers(3, timeout=0.05)
        for client in clients:
            client.close()


def test_closing_wakes_who_waits_for_peers() -> None:
    server = Endpoint.bind(protocol=PROTOCOL)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait_for_peer, 30)
        server.close()
        with pytest.raises(ConnectionError, match=r"closed with 0 of 1 peers"):
            waiting.result(timeout=10)


def test_sides_keep_to_their_methods() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server:
        with pytest.raises(RuntimeError, match=r"peer belongs to a connecting endpoint"):
            _ = server.peer
        with pytest.raises(RuntimeError, match=r"wait_closed belongs to a connecting endpoint"):
            server.wait_closed(timeout=1)


def test_a_handler_cannot_close_its_own_endpoint() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server:

        async def close(peer: Peer, request: Add) -> Number:
            client.close()
            return Number(value=0)

        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=close) as client:
            with pytest.raises(RemoteError, match=r"a handler cannot close its own endpoint"):
                server.wait_for_peer(timeout=10).call(Add(x=1, y=1), timeout=10)


def test_a_reply_of_another_version_of_the_structs_is_a_frame_error() -> None:
    class Number2(msgspec.Struct, tag="Number"):
        value: str

    other = Protocol(requests=Add | Range, replies=Number2)

    async def text(peer: Peer, request: Add) -> Number2:
        return Number2(value="three")

    with Endpoint.bind(protocol=PROTOCOL) as server:
        with Endpoint.connect(server.address, protocol=other, handler=text):
            with pytest.raises(FrameError, match=r"Expected `int`, got `str` - at `\$.value`"):
                server.wait_for_peer(timeout=10).call(Add(x=1, y=1), timeout=10)


def test_a_port_in_use_is_named() -> None:
    with Endpoint.bind(protocol=PROTOCOL) as server:
        with pytest.raises(OSError, match=f"cannot bind {server.address}: Address already in use"):
            Endpoint.bind(server.address, protocol=PROTOCOL)


def test_an_ipc_path_in_use_is_named_and_its_owner_goes_on(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with Endpoint.bind(address, protocol=PROTOCOL, handler=answer) as server:
        with pytest.raises(OSError, match=r"somebody listens there"):
            Endpoint.bind(address, protocol=PROTOCOL)
        with Endpoint.connect(address, protocol=PROTOCOL) as client:
            assert client.peer.call(Add(x=1, y=2), timeout=10).value == 3
        assert server.address == address
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("liveness", [0.1, 0.0, -1.0, float("nan"), 1e6])
def test_a_liveness_out_of_range_is_named(liveness: float) -> None:
    with pytest.raises(ValueError, match=r"liveness is"):
        Endpoint.bind(protocol=PROTOCOL, liveness=liveness)


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    def cycle(folder: Path) -> None:
        with Endpoint.bind(f"ipc://{folder}/s", protocol=PROTOCOL, handler=answer) as server:
            with Endpoint.connect(server.address, protocol=PROTOCOL, handler=answer) as client:
                client.peer.call(Range(tensor=torch.zeros(1 << 20)), timeout=10)
                server.wait_for_peer(timeout=10).call(Add(x=1, y=1), timeout=10)
            server.close()

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    cycle(tmp_path)  # pyzmq keeps one thread of its own for the process's life
    before = left()
    for _ in range(5):
        cycle(tmp_path)
    wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)), f"no more than {before}")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain-transport")]
    assert list(tmp_path.iterdir()) == []


def test_keys_make_a_conversation_private(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    with Endpoint.bind(protocol=PROTOCOL, handler=answer, keys=keys) as server:
        with Endpoint.connect(server.address, protocol=PROTOCOL, handler=answer, keys=keys) as client:
            source = torch.arange(5 << 20)  # 40 MiB, in pieces
            reply = client.peer.call(Range(tensor=source), timeout=60)
            assert reply.tensor.tolist() == [0, (5 << 20) - 1]
            assert server.wait_for_peer(timeout=10).call(Add(x=1, y=2), timeout=10).value == 3
