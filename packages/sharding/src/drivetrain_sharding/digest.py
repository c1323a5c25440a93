"""A digest of a model's weights that is the same wherever and however they lie.

A tensor's bytes are read as little-endian 32-bit words w_0, w_1, ..., padded with zeros, and laid in rows of 4,096.
With 64-bit arithmetic that wraps around,

    h_r = sum_j K_j w_{r, j}            H = sum_r mix(h_r + (r + 1) C)

where the K_j are fixed odd numbers and mix is a bijection of 64-bit words. The sum over j is multilinear hashing
(Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961): two rows that differ in one word never agree, and rows that
differ otherwise agree with a probability of about 2^-32 over the choice of K. It is integer arithmetic, so that it
comes out the same on every device and in any order of summation. The digest of a set of tensors is the SHA-256 of their
names, dtypes, shapes and H, sorted by name.

It guards against loss, mix-ups and corruption, not against someone who wants to forge a digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ROW = 4096
# Words hashed at a time. On a CPU their 64-bit products then stay in the cache; elsewhere large steps cost less.
_CPU_WORDS = 2**17
_DEVICE_WORDS = 2**23
_MASK = 2**64 - 1
_C = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


class Digest:
    """Builds the digest of named tensors, in whatever order they come.

    Example:
        >>> whole = Digest()
        >>> whole.add("b", torch.ones(2))
        >>> whole.add("a", torch.zeros(3))
        >>> whole.hexdigest() == digest({"a": torch.zeros(3), "b": torch.ones(2)})
        True
    """

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}
        self._rows: dict[str, Tensor] = {}
        self._products: dict[torch.device, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a whole tensor in. On a GPU this does not wait for the device.

        Raises:
            ValueError: the name was added before, or the tensor is a shard.
        """
        if name in self._headers:
            raise ValueError(f"tensor {name} was added before; names are digested once")
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ValueError(f"tensor {name} is a {type(tensor).__name__}; give whole tensors, as named_tensors does")
        shape = ",".join(map(str, tensor.shape))
        self._headers[name] = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}"
        device = tensor.device
        if device not in self._products:
            words = _CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS
            self._products[device] = torch.empty(words // _ROW, _ROW, dtype=torch.int64, device=device)
        self._rows[name] = _row_hashes(tensor.detach(), self._products[device])

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        hashes: dict[str, int] = {}
        for device in self._products:
            names = [name for name, rows in self._rows.items() if rows.device == device]
            # One transfer for all tensors of a device.
            rows = torch.cat([self._rows[name] for name in names]).cpu()
            parts = torch.split(rows, [self._rows[name].numel() for name in names])
            hashes.update((name, _combined(part)) for name, part in zip(names, parts, strict=True))
        total = hashlib.sha256()
        for name in sorted(self._headers):
            content = f"{self._headers[name]}\0{hashes[name]:016x}\n".encode()
            total.update(len(content).to_bytes(8, "little") + content)
        return total.hexdigest()


def digest(tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> str:
    """The digest of named whole tensors: 64 hexadecimal digits.

    It depends on the names, dtypes, shapes and every bit of the values; not on the device, the memory layout or the
    order of the tensors. NaNs and zeros with other bits are other values.

    Raises:
        ValueError: a name comes twice.
    """
    result = Digest()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        result.add(name, tensor)
    return result.hexdigest()


def _row_hashes(tensor: Tensor, products: Tensor) -> Tensor:
    """h: int64 `[rows]`, on the tensor's device. `products` is room for the products of some rows."""
    words = _words(tensor)
    keys = _keys(tensor.device)
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = words[rows.numel() :]
    hashes = torch.empty(len(rows) + (rest.numel() > 0), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(rows), len(products)):
        some = rows[start : start + len(products)]
        torch.sum(products[: len(some)].copy_(some).mul_(keys), 1, out=hashes[start : start + len(some)])
    if rest.numel():
        hashes[-1] = (rest * keys[: rest.numel()]).sum()
    return hashes


def _combined(rows: Tensor) -> int:
    """H of the row hashes h."""
    x = rows + torch.arange(1, rows.numel() + 1) * _signed(_C)
    x ^= (x >> 32) & 0xFFFFFFFF
    x *= _signed(_MIX)
    x ^= (x >> 29) & 0x7FFFFFFFF
    return int(x.sum()) & _MASK


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int32, the last word filled up with zeros."""
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.storage_offset() * data.element_size() % 4:
        data = data.clone()
    octets = data.view(torch.uint8)
    if missing := -octets.numel() % 4:
        octets = torch.nn.functional.pad(octets, (0, missing))
    return octets.view(torch.int32)


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """K: int64 `[4096]`, odd numbers from the splitmix64 generator."""
    keys = []
    for index in range(1, _ROW + 1):
        x = index * _C & _MASK
        x = (x ^ x >> 30) * _MIX & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        keys.append(_signed((x ^ x >> 31) | 1))
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
