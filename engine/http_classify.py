"""POST /classify: what a head that classifies makes of texts or token ids, in vLLM's shapes."""

import time
import uuid
from typing import Any

from starlette.requests import Request

from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.http_stream import json_answer
from tercet.engine.http_vectors import handling_of, make_all, usage_of
from tercet.engine.json_parts import encode
from tercet.engine.openai_classify import ClassifyBody, ClassifyItem, ClassifyList
from tercet.engine.openapi import RouteTypes
from tercet.ipc.scores import activated


async def _classify(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ClassifyBody)
    door.check_model(body.model)
    body.check()
    prompts = body.to_prompts()
    classifier = door.info.classifier
    if classifier is None:
        raise ApiError(400, "this model has no head that classifies", param="model", code="not_supported")
    adapter = door.adapter_of(body.model)
    params, handling = body.to_classification(adapter), handling_of(body)
    all_made = await make_all(
        request, door, body, prompts, lambda prompt: door.client.classify(prompt, params, **handling)
    )
    activation = "none" if body.use_activation is False else classifier.activation
    items = []
    for index, one in enumerate(all_made):
        likeliest = max(range(len(one.logits)), key=one.logits.__getitem__)
        probs = activated(one.logits, activation)
        items.append(ClassifyItem(index, classifier.labels[likeliest], probs, len(probs)))
    answer_id = request.state.record.answer_id = f"classify-{uuid.uuid4().hex}"
    answer = ClassifyList(
        id=answer_id,
        created=int(time.time()),
        model=adapter or door.info.model,
        data=items,
        usage=usage_of(all_made),
    )
    return json_answer(encode(answer))


CLASSIFY_ROUTE = (
    RouteTypes("POST", "/classify", "Which label fits a text", ClassifyBody, ClassifyList),
    _classify,
)
