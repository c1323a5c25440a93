"""What is known of a response before it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from drivetrain_rollout._checks import after, joined
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest, Timings


async def stream_of(
    request: GenerateRequest, answer: asyncio.Future[Completion], chunks: asyncio.Queue[Chunk]
) -> AsyncIterator[Chunk]:
    """Chunks as they come, and a last one with the rest of the response once it is there. Leaving it early cancels the
    answer."""
    told = 0 if request.continued is None else len(request.continued.response_token_ids)
    try:
        while not answer.done() or not chunks.empty():
            chunk = asyncio.ensure_future(chunks.get())
            await asyncio.wait((chunk, answer), return_when=asyncio.FIRST_COMPLETED)
            if chunk.done():
                told += len(chunk.result().response_token_ids)
                yield chunk.result()
            else:
                chunk.cancel()
        completion = answer.result()
    finally:
        answer.cancel()
    yield Chunk(
        request_id=request.request_id,
        response_token_ids=completion.response_token_ids[told:],
        rollout_logprobs=completion.rollout_logprobs[told:],
        version_spans=after(completion.version_spans, told),
        completion=completion,
    )


def grown(request: GenerateRequest, known: Completion | None, chunk: Chunk) -> Completion:
    """What is known of a response after another chunk."""
    if chunk.completion is not None:
        return chunk.completion
    new = Completion(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        response_token_ids=chunk.response_token_ids,
        rollout_logprobs=chunk.rollout_logprobs,
        finish_reason="abort",
        version_spans=chunk.version_spans,
        timings=Timings(attempts=0),
    )
    return new if known is None else joined(known, new)
