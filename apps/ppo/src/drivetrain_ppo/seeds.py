"""Seeds derived from a run's own."""

import hashlib


def derived_seed(*parts: int) -> int:
    """A number below 2**56 that depends on all parts: equal parts give equal seeds, others unrelated ones."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest())
