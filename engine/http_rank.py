"""POST /v1/rerank and /v1/score: how near texts are to each other, as the cosines of their embeddings."""

import asyncio
import time
import uuid
from array import array
from collections.abc import Mapping
from operator import mul
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_embeddings import embed_all, usage_of
from tercet.engine.http_stream import json_answer
from tercet.engine.json_parts import encode
from tercet.engine.openai_embeddings import EmbeddingUsage
from tercet.engine.openai_rank import (
    Compares,
    Document,
    RerankList,
    RerankRequest,
    RerankResult,
    ScoreItem,
    ScoreList,
    ScoreRequest,
)
from tercet.engine.openapi import RouteTypes

_MOST_PRODUCTS = 2**16
"""Of numbers, before everybody else has a turn: a few milliseconds."""


async def _rerank(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, RerankRequest)
    texts = body.to_texts()
    scores, usage = await _scores(request, door, body, {"query": body.query}, texts)
    documents = [msgspec.UNSET if body.return_documents is False else Document(text) for text in texts.values()]
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        RerankResult(index=index, document=documents[index], relevance_score=scores[index])
        for index in best_first[: body.top_n or None]
    ]
    answer_id = request.state.record.answer_id = f"rerank-{uuid.uuid4().hex}"
    return json_answer(encode(RerankList(id=answer_id, model=_named(door, body), usage=usage, results=results)))


async def _score(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ScoreRequest)
    scores, usage = await _scores(request, door, body, *body.to_texts())
    answer_id = request.state.record.answer_id = f"score-{uuid.uuid4().hex}"
    answer = ScoreList(
        id=answer_id,
        created=int(time.time()),
        model=_named(door, body),
        data=[ScoreItem(index, score) for index, score in enumerate(scores)],
        usage=usage,
    )
    return json_answer(encode(answer))


def _named(door: Door, body: Compares) -> str:
    return door.adapter_of(body.model) or door.info.model


async def _scores(
    request: Request, door: Door, body: Compares, firsts: Mapping[str, str], seconds: Mapping[str, str]
) -> tuple[list[float], EmbeddingUsage]:
    """Of each of `seconds`, with the one of `firsts` or its own. Texts that are the same are computed once."""
    door.check_model(body.model)
    body.check()
    names: dict[str, str] = {}
    for name, text in (*firsts.items(), *seconds.items()):
        names.setdefault(text, name)
    params = body.to_params(door.adapter_of(body.model))
    embeddings = await embed_all(request, door, body, {name: text for text, name in names.items()}, params)
    vectors = {text: one.values for text, one in zip(names, embeddings, strict=True)}
    lefts = list(firsts.values()) * (len(seconds) if len(firsts) == 1 else 1)
    scores, room = [], _MOST_PRODUCTS
    for left, right in zip(lefts, seconds.values(), strict=True):
        scores.append(_cosine(vectors[left], vectors[right]))
        room -= len(vectors[left])
        if room < 0:
            await asyncio.sleep(0)
            room = _MOST_PRODUCTS
    return scores, usage_of(embeddings)


def _cosine(left: "array[float]", right: "array[float]") -> float:
    """Of vectors of length 1, as nearly as fp32 has it: a product may be over it by as little."""
    product: float = sum(map(mul, left, right))
    return max(-1.0, min(1.0, product))


_RERANK = [
    (RouteTypes("POST", path, "Documents, nearest to a query first", RerankRequest, RerankList), _rerank)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
]
_SCORE = [
    (RouteTypes("POST", path, "How near texts are to each other", ScoreRequest, ScoreList), _score)
    for path in ("/v1/score", "/score")
]
RANK_ROUTES = [*_RERANK, *_SCORE]
