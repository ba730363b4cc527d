"""One HTTP request that is many of the engine's, each of which is answered at once: embeddings or classifications.

It knows neither what is asked nor how it is told.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http
from tercet.engine.http_presence import unless_gone
from tercet.engine.metrics import measured
from tercet.engine.openai_embeddings import AsksForVectors, EmbeddingUsage
from tercet.engine.request_log import Record
from tercet.ipc.client import Classification, Embedding

Prompt = TypeVar("Prompt")
Made = TypeVar("Made", Embedding, Classification)

_MOST_AT_ONCE = 256
"""Inputs of one request that are with the engine; its step takes as many of them as have room."""


async def make_all(
    request: Request,
    door: Door,
    body: AsksForVectors,
    prompts: Mapping[str, Prompt],
    make: Callable[[Prompt], Awaitable[Made]],
) -> list[Made]:
    """Of checked bodies, in their order; `prompts` by what an error calls them. `make`: one of them by the engine."""
    door.check_open()
    record: Record = request.state.record
    record.user = body.user
    all_made = await unless_gone(request.receive, _all(door, body, prompts, make))
    record.prompt_tokens = usage_of(all_made).prompt_tokens
    record.cached_tokens = sum(one.usage.num_cached_tokens for one in all_made)
    return all_made


def handling_of(body: AsksForVectors) -> dict[str, Any]:
    """Of each of the engine's requests, as its client takes it."""
    return {
        "cache_salt": body.cache_salt or "",
        "priority": body.priority or 0,
        "queue_timeout": body.queue_timeout,
    }


def usage_of(all_made: Sequence[Embedding | Classification]) -> EmbeddingUsage:
    """Of all together."""
    num_tokens = sum(one.usage.num_prompt_tokens for one in all_made)
    return EmbeddingUsage(num_tokens, num_tokens)


async def _all(
    door: Door, body: AsksForVectors, prompts: Mapping[str, Prompt], make: Callable[[Prompt], Awaitable[Made]]
) -> list[Made]:
    """If one fails, or their time is over, all are cancelled."""
    places = asyncio.Semaphore(min(_MOST_AT_ONCE, door.most_queued))

    async def one(name: str, prompt: Prompt) -> Made:
        async with places:
            with as_http({"prompt": name}), measured(door.metrics) as timers:
                made = await make(prompt)
                timers.pop(0).end_vector(made.usage)
        return made

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
