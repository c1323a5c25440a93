"""Two hosts made with network namespaces: delay, loss, and a cut link that comes back.

The hosts are joined by a third namespace. Where the kernel has `netem`, `tc` delays and drops the packets there; where
it has not, the process that carries them from one side to the other does so.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from drivetrain_transport import make_keys
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root and iproute2",
)

DELAY_MS = 15
LOSS = 0.03

WHOLE = """
# Turn off what lets packets leave with checksums, and in sizes, that only hardware would put right.
import ctypes, fcntl, socket, struct
setting = ctypes.create_string_buffer(struct.pack("II", 0x17, 0))  # ETHTOOL_STXCSUM: off, and segmentation with it
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8946, struct.pack("16sP", b"eth", ctypes.addressof(setting)))  # SIOCETHTOOL
"""

WIRE = """
import heapq, random, selectors, socket, sys, time
delay, loss = float(sys.argv[1]), float(sys.argv[2])
chance = random.Random(5)
ports = []
for name in ("left", "right"):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    port.bind((name, 0))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    ports.append(port)
selector = selectors.DefaultSelector()
for port, other in (ports, ports[::-1]):
    selector.register(port, selectors.EVENT_READ, other)
print("carrying", flush=True)
waiting, count = [], 0
while True:
    now = time.monotonic()
    while waiting and waiting[0][0] <= now:
        _, _, port, packet = heapq.heappop(waiting)
        try:
            port.send(packet)
        except OSError:
            pass  # that link is down
    for key, _ in selector.select(max(waiting[0][0] - now, 0) if waiting else None):
        try:
            packet, sender = key.fileobj.recvfrom(1 << 17)
        except OSError:
            continue
        if sender[2] != socket.PACKET_OUTGOING and chance.random() >= loss:
            count += 1
            heapq.heappush(waiting, (time.monotonic() + delay, count, key.data, packet))
"""

COMMON = """
import sys, threading, time
import msgspec
from drivetrain_transport import Publisher, Subscriber, WorkReceiver, WorkSender, load_keys

class Sample(msgspec.Struct):
    number: int
    data: bytes = b""

keys = load_keys(sys.argv[1])
count = int(sys.argv[2])

def watch(name, channel):
    # Write a line each time that the other side is lost.
    def look():
        there = False
        with open(f"{sys.argv[1]}/{name} lost", "w", buffering=1) as lost:
            while True:
                if there and not channel._engine.links.peers:
                    print("lost", file=lost)
                there = bool(channel._engine.links.peers)
                time.sleep(0.01)
    threading.Thread(target=look, daemon=True).start()
"""

RECEIVER = (
    COMMON
    + """
with WorkReceiver.bind("tcp://10.77.0.2:7000", type=Sample, keys=keys, liveness=1.0, credit=64) as receiver:
    watch("receiver", receiver)
    print("listening", flush=True)
    for index in range(count):
        with receiver.receive(timeout=30) as delivery:
            print(delivery.number, delivery.value.number, len(delivery.value.data), flush=True)
    print("duplicates", receiver.stats.duplicates, flush=True)
    try:
        print(receiver.receive(timeout=1.0))
    except TimeoutError:
        print("no more", flush=True)
"""
)

SENDER = (
    COMMON
    + """
with WorkSender.connect("tcp://10.77.0.2:7000", stream="far", keys=keys) as sender:
    watch("sender", sender)
    waited = 0.0
    for number in range(count):
        if number == count // 2:
            sender.flush(timeout=30)  # nothing is under way, and all the credit is there
            print("paused", flush=True)
            sys.stdin.readline()
        start = time.monotonic()
        sender.send(Sample(number, b"x" * 1500), timeout=30)
        waited = max(waited, time.monotonic() - start)
        time.sleep(0.002)
    sender.flush(timeout=30)
    print("done", waited, sender.stats.redelivered, flush=True)
"""
)

PUBLISHER = (
    COMMON
    + """
with Publisher.bind("tcp://10.77.0.2:7001", keys=keys, liveness=1.0) as publisher:
    watch("publisher", publisher)
    publisher.publish(Sample(0))
    print("listening", flush=True)
    for number in range(1, count):
        sys.stdin.readline()
        publisher.publish(Sample(number))
    sys.stdin.readline()
"""
)

SUBSCRIBER = (
    COMMON
    + """
with Subscriber.connect("tcp://10.77.0.2:7001", type=Sample, keys=keys) as subscriber:
    watch("subscriber", subscriber)
    for _ in range(count):
        published = subscriber.next(timeout=30)
        print(published.value.number, published.version, published.skipped, published.restarted, flush=True)
