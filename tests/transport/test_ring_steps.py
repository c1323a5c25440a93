"""A process is killed in the ring at every single store: the others find a ring in order, with every record whole."""

import subprocess
import sys

import pytest

# Runs in a process of its own that forks: no threads, no torch. Every record's bytes follow from its number.
STEPS = """
import os, signal, sys, time
from drivetrain_transport import Ring
from drivetrain_transport._rings.hand import RingHand
from drivetrain_transport._rings.lease import Loan
from drivetrain_transport._rings.state import Record

class Fatal:
    '''The shared words, with a SIGKILL in place of one store.'''
    def __init__(self, words, stores):
        self.words, self.stores = words, stores
    def __getitem__(self, at):
        return self.words[at]
    def __len__(self):
        return len(self.words)
    def __setitem__(self, at, value):
        if self.stores == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.stores -= 1
        self.words[at] = value

def payload(number):
    return [bytes([number]), bytes([number]) * 1500]

def number_of(lease):
    head, body = lease.frames
    assert bytes(body) == bytes(head) * 1500, 'torn'
    return head[0]

def arm(ring, stores):
    ring._hand._state._words = Fatal(ring._hand._state._words, stores)

def send(ring, stores):
    arm(ring, stores)
    ring.send_frames(payload(3), timeout=5)

def receive(ring, stores):
    arm(ring, stores)
    assert number_of(ring.receive_frames(timeout=5)) == 1

def release(ring, stores):
    lease = ring.receive_frames(timeout=5)
    arm(ring, stores)
    lease.release()

def release_while_in_use(ring, stores):
    lease = ring.receive_frames(timeout=5)
    kept = lease.message
    arm(ring, stores)
    lease.release()
    kept.clear()

def give_back(ring, stores):
    lease = ring.receive_frames(timeout=5)
    arm(ring, stores)
    lease.give_back()

def close(ring, stores):
    lease = ring.receive_frames(timeout=5)
    arm(ring, stores)
    ring.close()
    del lease

def wait_for_room(ring, stores):
    arm(ring, stores)
    try:
        ring.send_frames([bytes(ring.capacity_bytes - 64)], timeout=0)
    except TimeoutError:
        return
    raise AssertionError('there was no room')

def reap(ring, stores):
    child = os.fork()
    if not child:
        other = Ring.attach(ring.address)
        lease = other.receive_frames(timeout=5)
        done = other.receive_frames(timeout=5)
        kept = done.message
        done.release()
        loan = Loan(other._hand, Record())
        other._hand.reserve(loan, 100, 5)
        os._exit(0)
    os.waitpid(child, 0)
    arm(ring, stores)
    ring._hand._reap(time.monotonic())

def attach(ring, stores):
    from drivetrain_transport._rings import state as _ring_state
    plain = _ring_state.RingState.__init__
    def fatal(self, memory, **fresh):
        plain(self, memory, **fresh)
        self._words = Fatal(self._words, stores)
    _ring_state.RingState.__init__ = fatal
    Ring.attach(ring.address)

def copy(ring, stores):
    plain = RingHand.write
    def half(self, record, start, source):
        plain(self, record, start, source[: len(source) // 2])
        if stores == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, record, start, source)
    RingHand.write = half
    ring.send_frames(payload(3), timeout=5)

# The numbers that may be found afterwards by one who was killed, and must be by one who was not.
OPERATIONS = {
    send: ([[1, 2], [1, 2, 3]], [1, 2, 3]),
    receive: ([[1, 2]], [1, 2]),
    release: ([[1, 2], [2]], [2]),
    release_while_in_use: ([[1, 2], [2]], [2]),
    give_back: ([[1, 2]], [1, 2]),
    close: ([[1, 2]], [1, 2]),
    wait_for_room: ([[1, 2]], [1, 2]),
    reap: ([[1]], [1]),
    attach: ([[1, 2]], [1, 2]),
    copy: ([[1, 2]], [1, 2, 3]),
}

def last_release():
    '''All is free, but the one who freed it did not live to say so.'''
    deaths = 0
    while True:
        with Ring.create('deaths', 8192, max_records=2) as ring:
            ring.send_frames([bytes(8000)], timeout=1)
            child = os.fork()
            if not child:
                own = Ring.attach(ring.address)
                lease = own.receive_frames(timeout=5)
                arm(own, deaths)
                lease.release()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            assert status in (0, signal.SIGKILL), status
            try:
                ring.receive_frames(timeout=0.25).release()
            except TimeoutError:
                pass
            ring.send_frames([bytes(8000)], timeout=0)
            if not status:
                return deaths
            deaths += 1

def one(operation, stores, killed_may_leave, must_leave):
    with Ring.create('deaths', 8192, max_records=8) as ring:
        ring.send_frames(payload(1), timeout=1)
        ring.send_frames(payload(2), timeout=1)
        child = os.fork()
        if not child:
            operation(Ring.attach(ring.address), stores)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        assert ring.processes == [os.getpid()]
        ring.send_frames(payload(9), timeout=0)  # behind what is there, and not over it
        found = []
        while len(found) < ring.stats.queued + len(found):
            with ring.receive_frames(timeout=0) as lease:
                found.append(number_of(lease))
        assert found.pop() == 9
        assert found in (killed_may_leave if status else [must_leave]), (operation.__name__, stores, found)
        for _ in range(20):  # all of the room and all of the lines can be had again
            ring.send_frames([bytes(8192 - 16)[:8100]], timeout=0)
            ring.receive_frames(timeout=0).release()
        for number in range(8):
            ring.send_frames([bytes([number])], timeout=0)
        return status

name = sys.argv[1]
if name == 'last_release':
    print(last_release())
    sys.exit()
operation = globals()[name]
deaths = 0
while one(operation, deaths, *OPERATIONS[operation]):
    deaths += 1
    assert deaths < 100
print(deaths)
"""


@pytest.mark.parametrize(
    ("operation", "at_least"),
    [
        ("send", 12),
        ("receive", 4),
        ("release", 5),
        ("release_while_in_use", 8),
        ("give_back", 5),
        ("close", 6),
        ("wait_for_room", 5),
        ("reap", 8),
        ("attach", 4),
        ("copy", 1),
        ("last_release", 4),
    ],
)
def test_a_death_at_any_store_leaves_a_ring_in_order(operation: str, at_least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STEPS, operation], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least
