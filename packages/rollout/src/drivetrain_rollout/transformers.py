"""A plain transformers model in this process: no extension modules, every architecture transformers has, and slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain_rollout._backend import Sampled, Usage
from drivetrain_rollout._checks import Manifest
from drivetrain_rollout._threaded import ThreadedEngine
from drivetrain_rollout.engine import DigestFunction, EngineConfig, EngineInfo, Writer
from drivetrain_rollout.types import GenerateRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TransformersEngine(ThreadedEngine):
    """Samples from a transformers model with a KV cache, in batches of whatever is waiting.

    A batch of up to ``max_num_seqs`` requests is sampled until its last response ends; requests that come meanwhile
    make the next one. It shares torch's settings with its process and changes none. It does not sleep.

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
    longest: int
    generator: torch.Generator | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    """B rows being sampled, L slots of each in the cache, prompts padded on the left."""

    rows: list[_Row]
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
        self._generator = torch.Generator(self._device).manual_seed(config.seed)
        self._max_num_seqs = config.max_num_seqs
        self._waiting: deque[tuple[int, GenerateRequest]] = deque()
        self._batch: _Batch | None = None
        self.manifest: Manifest = manifest_of(model)
        self.info = EngineInfo(
            engine="transformers",
            engine_version=str(transformers.__version__),
            model=config.model,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            max_model_len=config.max_model_len or hf_config.get_text_config().max_position_embeddings,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            can_sleep=False,
            can_write=True,
        )

    def add(self, key: int, request: GenerateRequest) -> None:
        self._waiting.append((key, request))

    def abort(self, key: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        if self._batch is not None:
            self._keep([row.key != key for row in self._batch.rows])

    def step(self) -> list[Sampled]:
        """Sample one token of every row."""
        import torch

        if self._batch is None:
            if not self._waiting:
                return []
            self._batch = self._next_batch()
        batch = self._batch
        with torch.inference_mode():
            output = self._model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.positions,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens, logprobs = self._sample(output.logits[:, -1].float(), batch.rows)
            batch.input_ids = tokens[:, None]
            batch.positions = batch.positions[:, -1:] + 1
            batch.attention_mask = torch.cat([batch.attention_mask, torch.ones_like(batch.input_ids)], dim=1)
        ended = []
        for row, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if reason := _finish_reason(row):
                ended.append(Sampled(key=row.key, token_ids=row.token_ids, logprobs=row.logprobs, finish_reason=reason))
        if ended:
            self._keep([_finish_reason(row) is None for row in batch.rows])
        return ended

    def drain(self) -> list[Sampled]:
        return []

    def progress(self, keys: Sequence[int]) -> list[Sampled]:
        rows = {row.key: row for row in self._batch.rows} if self._batch is not None else {}
        found = []
        for key in keys:
            token_ids, logprobs = (rows[key].token_ids, rows[key].logprobs) if key in rows else ([], [])
            found.append(Sampled(key=key, token_ids=list(token_ids), logprobs=list(logprobs), finish_reason="abort"))
        return found

    def usage(self) -> Usage:
        return Usage(waiting=len(self._waiting))

    def _next_batch(self) -> _Batch:
        import torch
        from transformers import DynamicCache

        rows: list[_Row] = []
        while self._waiting and len(rows) < self._max_num_seqs:
            key, request = self._waiting.popleft()
            sampling = request.sampling
            seeded = None if sampling.seed is None else torch.Generator(self._device).manual_seed(sampling.seed)
            room = self.info.max_model_len - len(request.prompt_token_ids)
            rows.append(_Row(key, request, longest=min(sampling.max_tokens, room), generator=seeded))
        width = max(len(row.request.prompt_token_ids) for row in rows)
        padding = [width - len(row.request.prompt_token_ids) for row in rows]
        prompts = [[0] * pad + list(row.request.prompt_token_ids) for row, pad in zip(rows, padding, strict=True)]
        columns = torch.arange(width, device=self._device)
        positions = columns - torch.tensor(padding, device=self._device)[:, None]
        return _Batch(
            rows=rows,
            cache=DynamicCache(config=self._model.config),
            input_ids=torch.tensor(prompts, device=self._device),
            positions=positions.clamp(min=0),
            attention_mask=(positions >= 0).long(),
        )

    def _keep(self, kept: list[bool]) -> None:
        """Drop the rows of the batch that are not kept, and the batch with its last."""
        import torch

        batch = self._batch
        assert batch is not None
        if all(kept):
            return
        batch.rows = [row for row, keep in zip(batch.rows, kept, strict=True) if keep]
        if not batch.rows:
            self._batch = None
            return
        index = torch.tensor(kept, device=self._device).nonzero()[:, 0]
        with torch.inference_mode():
            batch.cache.batch_select_indices(index)
            batch.input_ids = batch.input_ids[index]
            batch.positions = batch.positions[index]
            batch.attention_mask = batch.attention_mask[index]

    def _sample(self, logits: Tensor, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """Token ids [B] and their log-probs [B] of logits [B, V]."""
        import torch

        logprobs = processed_logprobs(
            logits,
            temperature=[row.request.sampling.temperature for row in rows],
            top_k=[row.request.sampling.top_k for row in rows],
            top_p=[row.request.sampling.top_p for row in rows],
        )
        # argmax of p / e with e exponential draws from p, and lets each row have a generator of its own.
        noise = torch.empty_like(logprobs).exponential_(generator=self._generator)
        for index, row in enumerate(rows):
            if row.generator is not None:
                noise[index].exponential_(generator=row.generator)
            if row.request.sampling.temperature == 0:
                noise[index] = 1.0
        tokens = (logprobs.exp() / noise).argmax(dim=-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        import torch

        from drivetrain_rollout._manifest import checkpoint_tensors

        served = checkpoint_tensors(self._model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                served[name].copy_(tensor)

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self.manifest.aliases}

    def write(self, act: Callable[[], str]) -> str:
        import torch

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


def _finish_reason(row: _Row) -> str | None:
    if row.token_ids[-1] in row.request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(row.token_ids) >= row.longest else None


def processed_logprobs(logits: Tensor, *, temperature: list[float], top_k: list[int], top_p: list[float]) -> Tensor:
    """Log-probabilities of the distribution that tokens are drawn from, -inf for tokens that were cut away.

        log softmax(logits / temperature), first over the top_k likeliest tokens, then over the smallest set of those
        whose probability reaches top_p

    A temperature of 0 counts as 1 here and cuts nothing, since the likeliest token is taken.

    Args:
        logits: [B, V], float32.
        temperature: of each row; top_k: 0 keeps all tokens; top_p: 1 keeps all.

    Returns:
        [B, V].
    """
    import torch

    greedy = [value == 0 for value in temperature]
    divisor = torch.tensor([1.0 if zero else value for zero, value in zip(greedy, temperature, strict=True)])
    logits = logits / divisor.to(logits.device)[:, None]
    vocab_size = logits.shape[-1]
    kept = [vocab_size if zero or k == 0 else min(k, vocab_size) for zero, k in zip(greedy, top_k, strict=True)]
    reached = [1.0 if zero else p for zero, p in zip(greedy, top_p, strict=True)]
    if min(kept) < vocab_size or min(reached) < 1:
        values, order = logits.sort(dim=-1, descending=True)
        last = torch.tensor(kept, device=logits.device)[:, None] - 1
        values = values.masked_fill(values < values.gather(1, last), float("-inf"))
        probs = values.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        limit = torch.tensor(reached, device=logits.device)[:, None]
        cut = (before >= limit) & (limit < 1)
        cut[:, 0] = False
        logits = torch.empty_like(logits).scatter_(1, order, values.masked_fill(cut, float("-inf")))
    return logits.log_softmax(dim=-1)
