"""Seeds derived from a run's own."""

import hashlib


def derive_seed(*parts: int) -> int:
    """A seed below 2**56 for what the parts name: the run's seed, the sample, perhaps the attempt.

    Equal parts give equal seeds and others unrelated ones, so a response depends neither on the engine that serves it
    nor on what was sampled before.

    Example:
        >>> SamplingParams(max_tokens=256, seed=derive_seed(run_seed, sample_id))
    """
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest())
