"""What goes into an engine and what comes out of it: token ids, never text.

T is the number of tokens of a whole interaction (every prompt and response of it).
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one response is drawn.

    An engine checks the values when it is given a request (reason ``bad_sampling``), not when they are written down.

    Example:
        >>> SamplingParams(max_tokens=256, temperature=1.0, stop_token_ids=(2,))
    """

    max_tokens: int
    """Most tokens to sample, at least 1. The engine's ``max_model_len`` ends a response earlier."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token. Between 0 and 0.01 is refused: vLLM would draw at 0.01."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the response, which keeps it. Nothing else ends one: the model's own end-of-sequence
    token does only if it is listed."""
    seed: int | None = None
    """With a token's position in the sequence it determines the draw: the same on every engine that holds the same
    weights (up to rounding of the logits), whatever else it serves. None: the engine takes one from its own stream."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive response tokens that one set of weights sampled."""

    policy_version: int
    tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a response's time went, in seconds, all attempts at it together."""

    queued: float = 0.0
    """Until an engine began with it."""
    sampled: float = 0.0
    """From there to its end, pauses included."""
    attempts: int = 1
    """How often an engine began with it."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sampled response: exactly the ids the engine read and the ids it drew.

    Raises:
        ValueError: there are not as many log-probs, or not as many tokens in the spans, as response tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    """What the policy sampled, the stop token included."""
    rollout_logprobs: tuple[float, ...]
    """Of each response token, its log-probability under the distribution it was drawn from: log softmax of the logits
    over the temperature and, where ``top_p`` or ``top_k`` cut tokens away, over those that were left. At temperature 0
    it is that of temperature 1."""
    finish_reason: FinishReason
    """``stop``: a stop token was sampled. ``length``: ``max_tokens`` or ``max_model_len`` was reached. ``abort``: the
    engine was told to end it early; it can be continued."""
    version_spans: tuple[VersionSpan, ...]
    """Which weights sampled which tokens, in order; at least one, also of an empty response."""
    timings: Timings = Timings()

    def __post_init__(self) -> None:
        tokens = len(self.response_token_ids)
        if len(self.rollout_logprobs) != tokens:
            raise ValueError(
                f"request {self.request_id!r}: {len(self.rollout_logprobs)} rollout_logprobs for {tokens} response "
                "tokens"
            )
        spanned = sum(span.tokens for span in self.version_spans)
        if not self.version_spans or spanned != tokens:
            raise ValueError(
                f"request {self.request_id!r}: version_spans of {spanned} tokens for {tokens} response tokens"
            )

    @property
    def min_policy_version(self) -> int:
        """Oldest weights that sampled a token of this response."""
        return min(span.policy_version for span in self.version_spans)

    @property
    def max_policy_version(self) -> int:
        """Newest weights that sampled a token of this response."""
        return max(span.policy_version for span in self.version_spans)


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has been sampled of a response since the last chunk of its stream."""

    request_id: str
    response_token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    completion: Completion | None = None
    """The whole response, in the last chunk."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One response wanted. ``request_id`` names it in errors and in the completion; engines do not need it unique."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    continued: Completion | None = None
    """A response to the same prompt that was sampled in part. Sampling goes on behind it, and the whole comes back:
    its tokens, log-probs and spans first. ``max_tokens`` counts them. With the same seed the draws are those that
    would have followed."""
    group_id: int | None = None
    """Requests of one group have a prompt, or the beginning of one, in common; a pool keeps them on one engine."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt's complete interaction: one turn, or several with what an environment said in between.

    Each turn's prompt starts with the prompt and response of the turn before, id by id, so that the whole is one
    sequence of T tokens in which ``response_mask`` marks what the policy sampled.

    Raises:
        ValueError: no turns, or a turn that does not continue the one before.
    """

    sample_id: int
    group_id: int
    turns: tuple[Completion, ...]
    score: float | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"sample {self.sample_id}: a rollout has at least one turn")
        for index, (before, turn) in enumerate(zip(self.turns, self.turns[1:], strict=False), start=1):
            seen = before.prompt_token_ids + before.response_token_ids
            if turn.prompt_token_ids[: len(seen)] != seen:
                raise ValueError(
                    f"sample {self.sample_id}: the prompt of turn {index} does not start with the ids of turn "
                    f"{index - 1}; append to the ids the engine returned instead of encoding text again"
                )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids of the interaction, [T]."""
        return self.turns[-1].prompt_token_ids + self.turns[-1].response_token_ids

    @property
    def response_mask(self) -> tuple[bool, ...]:
        """True where the policy sampled the token, [T]."""
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            start = len(turn.prompt_token_ids)
            mask[start : start + len(turn.response_token_ids)] = [True] * len(turn.response_token_ids)
        return tuple(mask)

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each sampled token as the engine gave it, 0.0 where ``response_mask`` is False, [T]."""
        logprobs = [0.0] * len(self.token_ids)
        for turn in self.turns:
            start = len(turn.prompt_token_ids)
            logprobs[start : start + len(turn.rollout_logprobs)] = turn.rollout_logprobs
        return tuple(logprobs)

    @property
    def finish_reason(self) -> FinishReason:
        """How the last turn ended."""
        return self.turns[-1].finish_reason

    @property
    def min_policy_version(self) -> int:
        """Oldest weights that sampled a token of any turn."""
        return min(turn.min_policy_version for turn in self.turns)

    @property
    def max_policy_version(self) -> int:
        """Newest weights that sampled a token of any turn."""
        return max(turn.max_policy_version for turn in self.turns)


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollouts of one prompt.

    Raises:
        ValueError: a rollout of another group, or of another prompt, among them.
    """

    group_id: int
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.group_id != self.group_id:
                raise ValueError(f"sample {rollout.sample_id} is of group {rollout.group_id}, not {self.group_id}")
            if rollout.turns[0].prompt_token_ids != self.rollouts[0].turns[0].prompt_token_ids:
                raise ValueError(
                    f"samples {self.rollouts[0].sample_id} and {rollout.sample_id} of group {self.group_id} "
                    "have different prompts"
                )
