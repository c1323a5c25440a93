"""The stream of a response whose completion comes from elsewhere than its chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from drivetrain_rollout._checks import after
from drivetrain_rollout.types import Chunk, Completion, GenerateRequest


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
