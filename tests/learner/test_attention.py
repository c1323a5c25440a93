import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain_learner import PackedBatch, PolicyModel
from drivetrain_learner import attention as module
from drivetrain_learner.attention import Packing, packed_attention
from torch import Tensor, nn

Make = Callable[..., Any]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def _forget_kernel() -> Iterator[None]:
    module._variable_length_kernel.cache_clear()
    yield
    module._variable_length_kernel.cache_clear()


def everything(lengths: list[int]) -> PackedBatch:
    """Sequences of so many slots each."""
    return PackedBatch.pack([[1] * (n + 1) for n in lengths], [[True] * (n + 1) for n in lengths])


def by_blocks(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Attention with the whole [N, N] mask, `[1, H, N, D]` in, `[1, N, H, D]` out."""
    row = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)
    distance = batch.positions[:, None] - batch.positions
    mask = (row[:, None] == row) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 7, 0, 3, 1], [0, 0, 2]])
def test_rows_give_what_a_block_mask_gives(lengths: list[int], window: int | None) -> None:
    batch = everything(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, batch.num_tokens, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    slope = torch.randn(1, batch.num_tokens, 4, 8, generator=generator)
    expected = by_blocks(q, k, v, batch, window)
    got, weights = packed_attention(
        nn.Identity(), q, k, v, None, scaling=0.3, sliding_window=window, packing=Packing(batch), dropout=0.9
    )
    assert weights is None
    torch.testing.assert_close(got, expected)
    for one, other in zip(
        torch.autograd.grad((got * slope).sum(), (q, k, v)),
        torch.autograd.grad((expected * slope).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_it_does_not_compute_is_refused() -> None:
    batch = everything([3])
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="does not compute softcap"):
        packed_attention(nn.Identity(), q, q, q, None, packing=Packing(batch), softcap=50.0)
    both_ways = nn.Identity()
    both_ways.is_causal = False
    with pytest.raises(ValueError, match="Identity is not"):
        packed_attention(both_ways, q, q, q, None, packing=Packing(batch))


@pytest.mark.usefixtures("_forget_kernel")
@pytest.mark.parametrize("error", ["ImportError('undefined symbol: _ZN3c10')", "OSError('libcudart.so.12')"])
def test_a_broken_flash_attn_is_passed_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / "flash_attn.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.warns(UserWarning, match="flash_attn is installed and cannot be used"):
        kernel = module._variable_length_kernel()
    assert kernel is None or kernel.func is module._varlen  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_forget_kernel")
@pytest.mark.parametrize(("window", "expected"), [(None, (-1, -1)), (3, (2, 0))])
def test_flash_attn_is_called_with_the_packed_layout(
    monkeypatch: pytest.MonkeyPatch, window: int | None, expected: tuple[int, int]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int, **settings: Any) -> Tensor:
        calls.append((cu_q.tolist(), cu_k.tolist(), longest, settings))
        return q

    fake = types.ModuleType("flash_attn")
    fake.flash_attn_varlen_func = flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    kernel = module._variable_length_kernel()
    assert kernel is not None
    q = torch.randn(5, 2, 8)
    kernel(q, q, q, Packing(everything([2, 3])), 0.5, window)
    assert calls == [([0, 2, 5], [0, 2, 5], (3, 3), {"softmax_scale": 0.5, "causal": True, "window_size": expected})]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_gives_what_rows_give(window: int | None) -> None:
    batch = everything([1, 70, 0, 33, 128])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, batch.num_tokens, 64, generator=generator) for h in (4, 2, 2))
    settings = {"scaling": 0.1, "sliding_window": window}
    expected, _ = packed_attention(nn.Identity(), q, k, v, None, packing=Packing(batch), **settings)
    packing = Packing(batch.to("cuda"))
    exact, _ = packed_attention(nn.Identity(), q.cuda(), k.cuda(), v.cuda(), None, packing=packing, **settings)
    torch.testing.assert_close(exact.cpu(), expected, rtol=1e-3, atol=1e-3)
    half = [x.cuda().bfloat16().requires_grad_() for x in (q, k, v)]
    got, _ = packed_attention(nn.Identity(), *half, None, packing=packing, **settings)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=0, atol=0.02)
    got.float().square().sum().backward()
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    packed_attention(nn.Identity(), *full, None, packing=Packing(batch), **settings)[0].square().sum().backward()
    for one, other in zip(half, full, strict=True):
        torch.testing.assert_close(one.grad.float().cpu(), other.grad, rtol=0.05, atol=0.1)  # type: ignore[union-attr]


@pytest.mark.gpu
@needs_gpu
def test_a_policy_on_a_gpu_agrees_with_the_cpu(make_llama: Make, make_sequences: Make) -> None:
    batch = PackedBatch.pack(ids := make_sequences(9, 2, 80, 33), [[True] * len(row) for row in ids])
    model = make_llama(head_dim=16)
    expected = PolicyModel(model)(batch, temperature=0.8, entropy=True)
    model.cuda()
    got = PolicyModel(model)(batch.to("cuda"), temperature=0.8, entropy=True)
    torch.testing.assert_close(got.logprobs.cpu(), expected.logprobs, rtol=0, atol=2e-3)
    half = PolicyModel(model, autocast=torch.bfloat16)(batch.to("cuda"), temperature=0.8, entropy=True)
    torch.testing.assert_close(half.logprobs.cpu(), expected.logprobs, rtol=0, atol=0.3)
    half.logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