"""
)


@dataclass
class Hosts:
    """Two hosts, and the link between them."""

    tag: str

    def start(self, host: str, script: str, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{self.tag}-{host}", sys.executable, "-W", "error", "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def link(self, state: str) -> None:
        self.ip("-n", f"{self.tag}-wire", "link", "set", "right", state)

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def lay(self) -> None:
        for host in ("near", "far", "wire"):
            self.ip("netns", "add", f"{self.tag}-{host}")
        for host, end, address in (("near", "left", "10.77.0.1/24"), ("far", "right", "10.77.0.2/24")):
            inside = f"{self.tag}-{host}"
            peer = ("peer", "name", "eth", "netns", inside)
            self.ip("link", "add", end, "netns", f"{self.tag}-wire", "type", "veth", *peer)
            self.ip("-n", f"{self.tag}-wire", "link", "set", end, "up")
            self.ip("-n", inside, "address", "add", address, "dev", "eth")
            for device in ("eth", "lo"):
                self.ip("-n", inside, "link", "set", device, "up")
            whole = self.start(host, WHOLE)
            whole.communicate()
            assert whole.returncode == 0

    def netem(self) -> bool:
        """Let the kernel delay and drop, on both ends of the wire; False when it cannot."""
        rule = ("netem", "delay", f"{DELAY_MS}ms", "loss", f"{LOSS * 100}%")
        results = [
            subprocess.run(
                ["tc", "-n", f"{self.tag}-wire", "qdisc", "add", "dev", end, "root", *rule], capture_output=True
            )
            for end in ("left", "right")
        ]
        return all(result.returncode == 0 for result in results)


@contextmanager
def running(*processes: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(f"dt{secrets.token_hex(3)}")
    try:
        try:
            hosts.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        delay, loss = ("0", "0") if hosts.netem() else (str(DELAY_MS / 1000), str(LOSS))
        wire = hosts.start("wire", WIRE, delay, loss)
        with running(wire):
            assert line(wire) == "carrying"
            yield hosts
    finally:
        for host in ("near", "far", "wire"):
            subprocess.run(["ip", "netns", "delete", f"{hosts.tag}-{host}"], capture_output=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    assert text, f"the process ended with {process.wait(10)}"
    return text


def lost(folder: Path, name: str) -> int:
    """How often this side has lost the other one."""
    return len((folder / f"{name} lost").read_text().splitlines())


@contextmanager
def cut(hosts: Hosts, folder: Path, *sides: str) -> Iterator[None]:
    """The link is down in the block, and until both sides have noticed."""
    before = [lost(folder, side) for side in sides]
    hosts.link("down")
    try:
        yield
        for side, count in zip(sides, before, strict=True):
            wait_until(lambda side=side, count=count: lost(folder, side) > count, f"the {side} to lose its peer")
    finally:
        hosts.link("up")


def go_on(process: "subprocess.Popen[str]", lines: int = 1) -> None:
    assert process.stdin is not None
    process.stdin.write("\n" * lines)
    process.stdin.flush()


def test_a_stream_over_a_slow_lossy_link_that_is_cut_and_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    """Cut twice: with messages and acknowledgements under way, and before a credit's worth of messages is sent."""
    make_keys(tmp_path)
    count = 700
    receiver = hosts.start("far", RECEIVER, str(tmp_path), str(count))
    sender = hosts.start("near", SENDER, str(tmp_path), str(count))
    with running(receiver, sender):
        assert line(receiver) == "listening"
        got = [line(receiver) for _ in range(200)]
        start = time.monotonic()
        with cut(hosts, tmp_path, "receiver", "sender"):
            pass
        got += [line(receiver) for _ in range(count // 2 - 200)]
        assert line(sender) == "paused"
        with cut(hosts, tmp_path, "receiver", "sender"):
            go_on(sender)  # what it sends now can only be lost with the connection
        got += [line(receiver) for _ in range(count - count // 2)]
        back = time.monotonic() - start
        assert sorted(got) == sorted(f"{number} {number} 1500" for number in range(count))  # no loss, no duplicate
        assert line(receiver).startswith("duplicates")
        assert line(receiver) == "no more"
        done, waited, redelivered = line(sender).split()
        assert done == "done"
        assert 0.5 < float(waited) < 20  # credit ran out while the link was cut, and was there again soon after
        assert int(redelivered) > 0
        assert back < 60
        assert receiver.wait(10) == sender.wait(10) == 0


def test_a_subscriber_gets_what_was_published_while_the_link_was_cut(hosts: Hosts, tmp_path: Path) -> None:
    make_keys(tmp_path)
    publisher = hosts.start("far", PUBLISHER, str(tmp_path), "4")
    subscriber = hosts.start("near", SUBSCRIBER, str(tmp_path), "2")
    with running(publisher, subscriber):
        assert line(publisher) == "listening"
        assert line(subscriber) == "0 1 0 False"
        with cut(hosts, tmp_path, "publisher", "subscriber"):
            go_on(publisher, 3)
        assert line(subscriber) == "3 4 2 False"  # the newest, and how many were skipped
        assert subscriber.wait(10) == 0


def test_a_far_receiver_that_never_comes_is_a_bounded_wait(hosts: Hosts, tmp_path: Path) -> None:
    make_keys(tmp_path)
    script = SENDER.replace("timeout=30", "timeout=1.5")
    start = time.monotonic()
    sender = hosts.start("near", script, str(tmp_path), "2")
    with running(sender):
        assert sender.wait(20) == 1
    assert time.monotonic() - start < 15
