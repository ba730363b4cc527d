"""What the HTTP door says of the engine's condition: to who watches it, and to who measures it."""

import os

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.openai_answers import Status, Version
from tercet.engine.openapi import RouteTypes
from tercet.engine.process_load import read_loads


async def _health(_: Request, door: Door) -> Response:
    """That this process answers is what counts; the supervisor replaces the others."""
    return _json(Status("ok"))


async def _ready(_: Request, door: Door) -> Response:
    complaint = door.condition.complaint()
    if complaint is not None:
        raise ApiError(503, complaint, code="not_ready")
    return _json(Status("ready"))


async def _version(_: Request, door: Door) -> Response:
    return _json(Version(door.info.version))


async def _metrics(_: Request, door: Door) -> Response:
    door.metrics.num_generated_tokens = door.client.num_tokens
    text = door.metrics.render(await door.gauges(), read_loads(os.getppid()))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(body: Status | Version) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


CONDITION_ROUTES = [
    (RouteTypes("GET", "/health", "Whether this process answers", gives=Status), _health),
    (RouteTypes("GET", "/health/ready", "Whether a request would be served now", gives=Status), _ready),
    (RouteTypes("GET", "/version", "The engine's version", gives=Version), _version),
    (RouteTypes("GET", "/metrics", "What Prometheus reads"), _metrics),
]
