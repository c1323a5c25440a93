"""Which way is taken between which processes, and why not another."""

import subprocess
import sys

import msgspec
import pytest
from drivetrain_transport import PathChoice, Site, choose_path

ALL = frozenset({"torch", "gloo", "nccl", "shared_memory", "zmq"})
CPU = Site(boot="boot-1", processes="p", network="n", hostname="one", pid=1, can=ALL)
CPU_2 = msgspec.structs.replace(CPU, pid=2)
GPU = msgspec.structs.replace(CPU, device_kind="cuda", device_id="GPU-a")
SAME_GPU = msgspec.structs.replace(GPU, pid=2, device_index=3)
GPU_2 = msgspec.structs.replace(GPU, pid=2, device_id="GPU-b")
FAR = {"boot": "boot-2", "hostname": "two", "pid": 9}
FAR_CPU = msgspec.structs.replace(CPU, **FAR)
FAR_GPU = msgspec.structs.replace(GPU_2, **FAR)
BARE = msgspec.structs.replace(CPU_2, can=frozenset({"zmq"}))


@pytest.mark.parametrize(
    ("a", "b", "path", "why_not"),
    [
        (GPU, SAME_GPU, "ipc", {}),
        (GPU, GPU_2, "nccl", {"ipc": "the tensors are on two GPUs (GPU-a and GPU-b)"}),
        (GPU, FAR_GPU, "nccl", {"ipc": "one and two are two machines"}),
        (
            CPU,
            CPU_2,
            "shared_memory",
            {"ipc": "one:1 has its tensors on the CPU", "nccl": "one:1 has its tensors on the CPU"},
        ),
        (CPU, FAR_CPU, "gloo", {"shared_memory": "one and two are two machines"}),
        (CPU, BARE, "zmq", {"shared_memory": "one:2 has no shared_memory", "gloo": "one:2 has no torch"}),
        (
            GPU,
            CPU_2,
            "zmq",
            {"shared_memory": "one:1 has its tensors on a GPU", "nccl": "one:2 has its tensors on the CPU"},
        ),
        (
            GPU,
            msgspec.structs.replace(SAME_GPU, processes="other"),
            "zmq",
            {
                "ipc": "the processes are in two containers, which do not share handles",
                "nccl": "both are on GPU GPU-a, and each member needs a GPU of its own",
            },
        ),
        (
            CPU,
            msgspec.structs.replace(CPU_2, processes="other"),
            "gloo",
            {"shared_memory": "the processes are in two containers, which do not share memory"},
        ),
        (
            GPU,
            msgspec.structs.replace(GPU_2, device_kind="cuda/hip"),
            "zmq",
            {"nccl": "cuda and cuda/hip have different libraries"},
        ),
        (GPU, msgspec.structs.replace(GPU_2, can=ALL - {"nccl"}), "zmq", {"nccl": "one:2 has no nccl"}),
        (GPU, GPU, "zmq", {"ipc": "both are one process: use the tensor itself"}),
    ],
)  # fmt: skip
def test_the_fastest_way_that_works(a: Site, b: Site, path: str, why_not: dict[str, str]) -> None:
    choice = choose_path(a, b)
    assert choice.path == path
    assert choice.reason
    assert {name: choice.rejected[name] for name in why_not} == why_not
    assert choose_path(b, a).path == path


def test_reasons_are_given_for_faster_ways_only() -> None:
    assert list(choose_path(GPU, GPU_2).rejected) == ["ipc"]


def test_a_slower_way_can_be_forced() -> None:
    assert choose_path(CPU, CPU_2, force="gloo") == PathChoice(
        path="gloo", reason="forced; both tensors are on the CPU, and both processes have torch", rejected={}
    )


def test_forcing_a_way_that_cannot_work_says_why() -> None:
    with pytest.raises(ValueError, match=r"'nccl' was forced and cannot work: one:1 has its tensors on the CPU"):
        choose_path(CPU, GPU_2, force="nccl")
    with pytest.raises(ValueError, match=r"'rdma' is no path: choose one of ipc, nccl, shared_memory, gloo, zmq"):
        choose_path(CPU, CPU_2, force="rdma")


def test_no_way_at_all_says_why_each_is_closed() -> None:
    nothing = msgspec.structs.replace(CPU_2, can=frozenset())
    with pytest.raises(ValueError, match=r"no path between one:1 and one:2: ipc: .*zmq: one:2 has no zmq"):
        choose_path(CPU, nothing)


def test_a_site_describes_this_process_and_travels() -> None:
    here = Site.here("cpu")
    assert here.can >= {"torch", "gloo", "shared_memory", "zmq"}
    assert (here.device_kind, here.device_id) == ("cpu", "")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=Site) == here


def test_a_site_without_a_device_does_not_import_torch() -> None:
    code = "import sys; from drivetrain_transport import Site; Site.here(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_process_of_this_machine_is_reached_by_shared_memory() -> None:
    code = "import msgspec; from drivetrain_transport import Site; print(msgspec.json.encode(Site.here()).decode())"
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout
    other = msgspec.json.decode(said, type=Site)
    assert choose_path(Site.here(), other).path == "shared_memory"
    assert choose_path(Site.here(), other, force="gloo").path == "gloo"
