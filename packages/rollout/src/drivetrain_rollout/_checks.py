"""What is checked on the way into an engine and on the way out, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain_rollout.engine import EngineInfo, RequestError, WeightsRefused
from drivetrain_rollout.types import Completion, GenerateRequest, SamplingParams, Timings, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

NOT_TIMED = Timings()
LOWEST_TEMPERATURE = 0.01
"""Below it vLLM samples at this temperature instead of the one asked for."""


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise RequestError unless the engine can serve the request as it is written."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(request.request_id, "empty_prompt", "the prompt has no tokens")
    if len(prompt) >= info.max_model_len:
        raise RequestError(
            request.request_id,
            "prompt_too_long",
            f"a prompt of {len(prompt)} tokens leaves no room for a response within max_model_len {info.max_model_len}",
        )
    if bad := _bad_token(prompt, info.vocab_size):
        raise RequestError(request.request_id, "token_out_of_vocabulary", f"the prompt holds {bad}")
    if problem := _sampling_problem(request.sampling, info.vocab_size):
        raise RequestError(request.request_id, "bad_sampling", problem)
    if request.continued is not None and (problem := _continuation_problem(request, request.continued, info)):
        raise RequestError(request.request_id, "bad_continuation", problem)


def _bad_token(token_ids: Sequence[Any], vocab_size: int) -> str | None:
    if set(map(type, token_ids)) != {int}:
        bad = next(token for token in token_ids if type(token) is not int)
        return f"{bad!r}, which is not an int"
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        return f"id {bad}, and the model's ids go from 0 to {vocab_size - 1}"
    return None


def _continuation_problem(request: GenerateRequest, before: Completion, info: EngineInfo) -> str | None:
    if before.prompt_token_ids != request.prompt_token_ids:
        return f"the response to continue, of request {before.request_id!r}, has another prompt"
    if before.finish_reason != "abort":
        return f"the response to continue has ended ({before.finish_reason})"
    if before.response_token_ids and (bad := _bad_token(before.response_token_ids, info.vocab_size)):
        return f"the response to continue holds {bad}"
    return None


def most_tokens(request: GenerateRequest, max_model_len: int) -> int:
    """The longest the whole response can get, one that is continued included."""
    return min(request.sampling.max_tokens, max_model_len - len(request.prompt_token_ids))


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    if type(sampling.max_tokens) is not int or sampling.max_tokens < 1:
        return f"max_tokens {sampling.max_tokens!r}: use an int of at least 1"
    if sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature < math.inf:
        return f"temperature {sampling.temperature}: use 0 (the likeliest token) or {LOWEST_TEMPERATURE} and above"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p}: use a number above 0 and up to 1"
    if sampling.top_k < 0:
        return f"top_k {sampling.top_k}: use 0 (all tokens) or more"
    if sampling.stop_token_ids and (bad := _bad_token(sampling.stop_token_ids, vocab_size)):
        return f"stop_token_ids holds {bad}"
    if sampling.seed is not None and not 0 <= sampling.seed < 2**63:
        return f"seed {sampling.seed}: use 0 up to 2**63 - 1"
    return None


def completion(
    request: GenerateRequest,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    finish_reason: str,
    spans: Sequence[VersionSpan],
    timings: Timings = NOT_TIMED,
    early: bool = False,
) -> Completion:
    """The completion of an engine's raw answer, behind what the request continues.

    Args:
        request: what was asked.
        token_ids: of the tokens that were sampled for this request, without those it continues.
        logprobs: theirs.
        finish_reason: ``stop`` or ``length``; ``abort`` only if ``early``.
        spans: theirs.
        timings: of this attempt.
        early: whether the engine was told to end it.

    Raises:
        RequestError: the answer cannot be trusted.
    """
    if logprobs is None or None in logprobs:
        raise RequestError(request.request_id, "bad_logprobs", "the engine returned no log-prob for a sampled token")
    if len(logprobs) != len(token_ids):
        raise RequestError(
            request.request_id,
            "bad_logprobs",
            f"the engine returned {len(logprobs)} log-probs for {len(token_ids)} sampled tokens",
        )
    finite: Sequence[float] = logprobs  # type: ignore[assignment]
    for index, value in enumerate(finite):
        if not math.isfinite(value):
            raise RequestError(request.request_id, "bad_logprobs", f"the log-prob of response token {index} is {value}")
    if finish_reason not in ("stop", "length") and not (early and finish_reason == "abort"):
        raise RequestError(request.request_id, "engine_refused", f"the engine ended the request with {finish_reason!r}")
    new = Completion(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        response_token_ids=tuple(token_ids),
        rollout_logprobs=tuple(finite),
        finish_reason=finish_reason,  # type: ignore[arg-type]
        version_spans=tuple(spans),
        timings=timings,
    )
    return new if request.continued is None else joined(request.continued, new)


def joined(before: Completion, new: Completion) -> Completion:
    """A response and its continuation as one."""
    return msgspec.structs.replace(
        new,
        response_token_ids=before.response_token_ids + new.response_token_ids,
        rollout_logprobs=before.rollout_logprobs + new.rollout_logprobs,
        version_spans=joined_spans(before.version_spans + new.version_spans),
        timings=Timings(
            queued=before.timings.queued + new.timings.queued,
            sampled=before.timings.sampled + new.timings.sampled,
            attempts=before.timings.attempts + new.timings.attempts,
        ),
    )


def joined_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same spans, neighbours of one version as one, and empty ones only if there are no others."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and (found[-1].policy_version == span.policy_version or not found[-1].tokens):
            span = VersionSpan(span.policy_version, found.pop().tokens + span.tokens)
        elif found and not span.tokens:
            continue
        found.append(span)
    return tuple(found)


def after(spans: Iterable[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans without their first ``tokens``."""
    found = []
    for span in spans:
        cut = min(tokens, span.tokens)
        tokens -= cut
        if cut < span.tokens:
            found.append(VersionSpan(span.policy_version, span.tokens - cut))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The tensors that a complete set of weights consists of."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    """Of tied tensors, the name that may be left out, and the one that stands for it."""

    def accept(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Every tensor of the manifest by name, aliases left out.

        Raises:
            WeightsRefused: all names that are unknown, missing, given twice, mis-shaped, or not equal to what they are
                tied to.
        """
        found: dict[str, Tensor] = {}
        problems: list[str] = []
        for name, tensor in tensors:
            owner = self.aliases.get(name, name)
            if name in found:
                problems.append(f"{name} (given twice)")
            elif owner not in self.shapes:
                problems.append(f"{name} (unknown to the model)")
            elif tuple(tensor.shape) != self.shapes[owner]:
                problems.append(f"{name} (shape {list(tensor.shape)}, the model has {list(self.shapes[owner])})")
            found[name] = tensor
        problems.extend(f"{name} (missing)" for name in self.shapes if name not in found)
        for alias, owner in self.aliases.items():
            if not problems and alias in found and not found[alias].equal(found[owner].to(found[alias])):
                problems.append(f"{alias} (tied to {owner}, but different)")
        if problems:
            raise WeightsRefused(f"{len(problems)} tensors of the update do not fit the model: " + "; ".join(problems))
        return {name: found[name] for name in self.shapes}
