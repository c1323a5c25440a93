"""vLLM in this process."""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain_rollout import _vllm_versions as versions
from drivetrain_rollout._backend import Sampled, Usage
from drivetrain_rollout._checks import Manifest
from drivetrain_rollout._threaded import ThreadedEngine
from drivetrain_rollout.engine import DigestFunction, EngineConfig, EngineInfo, Writer
from drivetrain_rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_rollout._vllm_sampler import Recorder

log = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 512 << 20

OWNED_ARGUMENTS = {
    "model": "EngineConfig.model",
    "dtype": "EngineConfig.dtype",
    "seed": "EngineConfig.seed",
    "max_model_len": "EngineConfig.max_model_len",
    "max_num_seqs": "EngineConfig.max_num_seqs",
    "gpu_memory_utilization": "EngineConfig.memory_fraction",
    "kv_cache_memory_bytes": "EngineConfig.kv_cache_bytes",
    "enforce_eager": "EngineConfig.enforce_eager",
    "logprobs_mode": "nothing: rollout_logprobs are right with processed_logprobs alone",
    "skip_tokenizer_init": "nothing: engines read and return token ids",
    "generation_config": "SamplingParams: nothing else changes how a response is drawn",
    "tensor_parallel_size": "one engine a device",
    "pipeline_parallel_size": "one engine a device",
    "data_parallel_size": "one engine a device",
}

_process = threading.Lock()


class VLLMEngine(ThreadedEngine):
    """vLLM's ``LLMEngine``, driven by one thread of this process; all requests in flight are batched continuously.

    **It owns its process.** vLLM keeps global state: the process group, torch's thread settings and random stream,
    environment variables (set only where they are not set: ``drivetrain_rollout._vllm_versions`` lists them). So there
    is one open engine a process, and none beside a ``torch.distributed`` group of yours; to sample beside a learner
    that has one, run the engine in a process of its own with ``drivetrain_rollout.remote``.

    Tokens are drawn and their log-probs kept by this library, in the place of vLLM's sampler: that makes log-probs
    nearly free, and a draw depend on the request's seed and the token's place alone. They take 4 bytes for each of
    ``max_num_seqs * max_model_len`` tokens.

    One engine drives one device. On a GPU it sleeps if ``engine_args`` holds ``enable_sleep_mode=True``. On a CPU that
    it shares with other processes, start its process with ``OMP_WAIT_POLICY=PASSIVE``.

    Args:
        config: ``engine_args`` are further arguments of ``vllm.EngineArgs``.
        digest: checks every update; without it the digest of an update is recorded as it was sent.
        writer: what ``write_weights`` calls, with vLLM's own parameters (fused and cut as vLLM has them). On a GPU, and
            with weights that are not quantized; a CPU's are packed.

    Raises:
        ValueError: an argument vLLM does not know, or that this engine sets itself; a device vLLM is not built for.
        RuntimeError: another engine, or a process group, is open in this process.
        TimeoutError: the model was not loaded within ``config.start_timeout``.
    """

    def __init__(
        self, config: EngineConfig, *, digest: DigestFunction | None = None, writer: Writer | None = None
    ) -> None:
        super().__init__(partial(_VLLMBackend, config), config, digest=digest, writer=writer)


@dataclass(frozen=True, slots=True)
class _Added:
    internal: str
    """The id that vLLM has made of the key."""
    known: int
    """Tokens of the prompt, and of the response that is continued."""


