"""TRP-02: a tensor sent without a copy is overwritten, or freed, before ZeroMQ has written it out: mixed messages.

vllm-project/vllm PR 50053, PR 17203, PR 53217; zeromq/pyzmq#1032. There a send returned while ZeroMQ still read the
memory, and the tracker that was to tell covered the last frame only, which was small and therefore copied at once.

Here `call` returns when the other side has the message, so what was sent may be overwritten from then on, whatever the
last frame is; and frames hold on to their memory, so a tensor may be dropped at any time.
"""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch
from drivetrain_transport import Endpoint, Peer, Protocol

ELEMENTS = 1 << 20  # 4 MiB
ROUNDS = 1000

RECEIVER = """
import sys, time, msgspec, torch
from drivetrain_transport import Endpoint, Protocol

class Step(msgspec.Struct, tag=True):
    number: int
    tensor: torch.Tensor
    last: torch.Tensor

class Seen(msgspec.Struct, tag=True):
    number: int
    smallest: int
    largest: int
    last: int

async def look(peer, step):
    if step.number % 20 == 0:
        time.sleep(0.02)  # slow: holds up the loop that takes the messages in
    smallest, largest = step.tensor.aminmax()
    return Seen(number=step.number, smallest=int(smallest), largest=int(largest), last=int(step.last))

with Endpoint.connect(sys.argv[1], protocol=Protocol(requests=Step, replies=Seen), handler=look) as endpoint:
    endpoint.wait_closed()
"""


class Step(msgspec.Struct, tag=True):
    number: int
    tensor: torch.Tensor
    last: torch.Tensor
    """Small, so that ZeroMQ copies it: its sending says nothing of the frames before it."""


class Seen(msgspec.Struct, tag=True):
    number: int
    smallest: int
    largest: int
    last: int


@pytest.fixture
def receiver() -> Iterator[Peer]:
    with Endpoint.bind(protocol=Protocol(requests=Step, replies=Seen)) as endpoint:
        with subprocess.Popen([sys.executable, "-c", RECEIVER, endpoint.address]) as running:
            try:
                yield endpoint.wait_for_peer(timeout=60)
            finally:
                endpoint.close()
                running.wait(timeout=20)


def test_a_tensor_that_is_overwritten_when_the_send_returns(receiver: Peer) -> None:
    tensor, last = torch.empty(ELEMENTS, dtype=torch.int32), torch.empty((), dtype=torch.int32)
    for k in range(ROUNDS):
        tensor.fill_(k)
        last.fill_(k)
        seen = receiver.call(Step(number=k, tensor=tensor, last=last), timeout=60)
        tensor.fill_(k + 1)
        last.fill_(k + 1)
        assert (seen.number, seen.smallest, seen.largest, seen.last) == (k, k, k, k)


def test_tensors_that_are_freed_straight_after_the_send(receiver: Peer) -> None:
    async def send(first: int, count: int) -> list[Seen]:
        calls = []
        for k in range(first, first + count):
            step = Step(number=k, tensor=torch.full((ELEMENTS,), k, dtype=torch.int32), last=torch.tensor(k))
            calls.append(asyncio.ensure_future(receiver.call_async(step, timeout=60)))
            await asyncio.sleep(0)  # it is sent
            del step
        gc.collect()
        scratch = [torch.full((ELEMENTS,), -1, dtype=torch.int32) for _ in range(count)]  # takes freed memory over
        seen = await asyncio.gather(*calls)
        assert len(scratch) == count
        return seen

    for first in range(0, 200, 20):
        for number, seen in enumerate(asyncio.run(send(first, 20)), start=first):
            assert (seen.number, seen.smallest, seen.largest, seen.last) == (number, number, number, number)


def test_a_tensor_whose_send_was_given_up_is_freed_without_harm(receiver: Peer) -> None:
    for k in range(0, 60, 20):  # numbers at which the receiver is slow
        step = Step(number=k, tensor=torch.full((ELEMENTS,), k, dtype=torch.int32), last=torch.tensor(k))
        with pytest.raises(TimeoutError):
            receiver.call(step, timeout=0.001)
        del step
        scratch = torch.full((ELEMENTS,), -1, dtype=torch.int32)
        again = receiver.call(Step(number=k + 1, tensor=scratch.fill_(k), last=torch.tensor(k)), timeout=60)
        assert (again.smallest, again.largest) == (k, k)
