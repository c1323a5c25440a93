"""Device profiles: a faked HIP build of torch, and the variables that choose devices."""

import pytest
import torch
from drivetrain_ppo import rocm
from drivetrain_ppo.accelerator import (
    CPU,
    CUDA,
    ROCM,
    check_names,
    check_visible_devices,
    choose,
    detect,
    device_variables,
    resolve_engine,
    visible_devices,
)
from drivetrain_ppo.assemblies import ASSEMBLIES, choose_assembly
from drivetrain_ppo.config import ConfigError, load_config


@pytest.fixture
def hip_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch as AMD builds it, on a machine with a device."""
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is CPU
    assert choose("auto", {}) is CPU
    with pytest.raises(ConfigError, match="cuda asked for, but torch finds only cpu"):
        choose("cuda", {})
    with pytest.raises(ConfigError, match="needs a HIP build"):
        rocm.check()


@pytest.mark.usefixtures("hip_build")
def test_a_hip_build_takes_the_rocm_assembly() -> None:
    assert choose("auto", {}) is ROCM
    assert ROCM.memory_fraction == 0.85
    assert ROCM.collective_library == "RCCL"
    assert ROCM.device == "cuda"
    config = load_config(None, ["rollout.engine=vllm_rocm"])
    assert choose_assembly("run", config, {}) is ASSEMBLIES["rocm"]
    assert resolve_engine(ROCM, config.rollout.engine) == "vllm"
    assert choose_assembly("learner", config, {}) is ASSEMBLIES["rocm_multi_node"]
    rocm.check()
    with pytest.raises(ConfigError, match="cuda asked for"):
        choose("cuda", {})


def test_vllm_rocm_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="does not run on cpu"):
        resolve_engine(CPU, "vllm_rocm")


@pytest.mark.parametrize(
    ("environ", "conflict"),
    [
        ({}, False),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, False),
        ({"CUDA_VISIBLE_DEVICES": "2"}, False),
        ({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "1,0"}, False),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "0"}, True),
    ],
)
def test_conflicting_device_variables(environ: dict[str, str], conflict: bool) -> None:
    if conflict:
        with pytest.raises(ConfigError, match="set only HIP_VISIBLE_DEVICES"):
            check_visible_devices(ROCM, environ)
    else:
        check_visible_devices(ROCM, environ)
    check_visible_devices(CUDA, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5c, GPU-1a"}, ["GPU-5c", "GPU-1a"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({}, ["0", "1", "2"]),
    ],
)
def test_devices_for_child_processes(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], devices: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_devices(ROCM, environ) == devices
    assert visible_devices(CPU, environ) == []


def test_a_child_gets_one_variable_and_no_other() -> None:
    assert device_variables(ROCM, "3") == {
        "HIP_VISIBLE_DEVICES": "3",
        "CUDA_VISIBLE_DEVICES": None,
        "ROCR_VISIBLE_DEVICES": None,
    }
    assert device_variables(CUDA, "GPU-5c") == {"CUDA_VISIBLE_DEVICES": "GPU-5c"}


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: 'sglang' is unknown; choose vllm"):
        check_names("auto", "sglang", spawn=True)
    with pytest.raises(ConfigError, match=r"trainer\.device: 'tpu' is unknown"):
        check_names("tpu", "vllm", spawn=True)