class _VLLMBackend:
    """Calls vLLM; lives in the engine's thread."""

    def __init__(self, config: EngineConfig) -> None:
        if not _process.acquire(blocking=False):
            raise RuntimeError("a VLLMEngine is open in this process already; close it, or use another process")
        try:
            self._start(config)
        except BaseException:
            _process.release()
            raise

    def _start(self, config: EngineConfig) -> None:
        eager = config.device == "cpu" if config.enforce_eager is None else config.enforce_eager
        versions.set_environment(cpu=config.device == "cpu", eager=eager)
        import torch

        from drivetrain_rollout._manifest import read_config, read_manifest, resolve_dtype

        if torch.distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed is initialised in this process, and vLLM needs a group of its own; run the engine "
                "in another process (drivetrain_rollout.remote)"
            )
        if versions.device() != config.device:
            raise ValueError(
                f"device {config.device!r}: the installed vLLM {versions.version()} runs on {versions.device()!r}"
            )
        hf_config = read_config(config.model)
        dtype = str(resolve_dtype(config.dtype, hf_config, config.device)).removeprefix("torch.")
        self.manifest: Manifest = read_manifest(hf_config)
        arguments = _arguments(config, dtype=dtype, eager=eager)
        try:
            self._engine = versions.start(arguments)
        except ValueError as error:
            raise ValueError(
                f"vLLM did not start: {error} (its gpu_memory_utilization is EngineConfig.memory_fraction, "
                "its kv_cache_memory_bytes is EngineConfig.kv_cache_bytes)"
            ) from error
        self._weights_held = 0
        """How many sets of weights it has had before these."""
        self._parameters: Mapping[str, Tensor] | None = None
        self._added: dict[int, _Added] = {}
        self._preemptions = versions.count_preemptions(self._engine)
        self._held = 0
        """Preemptions that were ours: of requests that were held while the weights changed."""
        model_config = self._engine.model_config
        head = model_config.get_vocab_size()
        vocab_size = min(config.vocab_size or head, head)
        self._recorder = self._record(config, vocab_size, model_config.max_model_len)
        if self._recorder is None and vocab_size < head:
            raise ValueError(f"vocab_size {vocab_size} of {head}: only the engine's own sampler can leave ids out")
        self.info = EngineInfo(
            engine="vllm",
            engine_version=versions.version(),
            model=config.model,
            vocab_size=vocab_size,
            max_model_len=model_config.max_model_len,
            dtype=dtype,
            device=config.device,
            can_sleep=config.device == "cuda" and bool(config.engine_args.get("enable_sleep_mode")),
            can_write=config.device == "cuda" and model_config.quantization is None,
        )

    def _record(self, config: EngineConfig, vocab_size: int, max_model_len: int) -> Recorder | None:
        """Draw in vLLM's place; None if it draws elsewhere than in a sampler of this process."""
        from drivetrain_rollout._vllm_sampler import Recorder

        if self._engine.vllm_config.speculative_config is not None:
            log.warning("vLLM draws itself with speculative decoding: seeds and log-probs are its own, and slower")
            return None
        return Recorder(
            versions.model_runner(self._engine),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )

    def add(self, key: int, request: GenerateRequest) -> None:
        from vllm.inputs import tokens_input

        before = () if request.continued is None else request.continued.response_token_ids
        token_ids = [*request.prompt_token_ids, *before]
        # What the prefix cache holds of other weights is never found, and makes room when room is needed.
        prompt = tokens_input(token_ids, cache_salt=str(self._weights_held))
        params = _sampling_params(request.sampling, before=len(before), recorded=self._recorder is not None)
        internal = self._engine.add_request(str(key), prompt, params)
        self._added[key] = _Added(internal, len(token_ids))
        if self._recorder is not None:
            self._recorder.add(internal, request.sampling)

    def abort(self, key: int) -> None:
        self._engine.abort_request([str(key)])
        self._forget(key)

    def _forget(self, key: int) -> None:
        added = self._added.pop(key)
        if self._recorder is not None:
            self._recorder.remove(added.internal)

    def step(self) -> list[Sampled]:
        return self._ended(self._engine.step())

    def drain(self) -> list[Sampled]:
        return self._ended(versions.drain(self._engine))

    def _ended(self, outputs: Iterable[Any]) -> list[Sampled]:
        ended = []
        for output in outputs:
            key = int(output.request_id)
            if output.finished and key in self._added:
                [sample] = output.outputs
                ended.append(self._sampled(key, list(sample.token_ids), sample.logprobs, str(sample.finish_reason)))
                self._forget(key)
        return ended

    def progress(self, keys: Sequence[int]) -> list[Sampled]:
        states = self._engine.output_processor.request_states
        found = []
        for key in keys:
            state = states[self._added[key].internal]
            token_ids = list(state.detokenizer.output_token_ids)
            found.append(self._sampled(key, token_ids, state.logprobs_processor.logprobs, "abort"))
        return found

    def _sampled(self, key: int, token_ids: list[int], logprobs: Any, finish_reason: str) -> Sampled:
        added = self._added[key]
        if self._recorder is None:
            values = sampled_logprobs(token_ids, logprobs)
        else:
            values = self._recorder.logprobs(added.internal, added.known, len(token_ids))
        return Sampled(key=key, token_ids=token_ids, logprobs=values, finish_reason=finish_reason)

    def usage(self) -> Usage:
        scheduler = versions.scheduler(self._engine)
        return Usage(
            waiting=scheduler.get_request_counts()[1],
            kv_cache_usage=scheduler.kv_cache_manager.usage,
            preemptions=self._preemptions() - self._held,
        )

    def _weights_change(self) -> None:
        """What is held computes its KV cache anew, and what comes later does not find the old one."""
        self._weights_held += 1
        if self._added:
            before = self._preemptions()
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._held += self._preemptions() - before

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._weights_change()
        self._parameters = None  # it may put other tensors in their place
        versions.load_weights(self._engine, tensors.items())

    def parameters(self) -> Mapping[str, Tensor]:
        if self._parameters is None:
            self._parameters = versions.parameters(self._engine)
        return self._parameters

    def write(self, act: Callable[[], str]) -> str:
        self._weights_change()
        return versions.write_weights(act)

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        try:
            versions.stop(self._engine)
            del self._engine
        finally:
            _process.release()


