"""A plain transformers model in this process: no extension modules, every architecture transformers has, and slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain_rollout._backend import Sampled, Usage
from drivetrain_rollout._checks import Manifest, most_tokens
from drivetrain_rollout._threaded import ThreadedEngine
from drivetrain_rollout.engine import DigestFunction, EngineConfig, EngineInfo, Writer
from drivetrain_rollout.types import GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_rollout._draw import Settings


class TransformersEngine(ThreadedEngine):
    """Samples from a transformers model with a KV cache, one token of every running response in a step.

    Up to ``max_num_seqs`` responses run at once. Requests that come join them, where the model's cache holds all
    tokens; with sliding windows, or states that are no cache, they wait until the running responses have ended. It
    shares torch's settings with its process and changes none. It does not sleep.

    Args:
        config: ``engine_args`` are further arguments of ``AutoModelForCausalLM.from_pretrained``.
        digest: checks every update; without it the digest of an update is recorded as it was sent.
        writer: what ``write_weights`` calls, with the model's parameters and saved buffers.

    Raises:
        ValueError: ``kv_cache_bytes`` is given (the cache has no budget here), or there is no such model.
        TimeoutError: the model was not loaded within ``config.start_timeout``.
    """

    def __init__(
        self, config: EngineConfig, *, digest: DigestFunction | None = None, writer: Writer | None = None
    ) -> None:
        if config.kv_cache_bytes is not None:
            raise ValueError(
                f"kv_cache_bytes {config.kv_cache_bytes}: the transformers engine has no budget for its KV cache; "
                "leave it out and bound max_num_seqs and max_model_len"
            )
        super().__init__(partial(_TransformersBackend, config), config, digest=digest, writer=writer)


@dataclass(slots=True)
class _Row:
    key: int
    request: GenerateRequest
    known: tuple[int, ...]
    """Tokens of the prompt, and of the response that is continued."""
    longest: int
    """Most tokens to sample."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended, if it has."""
        if self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.longest else None

    def told(self, finish_reason: str) -> Sampled:
        """What was sampled for it."""
        return Sampled(
            key=self.key,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            finish_reason=finish_reason,
        )


@dataclass(slots=True)
class _Batch:
    """B rows being sampled, L slots of each in the cache, prompts padded on the left."""

    rows: list[_Row]
    settings: Settings
    cache: Any
    input_ids: Tensor
    """What the model reads next: the prompts at first, then the tokens sampled last. [B, L] or [B, 1]."""
    positions: Tensor
    """Of ``input_ids``, the same shape."""
    attention_mask: Tensor
    """1 where the cache, once ``input_ids`` are in it, holds a token and not padding. [B, L]."""


