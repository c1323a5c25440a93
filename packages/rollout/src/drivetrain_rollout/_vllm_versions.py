"""Everything of vLLM that is not in its documented API, or that differs between its versions, in one place.

Written for 0.24 to 0.33. What is not obvious about them:

* Of a tied model on the CPU, reloading leaves ``lm_head`` computing with a packed copy of the old weights.
* The CPU's kernel for mixtures of experts takes packed weights, and they are packed only when the kernel is made: after
  reloading it would read plain ones as if they were packed.
* ``reload_weights`` only logs which parameters it did not load. When it breaks off, layers keep the tensors that had
  arrived, and the next reload mixes them with its own. So ``load_weights`` below takes its three steps one by one, and
  undoes them after a failure.
* Processing weights reads the current vLLM config, which up to 0.26 nothing sets while weights are reloaded.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in this process, in the thread that steps it
    "VLLM_HOST_IP": "127.0.0.1",  # its one-process group meets on loopback
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # one core is left idle otherwise
}
EAGER_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a sampling helper: 20 s and a C++ compiler, for microseconds a step
}


def set_environment(*, cpu: bool, eager: bool) -> None:
    """Set what vLLM reads from the environment, for this process and its children; what is set already stays."""
    wanted = ENVIRONMENT | (CPU_ENVIRONMENT if cpu else {}) | (EAGER_CPU_ENVIRONMENT if cpu and eager else {})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError("VLLM_ENABLE_V1_MULTIPROCESSING is set to something other than 0: unset it for VLLMEngine")


def version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(vllm.__version__)


def device() -> str:
    """``cpu`` or ``cuda`` (AMD's GPUs too): what the installed vLLM is built for."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def argument_names() -> set[str]:
    """The names that ``vllm.EngineArgs`` takes."""
    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in dataclasses.fields(EngineArgs)}


def start(arguments: dict[str, Any]) -> Any:
    """An ``LLMEngine`` in this process and thread."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    except BaseException:
        cleanup_dist_env_and_memory()  # or nothing can be started here any more
        raise


def stop(engine: Any) -> None:
    """Free the model, its KV cache and the one-process group. A process then can start another engine."""
    engine.engine_core.shutdown()


def model_runner(engine: Any) -> Any:
    """What holds the model and samples from it; of an engine whose worker is in this process."""
    [runner] = engine.collective_rpc(lambda worker: worker.model_runner)
    return runner


def scheduler(engine: Any) -> Any:
    """What decides which requests the next step computes; of an engine in this process."""
    return engine.engine_core.engine_core.scheduler


def drain(engine: Any) -> list[Any]:
    """Complete the steps that have begun, and begin none; the outputs of what ended."""
    batches = engine.engine_core.engine_core.batch_queue
    waiting = scheduler(engine)
    ended: list[Any] = []
    waiting.has_requests = lambda: False  # asked first in a step: it then only takes in what was begun before
    try:
        while batches:
            ended.extend(engine.step())
    finally:
        del waiting.has_requests
    return ended


def count_preemptions(engine: Any) -> Callable[[], int]:
    """Begin to count how often a running request loses its KV cache; returns what tells the count."""
    owner = scheduler(engine)
    original, count = owner._preempt_request, 0

    def preempt(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments, **options)

    owner._preempt_request = preempt
    return lambda: count


def load_weights(engine: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put tensors in checkpoint format in place of the model's.

    Raises:
        RuntimeError: parameters of the model that no tensor went into.
    """
    engine.collective_rpc(_load_in_worker, args=(tensors, engine.vllm_config))


def parameters(engine: Any) -> dict[str, Tensor]:
    """The model's own parameters, each once."""
    [found] = engine.collective_rpc(lambda worker: dict(worker.get_model().named_parameters()))
    return {name: parameter.data for name, parameter in found.items()}


def write_weights(act: Callable[[], str]) -> str:
    """Call ``act``, which writes the parameters."""
    import torch

    torch.cuda.synchronize()  # no kernel of the last step reads the parameters any more
    with torch.no_grad():
        digest = act()
    torch.cuda.synchronize()
    return digest


def _load_in_worker(worker: Any, tensors: Iterable[tuple[str, Tensor]], vllm_config: Any) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.get_model()
    parameters = {name for name, _ in model.named_parameters()}
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    on_gpu = device() != "cpu"
    if on_gpu:
        torch.cuda.synchronize()  # the tensors may still be in the making on another stream
    else:
        for method in [module.quant_method for module in model.modules() if hasattr(module, "quant_method")]:
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # it is made anew when its layer has its weights
    with set_current_vllm_config(vllm_config), torch.no_grad():
        try:
            initialize_layerwise_reload(model)
            loaded = model.load_weights(tensors)
            finalize_layerwise_reload(model, vllm_config.model_config)
        except BaseException:
            _forget_reload(before)
            finalize_layerwise_reload(model, vllm_config.model_config)
            raise
        if not on_gpu:
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
    if on_gpu:
        torch.cuda.synchronize()
    # A model that keeps no account of what it loaded returns None.
    if loaded is not None and (missing := sorted(parameters - loaded)):
        raise RuntimeError(f"vLLM loaded nothing into {', '.join(missing)}")


def _forget_reload(before: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
    """Put every module's own tensors back, whatever is in them by now, and drop what the reload had gathered."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module, parameters, buffers in before:
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)
        get_layerwise_info(module).reset()
