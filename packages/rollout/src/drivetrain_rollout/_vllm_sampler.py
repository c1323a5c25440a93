"""Drawing and recording inside vLLM: ``_draw`` in the place of its sampler, log-probs in a table on the device.

vLLM returns log-probs through Python objects for each token of each step, which costs a third of a GPU's throughput.
Here they stay where they are computed, in ``table[slot, position]``, with a slot for each response that is being
sampled, and are copied to the host once, when the response has ended. That needs no synchronisation: when vLLM hands
out a token, the step that drew it has been completed on the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from drivetrain_rollout._draw import Settings, draw

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_rollout.types import SamplingParams


class Recorder:
    """Draws every token of one of vLLM's model runners, in this process, and keeps their log-probs.

    Args:
        runner: vLLM's model runner, old (V1) or new (V2).
        vocab_size: ids from this on are never drawn.
        max_model_len: longest sequence.
        max_num_seqs: responses that are usually sampled at once; the table takes 4 bytes for each of their tokens, and
            grows when more are begun.

    Raises:
        ValueError: this vLLM samples in a way that is not known here.
    """

    def __init__(self, runner: Any, *, vocab_size: int, max_model_len: int, max_num_seqs: int) -> None:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._original: Callable[..., Any] = runner.sampler.sample
        names = list(inspect.signature(self._original).parameters)
        if "sampling_metadata" in names:
            rows: Callable[[Tensor, tuple[Any, ...]], _Rows] = _OldRows(runner)
        elif {"expanded_idx_mapping", "idx_mapping_np", "pos"} <= set(names):
            # The first parameter, the logits, is not among the further arguments.
            rows = _NewRows(
                runner, *(names.index(name) - 1 for name in ("expanded_idx_mapping", "idx_mapping_np", "pos"))
            )
        else:
            raise ValueError(f"vLLM's sampler takes {', '.join(names)}: it is not one that is known here")
        self._rows = rows
        self._vocab_size = vocab_size
        self._width = max_model_len
        self._device = torch.device(runner.device)
        self._samplings: dict[str, SamplingParams] = {}
        self._slots: dict[str, int] = {}
        self._free = list(range(max_num_seqs))
        self._table = self._empty(max_num_seqs)
        # vLLM's own has a kernel on a GPU; on a CPU there is nothing faster than ours.
        self._cut = apply_top_k_top_p if self._device.type == "cuda" else None
        self._reader = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last_ids: list[str] = []
        self._last: tuple[Tensor, Settings]
        runner.sampler.sample = self._sample

    def _empty(self, slots: int) -> Tensor:
        # A value that was never written must not pass for a log-prob. The last column takes what nobody reads.
        return torch.full((slots, self._width + 1), math.nan, dtype=torch.float32, device=self._device)

    def add(self, request_id: str, sampling: SamplingParams) -> None:
        """Expect a request, under the id that the runner has for it."""
        self._samplings[request_id] = sampling

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended or was aborted; harmless if it has been forgotten."""
        self._samplings.pop(request_id, None)
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._free.append(slot)

    def logprobs(self, request_id: str, start: int, count: int) -> list[float]:
        """Of ``count`` tokens that vLLM has handed out, from position ``start`` of the sequence on."""
        if not count:
            return []
        values = self._table[self._slots[request_id], start : start + count]
        if self._reader is None:
            return values.tolist()
        with torch.cuda.stream(self._reader):  # the step that is under way now goes on
            return values.tolist()

    def _sample(self, logits: Tensor, *arguments: Any, **options: Any) -> Any:
        """In the place of the sampler's own ``sample``."""
        rows = self._rows(logits, arguments)
        if not all(request_id in self._samplings for request_id in rows.ids):
            return self._original(logits, *arguments, **options)  # a trial run of vLLM's own
        slots, settings = self._prepared(rows.ids)
        tokens, logprobs = draw(logits[:, : self._vocab_size], settings, rows.positions, cut=self._cut)
        columns = torch.where(rows.kept, rows.positions, self._width)
        self._table[slots, columns] = logprobs
        return rows.answer(tokens)

    def _prepared(self, ids: list[str]) -> tuple[Tensor, Settings]:
        if ids != self._last_ids:
            new = [request_id for request_id in ids if request_id not in self._slots]
            if new:
                self._give_slots(new)
            slots = torch.tensor([self._slots[request_id] for request_id in ids])
            if self._reader is not None:
                slots = slots.pin_memory().to(self._device, non_blocking=True)
            samplings = [self._samplings[request_id] for request_id in ids]
            self._last = slots, Settings.of(samplings, vocab_size=self._vocab_size, device=self._device)
            self._last_ids = ids
        return self._last

    def _give_slots(self, ids: Iterable[str]) -> None:
        given = []
        for request_id in ids:
            if not self._free:
                held = len(self._table)
                self._free.extend(range(held, 2 * held))
                self._table = torch.cat([self._table, self._empty(held)])
                if self._reader is not None:
                    self._reader.wait_stream(torch.cuda.current_stream(self._device))  # the copy is under way
            self._slots[request_id] = self._free.pop()
            given.append(self._slots[request_id])
        index = torch.tensor(given)
        if self._reader is not None:
            index = index.pin_memory().to(self._device, non_blocking=True)
        self._table.index_fill_(0, index, math.nan)


class _Rows:
    """Which requests the rows of a step's logits belong to, B of them."""

    __slots__ = ("answer", "ids", "kept", "positions")

    def __init__(
        self, ids: list[str], positions: Tensor, kept: Tensor, answer: Callable[[Tensor], tuple[Tensor, Any]]
    ) -> None:
        self.ids = ids
        self.positions = positions
        """[B], int64, of the tokens that are drawn."""
        self.kept = kept
        """[B], bool; False where vLLM will drop the token, since the request's known tokens are not all computed."""
        self.answer = answer
        """What the sampler's ``sample`` returns for the tokens."""


class _OldRows:
    """Of vLLM's first model runner, which samples for the requests of its ``input_batch``, in order."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, logits: Tensor, _: tuple[Any, ...]) -> _Rows:
        count = len(logits)
        runner = self._runner
        return _Rows(
            list(runner.input_batch.req_ids[:count]),
            runner.seq_lens[:count].long(),
            ~runner.discard_request_mask.gpu[:count],
            lambda tokens: (tokens, None),
        )


class _NewRows:
    """Of vLLM's second model runner, which passes to ``sample`` which of its ``req_states`` a row belongs to."""

    def __init__(self, runner: Any, mapping: int, mapping_np: int, position: int) -> None:
        self._states = runner.req_states
        self._mapping = mapping
        self._mapping_np = mapping_np
        self._position = position

    def __call__(self, logits: Tensor, arguments: tuple[Any, ...]) -> _Rows:
        states = self._states
        known = states.index_to_req_id
        positions = arguments[self._position].long() + 1
        return _Rows(
            [known.get(index, "") for index in arguments[self._mapping_np].tolist()],
            positions,
            positions >= states.prefill_len.gpu[arguments[self._mapping]],
            lambda tokens: (tokens, logits),
        )
