"""POST /v1/embeddings: what the model makes of texts or token ids, in OpenAI's shapes."""

import asyncio
from typing import Any

from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.json_parts import LATER, encode
from tercet.engine.metrics import measured
from tercet.engine.openai_embeddings import EmbeddingItem, EmbeddingList, EmbeddingsRequest, EmbeddingUsage
from tercet.engine.request_log import Record
from tercet.ipc.client import Embedding
from tercet.ipc.messages import EmbeddingParams

_MOST_AT_ONCE = 256
"""Inputs of one request that are with the engine; its step takes as many of them as have room."""


async def embed(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, EmbeddingsRequest)
    door.check_model(body.model)
    body.check()
    prompts = body.to_prompts()
    door.check_open()
    record: Record = request.state.record
    record.user = body.user
    adapter = door.adapter_of(body.model)
    embeddings = await unless_gone(request.receive, _all(door, body, prompts, body.to_params(adapter)))
    num_tokens = record.prompt_tokens = sum(one.usage.num_prompt_tokens for one in embeddings)
    record.cached_tokens = sum(one.usage.num_cached_tokens for one in embeddings)
    answer = EmbeddingList(
        data=[EmbeddingItem(index, LATER) for index in range(len(embeddings))],
        model=adapter or door.info.model,
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )
    return json_answer(encode(answer), [body.write(one.values) for one in embeddings])


async def _all(
    door: Door, body: EmbeddingsRequest, prompts: list[str | list[int]], params: EmbeddingParams
) -> list[Embedding]:  # fmt: skip
    """In their order; if one fails, or their time is over, all are cancelled."""
    places = asyncio.Semaphore(min(_MOST_AT_ONCE, door.most_queued))

    async def one(index: int) -> Embedding:
        name = f"input[{index}]" if len(prompts) > 1 else "input"
        async with places:
            with as_http({"prompt": name}), measured(door.metrics) as timers:
                embedding = await door.client.embed(
                    prompts[index],
                    params,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                    queue_timeout=body.queue_timeout,
                )
                timers.pop(0).end_embedding(embedding)
        return embedding

    tasks = [asyncio.ensure_future(one(index)) for index in range(len(prompts))]
    try:
        async with asyncio.timeout(body.timeout):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        text = f"the request had {body.timeout:g} s and was cancelled"
        raise ApiError(504, text, code="timed_out", is_final=True) from None
    finally:
        for task in tasks:
            task.cancel()
