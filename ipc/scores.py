"""How near texts are to each other, one number each pair: by a model's head of one label, which reads both as one
prompt, or where there is none as the cosine of their embeddings."""

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import mul
from typing import TYPE_CHECKING, Any, TypeVar

from tercet.ipc.answers import Activation
from tercet.ipc.messages import ClassificationParams, EmbeddingParams

if TYPE_CHECKING:
    from tercet.ipc.client import Client

_MOST_AT_ONCE = 256
"""Requests that are with the engine."""
_MOST_PRODUCTS = 2**16
"""Of numbers, before everybody else has a turn: a few milliseconds."""
_Asked = TypeVar("_Asked")
_Made = TypeVar("_Made")


def in_pairs(firsts: str | Sequence[str], seconds: str | Sequence[str]) -> list[tuple[str, str]]:
    """Of each of `seconds`, with the only one of `firsts` or its own."""
    rights = [seconds] if isinstance(seconds, str) else list(seconds)
    lefts = [firsts] if isinstance(firsts, str) else list(firsts)
    if len(lefts) != len(rights) and len(lefts) != 1:
        raise ValueError(f"got {len(lefts)} texts beside {len(rights)}; want one, or as many")
    for text in (*lefts, *rights):
        if not isinstance(text, str):
            raise TypeError(f"got a {type(text).__name__}; want texts")
    return list(zip(lefts * (len(rights) if len(lefts) == 1 else 1), rights, strict=True))


async def scores(
    client: "Client", pairs: Sequence[tuple[str, str]], *, adapter: str | None, cut: int | None, **handling: Any
) -> list[float]:
    """Of each. What is the same is computed once. `cut`: `truncate_prompt_tokens`, of all prompts."""
    classifier = (await client.info()).classifier if pairs else None
    if classifier is not None and len(classifier.labels) == 1:
        params = ClassificationParams(adapter=adapter, truncate_prompt_tokens=cut)
        made = await _each_once(pairs, lambda pair: client.classify(pair[0], params, pair=pair[1], **handling))
        return [activated(made[pair].logits, classifier.activation)[0] for pair in pairs]
    how = EmbeddingParams(normalize=True, adapter=adapter, truncate_prompt_tokens=cut)
    texts = [text for pair in pairs for text in pair]
    embedded = await _each_once(texts, lambda text: client.embed(text, how, **handling))
    return await cosines([(embedded[left].values, embedded[right].values) for left, right in pairs])


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """What a model that classifies was trained to say, of its logits."""
    match activation:
        case "none":
            return list(logits)
        case "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        case "softmax":
            most = max(logits)
            shares = [math.exp(logit - most) for logit in logits]
            total = math.fsum(shares)
            return [share / total for share in shares]


async def cosines(pairs: Iterable[tuple["array[float]", "array[float]"]]) -> list[float]:
    """Of vectors of length 1, as nearly as fp32 has it: a product may be over it by as little."""
    made, room = list[float](), _MOST_PRODUCTS
    for left, right in pairs:
        product: float = sum(map(mul, left, right))
        made.append(max(-1.0, min(1.0, product)))
        room -= len(left)
        if room < 0:
            await asyncio.sleep(0)
            room = _MOST_PRODUCTS
    return made


def _sigmoid(logit: float) -> float:
    """Without a number that is too large, whatever the sign."""
    small = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else small) / (1.0 + small)


async def _each_once(asked: Iterable[_Asked], make: Callable[[_Asked], Awaitable[_Made]]) -> dict[_Asked, _Made]:
    """If one fails, all others are cancelled."""
    places = asyncio.Semaphore(_MOST_AT_ONCE)

    async def one(what: _Asked) -> _Made:
        async with places:
            return await make(what)

    tasks = {what: asyncio.ensure_future(one(what)) for what in dict.fromkeys(asked)}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
    return {what: task.result() for what, task in tasks.items()}
