"""Attention over packed sequences, for any transformers model that uses its attention interface.

Three kernels give the same numbers; the best one present is taken at each call:

* on a GPU, in half precision: `flash_attn` when it can be imported, else `torch.nn.attention.varlen`;
* elsewhere: the sequences are laid in rows of equal length, padded on the right, for
  `torch.nn.functional.scaled_dot_product_attention`. Causal attention never looks right, so that this needs no mask.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain_learner.batch import PackedBatch

IMPLEMENTATION = "drivetrain_packed"
"""The name under which packed attention is registered with transformers."""

# Arguments of transformers' attention interface that change the result and that packed attention does not compute.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


class Packing:
    """Where the sequences of a batch lie, worked out once and used by every layer."""

    def __init__(self, batch: PackedBatch) -> None:
        self.cu_seqlens = batch.cu_seqlens
        self.max_seqlen = batch.max_seqlen
        self._batch = batch

    @functools.cached_property
    def padded(self) -> tuple[Tensor, Tensor] | None:
        """The indices between the packed layout and rows of `max_seqlen` places, or None when the two are the same.

        Returns:
            `rows`, int64 `[S' * max_seqlen]` for the S' sequences that have slots: the slot that each place reads (a
            place beyond its sequence reads the sequence's last slot). `places`, int64 `[N]`: the place of each slot.
        """
        bounds = torch.unique_consecutive(self.cu_seqlens).long()
        longest, count = self.max_seqlen, bounds.numel() - 1
        if count * longest == self._batch.num_tokens:
            return None
        sizes = bounds.diff()
        steps = torch.arange(longest, device=bounds.device)
        rows = bounds[:-1, None] + torch.minimum(steps, sizes[:, None] - 1)
        row = torch.arange(count, device=bounds.device).repeat_interleave(sizes)
        return rows.flatten(), row * longest + self._batch.positions


def install_packed_attention(model: Any) -> None:
    """Makes a transformers model attend within sequences when it is called with a `packing`.

    Called without one (by `generate`, say) the model attends as transformers' "sdpa" does.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(IMPLEMENTATION)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form of transformers' attention interface: `[1, H, N, D]` in, `[1, N, H, D]` out.

    Dropout is never applied: a policy's log-probs are a function of its weights.
    """
    if packing is None:
        from transformers import AttentionInterface

        kwargs.update(scaling=scaling, sliding_window=sliding_window)
        result: tuple[Tensor, None] = AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)
        return result
    if unsupported := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"packed attention does not compute {', '.join(unsupported)}, which this model needs")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention is causal and {type(module).__name__} is not")
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_seqlen else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):
        # Rotary embeddings come in fp32, so that queries and keys do too.
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    kernel = _variable_length_kernel() if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) else None
    return (kernel or _padded)(q, k, v, packing, scaling, window)[None], None


class _Unpack(torch.autograd.Function):
    """`x[rows]`. Only the places that hold a slot carry a gradient back, so that it is read, not summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Repack(torch.autograd.Function):
    """`x[places]`. Places without a slot get a gradient of exactly zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, places, grads[0]), None


_unpack: Callable[[Tensor, Tensor, Tensor], Tensor] = _Unpack.apply
_repack: Callable[[Tensor, Tensor], Tensor] = _Repack.apply


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None) -> Tensor:
    """`[N, H, D]` in and out, by way of `[S, H, T, D]`."""
    if q.shape[0] == 0:
        return q
    layout = packing.padded

    def to_rows(x: Tensor) -> Tensor:
        if layout is not None:
            x = _unpack(x, *layout)
        return torch.unflatten(x, 0, (-1, packing.max_seqlen)).transpose(1, 2)

    mask = None
    if window is not None:
        steps = torch.arange(packing.max_seqlen, device=q.device)
        distance = steps[:, None] - steps
        mask = (distance >= 0) & (distance < window)
    groups = q.shape[1] // k.shape[1]
    padded_q, padded_k, padded_v = to_rows(q), to_rows(k), to_rows(v)
    if groups > 1:
        padded_k, padded_v = (x.repeat_interleave(groups, dim=1) for x in (padded_k, padded_v))
    out = F.scaled_dot_product_attention(
        padded_q, padded_k, padded_v, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if layout is None else _repack(out, layout[1])


_Kernel = Callable[[Tensor, Tensor, Tensor, Packing, float | None, int | None], Tensor]


@functools.cache
def _variable_length_kernel() -> _Kernel | None:
    """A kernel for the packed layout on a GPU, or None."""
    try:
        flash = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ModuleNotFoundError:
        pass
    except (ImportError, OSError, AttributeError) as error:
        warnings.warn(f"flash_attn is installed and cannot be used ({error}); using PyTorch's own", stacklevel=2)
    else:
        return functools.partial(_flash, flash)
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    # Up to torch 2.11 fewer key than query heads need no saying.
    says_grouped = "enable_gqa" in inspect.signature(varlen).parameters
    return functools.partial(_varlen, functools.partial(varlen, enable_gqa=True) if says_grouped else varlen)


def _flash(
    flash: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    cu, longest = packing.cu_seqlens, packing.max_seqlen
    size = (-1, -1) if window is None else (window - 1, 0)
    out: Tensor = flash(q, k, v, cu, cu, longest, longest, softmax_scale=scaling, causal=True, window_size=size)
    return out


def _varlen(
    varlen: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    cu, longest = packing.cu_seqlens, packing.max_seqlen
    size = (-1, 0) if window is None else (window - 1, 0)
    out: Tensor = varlen(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=size)
    return out