def _arguments(config: EngineConfig, *, dtype: str, eager: bool) -> dict[str, Any]:
    """Arguments of ``vllm.EngineArgs``."""
    for name in config.engine_args:
        if name in OWNED_ARGUMENTS:
            raise ValueError(f"engine_args may not set {name!r}: use {OWNED_ARGUMENTS[name]}")
        if name not in (known := versions.argument_names()):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"engine_args: vLLM {versions.version()} has no argument {name!r}{hint}")
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.memory_fraction,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enforce_eager": eager,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.engine_args.get("enable_sleep_mode"):
        _check_allocator()
    if config.device == "cpu":
        if config.engine_args.get("enable_sleep_mode"):
            raise ValueError("engine_args may not set 'enable_sleep_mode' on a CPU: there is no memory to give back")
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes or CPU_KV_CACHE_BYTES
    return arguments | config.engine_args


def _check_allocator() -> None:
    """Sleep takes memory from under torch's allocator, which must not grow its segments then."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise ValueError(
                f"{name} sets expandable_segments:True, and an engine with enable_sleep_mode cannot run with it: "
                "unset it in the engine's process"
            )


def _sampling_params(sampling: SamplingParams, *, before: int, recorded: bool) -> Any:
    """vLLM's own, of a request that continues ``before`` tokens; ``recorded``: a Recorder draws."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    drawn: dict[str, Any] = {}
    if not recorded:
        drawn = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,  # a list of floats instead of a dict for each token
        }
    return vllm.SamplingParams(
        max_tokens=sampling.max_tokens - before,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # nothing but stop_token_ids ends a response
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **drawn,
    )


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float] | None:
    """Of vLLM's log-probs, those of the sampled tokens; None if there are none, shorter if some lack.

    Args:
        token_ids: what was sampled.
        logprobs: vLLM's ``FlatLogprobs``, or for each position a dict from token id to an object with ``logprob``; the
            sampled token need not be the first or the likeliest there.
    """
    if logprobs is None:
        return None
    if getattr(logprobs, "token_ids", None) == list(token_ids):
        return list(logprobs.logprobs)  # flat, and at each position the sampled token alone
    found = []
    for token_id, position in zip(token_ids, logprobs, strict=False):
        if position is not None and token_id in position:
            found.append(float(position[token_id].logprob))
    return found
