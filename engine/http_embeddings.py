"""POST /v1/embeddings: what the model makes of texts or token ids, in OpenAI's shapes."""

from typing import Any

from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_stream import json_answer
from tercet.engine.http_vectors import handling_of, make_all, usage_of
from tercet.engine.json_parts import LATER, encode
from tercet.engine.openai_embeddings import EmbeddingItem, EmbeddingList, EmbeddingsRequest
from tercet.engine.openapi import RouteTypes


async def _embed(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, EmbeddingsRequest)
    door.check_model(body.model)
    body.check()
    adapter = door.adapter_of(body.model)
    params, handling = body.to_params(adapter), handling_of(body)
    embeddings = await make_all(
        request, door, body, body.to_prompts(), lambda prompt: door.client.embed(prompt, params, **handling)
    )
    answer = EmbeddingList(
        data=[EmbeddingItem(index, LATER) for index in range(len(embeddings))],
        model=adapter or door.info.model,
        usage=usage_of(embeddings),
    )
    return json_answer(encode(answer), [body.write(one.values) for one in embeddings])


EMBEDDINGS_ROUTE = (
    RouteTypes("POST", "/v1/embeddings", "What the model makes of texts", EmbeddingsRequest, EmbeddingList),
    _embed,
)
