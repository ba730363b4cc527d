"""POST /v1/embeddings: what the model makes of texts or token ids, in OpenAI's shapes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.json_parts import LATER, encode
from tercet.engine.metrics import measured
from tercet.engine.openai_embeddings import (
    AsksForVectors,
    EmbeddingItem,
    EmbeddingList,
    EmbeddingsRequest,
    EmbeddingUsage,
)
from tercet.engine.openapi import RouteTypes
from tercet.engine.request_log import Record
from tercet.ipc.client import Embedding
from tercet.ipc.messages import EmbeddingParams

_MOST_AT_ONCE = 256
"""Inputs of one request that are with the engine; its step takes as many of them as have room."""


async def _embed(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, EmbeddingsRequest)
    door.check_model(body.model)
    body.check()
    adapter = door.adapter_of(body.model)
    embeddings = await embed_all(request, door, body, body.to_prompts(), body.to_params(adapter))
    answer = EmbeddingList(
        data=[EmbeddingItem(index, LATER) for index in range(len(embeddings))],
        model=adapter or door.info.model,
        usage=usage_of(embeddings),
    )
    return json_answer(encode(answer), [body.write(one.values) for one in embeddings])


async def embed_all(
    request: Request,
    door: Door,
    body: AsksForVectors,
    prompts: Mapping[str, str | list[int]],
    params: EmbeddingParams,
) -> list[Embedding]:
    """Of checked bodies, in their order; `prompts` by what an error calls them."""
    door.check_open()
    record: Record = request.state.record
    record.user = body.user
    embeddings = await unless_gone(request.receive, _all(door, body, prompts, params))
    record.prompt_tokens = usage_of(embeddings).prompt_tokens
    record.cached_tokens = sum(one.usage.num_cached_tokens for one in embeddings)
    return embeddings


def usage_of(embeddings: Sequence[Embedding]) -> EmbeddingUsage:
    """Of all together."""
    num_tokens = sum(one.usage.num_prompt_tokens for one in embeddings)
    return EmbeddingUsage(num_tokens, num_tokens)


async def _all(
    door: Door, body: AsksForVectors, prompts: Mapping[str, str | list[int]], params: EmbeddingParams
) -> list[Embedding]:  # fmt: skip
    """If one fails, or their time is over, all are cancelled."""
    places = asyncio.Semaphore(min(_MOST_AT_ONCE, door.most_queued))

    async def one(name: str, prompt: str | list[int]) -> Embedding:
        async with places:
            with as_http({"prompt": name}), measured(door.metrics) as timers:
                embedding = await door.client.embed(
                    prompt,
                    params,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                    queue_timeout=body.queue_timeout,
                )
                timers.pop(0).end_embedding(embedding)
        return embedding

    tasks = [asyncio.ensure_future(one(name, prompt)) for name, prompt in prompts.items()]
    try:
        async with asyncio.timeout(body.timeout):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        text = f"the request had {body.timeout:g} s and was cancelled"
        raise ApiError(504, text, code="timed_out", is_final=True) from None
    finally:
        for task in tasks:
            task.cancel()


EMBEDDINGS_ROUTE = (
    RouteTypes("POST", "/v1/embeddings", "What the model makes of texts", EmbeddingsRequest, EmbeddingList),
    _embed,
)
