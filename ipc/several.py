"""Several answers to one prompt: as many requests, whose prompt the engine computes once.

The first goes ahead. The others follow when it has begun to answer, and find the prompt's full pages in the cache.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import structs

from tercet.ipc.client import Client, Generation, Prompt
from tercet.ipc.messages import SamplingParams, Usage

MAX_ANSWERS = 64


async def generate_several(client: Client, prompt: Prompt, params: SamplingParams, **handling: Any) -> list[Generation]:
    """`params.n` answers; seeds are `seed`, `seed + 1`, and so on. `handling`: arguments of `Client.generate`.

    Only the first brings log-probabilities of the prompt. If one fails, all are cancelled.
    """
    if not 1 <= params.n <= MAX_ANSWERS:
        raise ValueError(f"n is {params.n}; want 1 to {MAX_ANSWERS}")
    each = [_one_of(params, index) for index in range(params.n)]
    begun = asyncio.Event()
    tasks = [asyncio.ensure_future(_first(client, prompt, each[0], begun, handling))]

    async def follow(one: SamplingParams) -> Generation:
        await begun.wait()
        return await client.generate(prompt, one, **handling)

    tasks += [asyncio.ensure_future(follow(one)) for one in each[1:]]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of_several(generations: list[Generation]) -> Usage:
    """The prompt counts once."""
    first = generations[0].usage
    return structs.replace(
        first,
        num_generated_tokens=sum(one.usage.num_generated_tokens for one in generations),
        num_preemptions=sum(one.usage.num_preemptions for one in generations),
        decode_s=max(one.usage.decode_s for one in generations),
    )


async def _first(
    client: Client, prompt: Prompt, params: SamplingParams, begun: asyncio.Event, handling: dict[str, Any]
) -> Generation:
    stream = client.stream(prompt, params, **handling)
    assert isinstance(stream, AsyncGenerator)
    async with contextlib.aclosing(stream) as pieces:
        async for piece in pieces:
            begun.set()
            if piece.generation is not None:
                generation: Generation = piece.generation
                return generation
    raise AssertionError("a stream ends with its generation")


def _one_of(params: SamplingParams, index: int) -> SamplingParams:
    seed = None if params.seed is None else (params.seed + index) % 2**63
    return structs.replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)