class _TransformersBackend:
    """Calls the model; lives in the engine's thread."""

    def __init__(self, config: EngineConfig) -> None:
        import torch
        import transformers

        from drivetrain_rollout._manifest import manifest_of, read_config, resolve_dtype

        hf_config = read_config(config.model)
        dtype = resolve_dtype(config.dtype, hf_config, config.device)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.model, **{"dtype": dtype, "trust_remote_code": False, **config.engine_args}
        )
        self._model = model.to(config.device).eval()
        self._device = torch.device(config.device)
        self._max_num_seqs = config.max_num_seqs
        self._waiting: deque[_Row] = deque()
        self._batch: _Batch | None = None
        head = model.get_output_embeddings().weight.shape[0]
        self.manifest: Manifest = manifest_of(model)
        self.info = EngineInfo(
            engine="transformers",
            engine_version=str(transformers.__version__),
            model=config.model,
            vocab_size=min(config.vocab_size or head, head),
            max_model_len=config.max_model_len or hf_config.get_text_config().max_position_embeddings,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            can_sleep=False,
            can_write=True,
        )

    def add(self, key: int, request: GenerateRequest) -> None:
        before = () if request.continued is None else request.continued.response_token_ids
        longest = most_tokens(request, self.info.max_model_len) - len(before)
        self._waiting.append(_Row(key, request, request.prompt_token_ids + before, longest))

    def abort(self, key: int) -> None:
        self._waiting = deque(row for row in self._waiting if row.key != key)
        if self._batch is not None:
            self._batch = self._kept(self._batch, [row.key != key for row in self._batch.rows])

    def step(self) -> list[Sampled]:
        """Sample the first token of what joins, or the next one of every row."""
        batch = self._batch
        if self._waiting and (batch is None or self._takes_more(batch)):
            new, ended = self._advance(self._next_batch(0 if batch is None else len(batch.rows)))
            self._batch = batch if new is None else new if batch is None else self._merged(batch, new)
            return ended
        if batch is None:
            return []
        self._batch, ended = self._advance(batch)
        return ended

    def _takes_more(self, batch: _Batch) -> bool:
        from transformers.cache_utils import DynamicLayer

        return len(batch.rows) < self._max_num_seqs and all(type(layer) is DynamicLayer for layer in batch.cache.layers)

    def _advance(self, batch: _Batch) -> tuple[_Batch | None, list[Sampled]]:
        """Sample a token of every row; what is left of the batch, and what ended."""
        import torch

        from drivetrain_rollout._draw import draw

        with torch.inference_mode():
            output = self._model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.positions,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            next_positions = batch.positions[:, -1:] + 1
            logits = output.logits[:, -1, : self.info.vocab_size].float()
            tokens, logprobs = draw(logits, batch.settings, next_positions[:, 0])
            batch.input_ids = tokens[:, None]
            batch.positions = next_positions
            batch.attention_mask = torch.cat([batch.attention_mask, torch.ones_like(batch.input_ids)], dim=1)
        ended = []
        for row, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if reason := row.finish_reason:
                ended.append(row.told(reason))
        return self._kept(batch, [row.finish_reason is None for row in batch.rows]), ended

    def drain(self) -> list[Sampled]:
        return []  # a step completes what it begins

    def progress(self, keys: Sequence[int]) -> list[Sampled]:
        running = [] if self._batch is None else self._batch.rows
        rows = {row.key: row for row in (*self._waiting, *running)}
        return [rows[key].told("abort") for key in keys]

    def usage(self) -> Usage:
        return Usage(waiting=len(self._waiting))

    def _next_batch(self, running: int) -> _Batch:
        import torch
        from transformers import DynamicCache

        rows: list[_Row] = []
        while self._waiting and running + len(rows) < self._max_num_seqs:
            rows.append(self._waiting.popleft())
        known = [[*row.known, *row.token_ids] for row in rows]
        width = max(map(len, known))
        padding = [width - len(token_ids) for token_ids in known]
        inputs = [[0] * pad + token_ids for token_ids, pad in zip(known, padding, strict=True)]
        columns = torch.arange(width, device=self._device)
        positions = columns - torch.tensor(padding, device=self._device)[:, None]
        return _Batch(
            rows=rows,
            settings=self._settings(rows),
            cache=DynamicCache(config=self._model.config),
            input_ids=torch.tensor(inputs, device=self._device),
            positions=positions.clamp(min=0),
            attention_mask=(positions >= 0).long(),
        )

    def _settings(self, rows: list[_Row]) -> Settings:
        from drivetrain_rollout._draw import Settings

        samplings = [row.request.sampling for row in rows]
        return Settings.of(samplings, vocab_size=self.info.vocab_size, device=self._device)

    def _kept(self, batch: _Batch, kept: list[bool]) -> _Batch | None:
        """The rows of a batch that are kept; None if there are none."""
        import torch

        if all(kept):
            return batch
        rows = [row for row, keep in zip(batch.rows, kept, strict=True) if keep]
        if not rows:
            return None
        index = torch.tensor(kept, device=self._device).nonzero()[:, 0]
        with torch.inference_mode():
            batch.cache.batch_select_indices(index)
            return _Batch(
                rows=rows,
                settings=self._settings(rows),
                cache=batch.cache,
                input_ids=batch.input_ids[index],
                positions=batch.positions[index],
                attention_mask=batch.attention_mask[index],
            )

    def _merged(self, one: _Batch, other: _Batch) -> _Batch:
        """Both, each padded on the left to the longer's length, less what is padding of all."""
        import torch

        with torch.inference_mode():
            masks = _side_by_side([one.attention_mask, other.attention_mask], dim=1)
            unused = int((masks.sum(dim=0) == 0).sum())
            for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
                mine.keys = _side_by_side([mine.keys, theirs.keys], dim=2)[:, :, unused:]
                mine.values = _side_by_side([mine.values, theirs.values], dim=2)[:, :, unused:]
            rows = one.rows + other.rows
            return _Batch(
                rows=rows,
                settings=self._settings(rows),
                cache=one.cache,
                input_ids=torch.cat([one.input_ids, other.input_ids]),
                positions=torch.cat([one.positions, other.positions]),
                attention_mask=masks[:, unused:],
            )

    def _begin_anew(self) -> None:
        """What runs goes on behind its tokens, with a cache of the weights that come."""
        if self._batch is not None:
            self._waiting.extendleft(reversed(self._batch.rows))
            self._batch = None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        import torch

        from drivetrain_rollout._manifest import checkpoint_tensors

        self._begin_anew()
        served = checkpoint_tensors(self._model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                served[name].copy_(tensor)

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self.manifest.aliases}

    def write(self, act: Callable[[], str]) -> str:
        import torch

        self._begin_anew()
        with torch.no_grad():
            return act()

    def sleep(self, level: int) -> None:
        raise AssertionError(f"sleep({level}), but info.can_sleep is False")

    def wake(self) -> None:
        raise AssertionError("wake(), but info.can_sleep is False")

    def close(self) -> None:
        self._waiting.clear()
        self._batch = None
        del self._model


def _side_by_side(tensors: Sequence[Tensor], *, dim: int) -> Tensor:
    """Along the first dimension, padded at the beginning of ``dim`` with zeros to the same length."""
    import torch

    longest = max(tensor.shape[dim] for tensor in tensors)
    padded = []
    for tensor in tensors:
        shape = list(tensor.shape)
        shape[dim] = longest - shape[dim]
        padded.append(torch.cat([tensor.new_zeros(shape), tensor], dim=dim))
    return torch.cat(padded)
