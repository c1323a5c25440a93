"""The contract every engine keeps, and the words it is written in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import msgspec

from drivetrain_rollout.types import Chunk, Completion, GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor

Device = Literal["cpu", "cuda"]
PauseMode = Literal["wait", "keep", "abort"]

RequestErrorReason = Literal[
    "empty_prompt",
    "prompt_too_long",
    "token_out_of_vocabulary",
    "bad_sampling",
    "bad_continuation",
    "bad_logprobs",
    "engine_refused",
    "engine_asleep",
    "engine_closed",
    "engine_failed",
    "stale_weights",
    "deadline",
    "no_engine",
]
"""Why one request got no completion.

``empty_prompt``, ``prompt_too_long`` (no room is left for one token), ``token_out_of_vocabulary``, ``bad_sampling``,
``bad_continuation`` (of another prompt, or of a response that has ended): the request itself. ``bad_logprobs``: the
engine's log-probs were missing, too few or not finite. ``engine_refused``: the engine behind turned this one request
down. ``engine_asleep``, ``engine_closed``, ``engine_failed``: nobody is there to serve it. ``stale_weights``: the
engine does not hold a complete set of weights. ``deadline``: a pool's time for the request is over. ``no_engine``: a
pool has had nobody to serve it.
"""


class RequestError(Exception):
    """One request failed, for a named reason; the engine's other requests go on.

    ``partial`` is what is known to have been sampled by then, with finish reason ``abort``: a request can continue it.
    """

    def __init__(
        self, request_id: str, reason: RequestErrorReason, message: str, *, partial: Completion | None = None
    ) -> None:
        super().__init__(f"request {request_id!r}: {message} ({reason})")
        self.request_id = request_id
        self.reason: RequestErrorReason = reason
        self.message = message
        self.partial = partial


class WeightsRefused(RuntimeError):
    """A weight update was not taken. ``engine.weights`` says what is served now, if anything."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is started with.

    Raises:
        ValueError: a value out of range, with the range.

    Example:
        >>> EngineConfig(engine="vllm", model="Qwen/Qwen3-0.6B", device="cuda", max_model_len=4096)
    """

    engine: str
    """``vllm`` or ``transformers`` for the engines here; whoever starts engines may know other names."""
    model: str
    """Local folder or hub id of a Hugging Face causal language model. No tokenizer is needed or read."""
    dtype: str = "auto"
    """``float32``, ``bfloat16`` or ``float16``; ``auto`` is the one the model was saved in."""
    device: Device = "cpu"
    """``cuda`` is any GPU that torch calls so, AMD's too."""
    max_model_len: int | None = None
    """Most tokens of prompt and response together; None: what the model's own config allows."""
    max_num_seqs: int = 256
    """Most responses sampled at once."""
    memory_fraction: float = 0.9
    """vLLM on a GPU: the part of its memory that weights, activations and KV cache may take."""
    kv_cache_bytes: int | None = None
    """vLLM: bytes of KV cache. None: what ``memory_fraction`` leaves on a GPU, 512 MiB on a CPU."""
    seed: int = 0
    """Starts the stream that requests without a seed take theirs from; give each engine of a run another."""
    vocab_size: int | None = None
    """Ids from this on are neither read nor sampled: for a head that is wider than its tokenizer. They get no
    probability, so a learner must leave them out of its softmax too. None: all that the head has."""
    tensor_parallel: int = 1
    """vLLM: devices that one model is spread over."""
    enforce_eager: bool | None = None
    """vLLM: neither compile nor capture CUDA graphs. None: on a CPU only, where compiling costs a minute and gains
    little."""
    start_timeout: float = 1800.0
    """Seconds that loading the model may take."""
    stall_timeout: float = 600.0
    """Seconds without any progress of the engine after which those who wait for it get an error."""
    engine_args: dict[str, Any] = {}
    """Further arguments: of ``vllm.EngineArgs``, or of ``AutoModelForCausalLM.from_pretrained``."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r}: use 'cpu' or 'cuda'")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r}: use 'auto', 'float32', 'bfloat16' or 'float16'")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction {self.memory_fraction}: use a number above 0 and up to 1")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "kv_cache_bytes",
            "vocab_size",
            "tensor_parallel",
            "start_timeout",
            "stall_timeout",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} {value}: use a number above 0")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a started engine is."""

    engine: str
    engine_version: str
    model: str
    vocab_size: int
    """Ids from 0 up to this, exclusive, are read and sampled: ``EngineConfig.vocab_size``, or the width of the model's
    head, which can be wider than its tokenizer."""
    max_model_len: int
    dtype: str
    device: Device
    can_sleep: bool
    can_write: bool = False
    """Whether ``write_weights`` works: the engine has a writer, and samples with its parameters as they lie."""


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is doing, and what it has done since its start."""

    running: int
    """Responses that are being sampled."""
    waiting: int
    """Requests that have not begun: they wait for room in the engine, or for an update or a pause to end."""
    kv_cache_usage: float | None
    """The part of the KV cache that is in use, 0 to 1; None: the cache has no budget."""
    preemptions: int
    """How often a running response lost its KV cache to others and had to compute it again."""
    prompt_tokens: int
    """Of the requests that have begun."""
    response_tokens: int
    """Of the responses that have ended."""
    completed: int
    failed: dict[str, int]
    """Requests that got a RequestError, by reason."""


class WeightsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights an engine serves."""

    policy_version: int
    digest: str | None
    """Of the update that brought this version; None for the weights the model's folder held at the start."""
    status: Literal["ready", "refused"]
    """``refused``: the weights are incomplete (a load broke off, or sleep dropped them) and nothing is served until a
    whole update succeeds; ``policy_version`` is then the last one that was served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A complete set of weights: every tensor of the model under the name its Hugging Face checkpoint gives it."""

    policy_version: int
    digest: str
    """What the engine's ``digest`` function makes of ``tensors``."""
    tensors: Iterable[tuple[str, Tensor]]
    """Full tensors, in any order, each once. Iterated once, perhaps in another thread; they must keep their values
    until ``update_weights`` returns. Of tied tensors either both or the embedding alone."""


class WeightWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new version that the engine's ``Writer`` puts straight into the parameters that it samples with."""

    policy_version: int
    digest: str
    """What the writer must find in the parameters once they are written."""
    message: bytes
    """For the writer: where the values lie, and how. The engine does not read it."""


DigestFunction: TypeAlias = "Callable[[Iterable[tuple[str, Tensor]]], str]"
"""Content hash of named tensors; independent of their order and device."""

Writer: TypeAlias = "Callable[[Mapping[str, Tensor], bytes], Callable[[], str]]"
"""Brings weights that are not sent as tensors: out of memory that another process shares, over a group of GPUs.

It is called with the engine's parameters, by the names that they have there, and with ``WeightWrite.message``. It
checks that all can be done, and changes nothing yet. What it returns is called next: that writes every parameter, in
place, and returns the digest of what they hold then. Both are called in the engine's thread, while nothing is sampled.
"""


class RolloutEngine(ABC):
    """Samples from one policy. Every coroutine may be awaited from any event loop, any number at once.

    Requests are taken in order; ``update_weights``, ``write_weights``, ``sleep`` and ``wake`` wait until the requests
    taken before have ended, and requests that come later wait behind them. So every token of a response comes from one
    policy version, unless weights are changed during a ``pause``.

    Cancelling ``generate`` stops the request. Engines give up with an error that names what they waited for when
    nothing has moved for ``EngineConfig.stall_timeout`` seconds.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What this engine is; fixed from the start."""

    @property
    @abstractmethod
    def weights(self) -> WeightsState:
        """Which weights it serves now."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response.

        Raises:
            RequestError: with the reason; nothing but this request is affected.
        """

    async def stream(self, request: GenerateRequest, *, every: float = 0.1) -> AsyncIterator[Chunk]:
        """Sample one response, and tell how far it is.

        Args:
            request: as for ``generate``. Leaving the iteration early (``aclose``) stops it.
            every: seconds between chunks, at least.

        Yields:
            Chunks that together are the response; the last holds the completion.

        Raises:
            RequestError: as ``generate``.
        """
        del every  # an engine that tells it at once, at the end
        completion = await self.generate(request)
        yield Chunk(
            request_id=request.request_id,
            response_token_ids=completion.response_token_ids,
            rollout_logprobs=completion.rollout_logprobs,
            version_spans=completion.version_spans,
            completion=completion,
        )

    @abstractmethod
    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling until ``resume``; requests that come meanwhile wait. Pausing again only changes the mode.

        Returns when nothing is sampled any more: at once with ``keep`` and ``abort``, with ``wait`` when the running
        responses have ended. Updates during a pause do not wait for what is kept, nor for requests that wait.

        Args:
            mode: ``wait``: responses that were begun are completed. ``keep``: they are held, and go on after
                ``resume``; if the weights have changed, with the new ones, from a KV cache computed anew. ``abort``:
                they end now, with what they have, and finish reason ``abort``.

        Raises:
            ValueError: another mode.
            RuntimeError: the engine is closed or has failed.
        """

    @abstractmethod
    async def resume(self) -> None:
        """End a pause; without one it is harmless. Responses that were kept fail with ``stale_weights`` if the engine
        holds no complete weights now.

        Raises:
            RuntimeError: the engine is closed or has failed.
        """

    @abstractmethod
    async def metrics(self) -> EngineMetrics:
        """What the engine is doing, also while it is busy.

        Raises:
            RuntimeError: the engine is closed or has failed.
        """

    @abstractmethod
    async def update_weights(self, update: WeightUpdate) -> WeightsState:
        """Serve other weights, all of them or none.

        Names, shapes and digest of what arrived are checked before any served weight changes; caches that hold
        results of the old weights are emptied.

        Raises:
            WeightsRefused: names unknown, missing, given twice or mis-shaped (all of them are listed), or another
                digest: what was served before is served still. Also when loading itself broke off: then
                ``weights.status`` is ``refused`` and ``generate`` raises ``stale_weights`` until an update succeeds.
            RuntimeError: the engine sleeps, is closed or has failed.
        """

    async def write_weights(self, write: WeightWrite) -> WeightsState:
        """Serve other weights, which the engine's writer puts in place of the present ones: no second copy is made.

        Raises:
            WeightsRefused: the writer found, before it changed anything, that it cannot be done: what was served
                before is served still. Or it broke off, or the parameters have another digest than they should: then
                ``weights.status`` is ``refused`` and ``generate`` raises ``stale_weights`` until an update succeeds.
            RuntimeError: the engine sleeps, is closed or has failed, or cannot do this (``info.can_write``).
        """
        raise RuntimeError(
            f"write_weights to version {write.policy_version}: {self.info.engine} on {self.info.device} cannot be "
            "written in place as it was started (info.can_write is False)"
        )

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: at level 1 the weights are kept in host memory, at level 2 they are dropped
        and an update must follow ``wake``.

        Raises:
            RuntimeError: this engine cannot sleep (``info.can_sleep``), sleeps already, or a pause keeps responses.
            ValueError: another level.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Take the memory again.

        Raises:
            RuntimeError: the engine does not sleep.
        """

    @abstractmethod
    async def health(self) -> None:
        """Return once the engine has answered, also while it is busy sampling.

        Raises:
            RuntimeError: it is closed or has failed; the cause is chained.
            TimeoutError: it does not answer.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the engine; requests still running fail with ``engine_closed``. Closing twice is harmless."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
