"""An engine without a model."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain_rollout._backend import Sampled, Usage
from drivetrain_rollout._checks import Manifest
from drivetrain_rollout._threaded import ThreadedEngine
from drivetrain_rollout.engine import DigestFunction, EngineConfig, EngineInfo, Writer
from drivetrain_rollout.types import GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


class ScriptedEngine(ThreadedEngine):
    """An engine without a model, and without torch: it draws tokens uniformly, or returns what a function says.

    Everything else of the contract holds: checks, order, versions, weight updates, sleep. ``events`` tells what was
    done, in order: ``add ID``, ``abort ID``, ``load COUNT``, ``write``, ``sleep LEVEL``, ``wake``, ``close``.

    Args:
        respond: called in the engine's thread, gives the response to a request. It may block; what it raises ends the
            engine, as an exception of a real model does.
        vocab_size, max_model_len: of the model there is not.
        shapes: of the tensors that an update must hold.
        digest: checks every update.
        writer: what ``write_weights`` calls, with no parameters.
        tokens_per_step: how many tokens the request that is served gets in a step; None: its whole response.
        step_seconds: how long a step takes, at least.
    """

    def __init__(
        self,
        *,
        respond: Callable[[GenerateRequest], Sequence[int]] | None = None,
        vocab_size: int = 64,
        max_model_len: int = 128,
        seed: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        digest: DigestFunction | None = None,
        writer: Writer | None = None,
        stall_timeout: float = 60.0,
        tokens_per_step: int | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.events: list[str] = []
        info = EngineInfo(
            engine="scripted",
            engine_version="1",
            model="none",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype="float32",
            device="cpu",
            can_sleep=True,
            can_write=True,
        )
        manifest = Manifest(shapes=shapes or {}, aliases={})
        backend = _ScriptedBackend(info, manifest, self.events, respond, seed, tokens_per_step, step_seconds)
        config = EngineConfig(engine="scripted", model="none", stall_timeout=stall_timeout)
        super().__init__(lambda: backend, config, digest=digest, writer=writer)


class _ScriptedBackend:
    def __init__(
        self,
        info: EngineInfo,
        manifest: Manifest,
        events: list[str],
        respond: Callable[[GenerateRequest], Sequence[int]] | None,
        seed: int,
        tokens_per_step: int | None,
        step_seconds: float,
    ) -> None:
        self.info = info
        self.manifest = manifest
        self._events = events
        self._respond = respond or self._draw
        self._random = random.Random(seed)
        self._tokens_per_step = tokens_per_step
        self._step_seconds = step_seconds
        self._added: dict[int, GenerateRequest] = {}
        self._sampled: dict[int, list[int]] = {}
        self._responses: dict[int, list[int]] = {}

    def _draw(self, request: GenerateRequest) -> list[int]:
        sampling = request.sampling
        source = self._random if sampling.seed is None else random.Random(sampling.seed)
        length = min(sampling.max_tokens, self.info.max_model_len - len(request.prompt_token_ids))
        drawn: list[int] = []
        while len(drawn) < length and not (drawn and drawn[-1] in sampling.stop_token_ids):
            drawn.append(0 if sampling.temperature == 0 else source.randrange(self.info.vocab_size))
        return drawn

    def add(self, key: int, request: GenerateRequest) -> None:
        self._events.append(f"add {request.request_id}")
        self._added[key] = request
        self._sampled[key] = []

    def abort(self, key: int) -> None:
        self._events.append(f"abort {self._added.pop(key).request_id}")
        del self._sampled[key]

    def step(self) -> list[Sampled]:
        """Serve the request that was added first."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        key = next(iter(self._added))
        request, token_ids = self._added[key], self._sampled[key]
        if key not in self._responses:
            before = () if request.continued is None else request.continued.response_token_ids
            self._responses[key] = list(self._respond(request))[len(before) :]
        token_ids.extend(self._responses[key][len(token_ids) :][: self._tokens_per_step])
        if len(token_ids) < len(self._responses[key]):
            return []
        stopped = bool(token_ids) and token_ids[-1] in request.sampling.stop_token_ids
        ended = self._told(key, "stop" if stopped else "length")
        del self._added[key], self._sampled[key], self._responses[key]
        return [ended]

    def drain(self) -> list[Sampled]:
        return []

    def progress(self, keys: Sequence[int]) -> list[Sampled]:
        return [self._told(key, "abort") for key in keys]

    def _told(self, key: int, finish_reason: str) -> Sampled:
        token_ids = list(self._sampled[key])
        logprobs = [-math.log(self.info.vocab_size)] * len(token_ids)
        return Sampled(key=key, token_ids=token_ids, logprobs=logprobs, finish_reason=finish_reason)

    def usage(self) -> Usage:
        return Usage(waiting=max(0, len(self._added) - 1))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._events.append(f"load {len(tensors)}")

    def parameters(self) -> Mapping[str, Tensor]:
        return {}

    def write(self, act: Callable[[], str]) -> str:
        self._events.append("write")
        return act()

    def sleep(self, level: int) -> None:
        self._events.append(f"sleep {level}")

    def wake(self) -> None:
        self._events.append("wake")

    def close(self) -> None:
        self._events.append("close")
