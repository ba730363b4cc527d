"""POST /v1/rerank and /v1/score: how near texts are to each other, by a head of one label or, where the model has none,
as the cosines of their embeddings."""

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.http_stream import json_answer
from tercet.engine.http_vectors import Made, Prompt, handling_of, make_all, usage_of
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
from tercet.ipc.answers import Activation
from tercet.ipc.client import Classification, Embedding
from tercet.ipc.scores import activated, cosines, in_pairs


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
    return json_answer(
        encode(RerankList(id=answer_id, model=body.model or door.info.model, usage=usage, results=results))
    )


async def _score(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ScoreRequest)
    scores, usage = await _scores(request, door, body, *body.to_texts())
    answer_id = request.state.record.answer_id = f"score-{uuid.uuid4().hex}"
    answer = ScoreList(
        id=answer_id,
        created=int(time.time()),
        model=body.model or door.info.model,
        data=[ScoreItem(index, score) for index, score in enumerate(scores)],
        usage=usage,
    )
    return json_answer(encode(answer))


async def _scores(
    request: Request, door: Door, body: Compares, firsts: Mapping[str, str], seconds: Mapping[str, str]
) -> tuple[list[float], EmbeddingUsage]:
    """Of each of `seconds`, with the one of `firsts` or its own. What is the same is computed once."""
    door.check_model(body.model)
    body.check()
    pairs = in_pairs(list(firsts.values()), list(seconds.values()))
    classifier = door.info.classifier
    if classifier is not None and len(classifier.labels) == 1:
        return await _by_head(request, door, body, dict(zip(seconds, pairs, strict=True)), classifier.activation)
    embeddings = await _embeddings(request, door, body, firsts, seconds)
    scores = await cosines([(embeddings[left].values, embeddings[right].values) for left, right in pairs])
    return scores, usage_of(list(embeddings.values()))


async def _embeddings(
    request: Request, door: Door, body: Compares, firsts: Mapping[str, str], seconds: Mapping[str, str]
) -> dict[str, Embedding]:
    """By text."""
    params, handling = body.to_params(door.adapter_of(body.model)), handling_of(body)
    texts = (*firsts.items(), *seconds.items())
    return await _each_once(request, door, body, texts, lambda text: door.client.embed(text, params, **handling))


async def _by_head(
    request: Request, door: Door, body: Compares, pairs: Mapping[str, tuple[str, str]], activation: Activation
) -> tuple[list[float], EmbeddingUsage]:
    """`pairs`: by what an error calls them."""
    if body.dimensions is not None:
        text = f"dimensions is {body.dimensions}; want nothing: this model scores texts by its head"
        raise ApiError(400, text, param="dimensions", code="not_supported")
    params, handling = body.to_classification(door.adapter_of(body.model)), handling_of(body)

    def make(pair: tuple[str, str]) -> Awaitable[Classification]:
        return door.client.classify(pair[0], params, pair=pair[1], **handling)

    made = await _each_once(request, door, body, pairs.items(), make)
    scores = {pair: activated(one.logits, activation)[0] for pair, one in made.items()}
    return [scores[pair] for pair in pairs.values()], usage_of(list(made.values()))


async def _each_once(
    request: Request, door: Door, body: Compares, named: Iterable[tuple[str, Prompt]],
    make: Callable[[Prompt], Awaitable[Made]],
) -> dict[Prompt, Made]:  # fmt: skip
    """What is made of each of these, by itself; an error calls it by the first of its names."""
    names: dict[Prompt, str] = {}
    for name, prompt in named:
        names.setdefault(prompt, name)
    made = await make_all(request, door, body, {name: prompt for prompt, name in names.items()}, make)
    return dict(zip(names, made, strict=True))


_RERANK = [
    (RouteTypes("POST", path, "Documents, nearest to a query first", RerankRequest, RerankList), _rerank)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
]
_SCORE = [
    (RouteTypes("POST", path, "How near texts are to each other", ScoreRequest, ScoreList), _score)
    for path in ("/v1/score", "/score")
]
RANK_ROUTES = [*_RERANK, *_SCORE]
