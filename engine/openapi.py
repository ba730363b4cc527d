"""The description of the HTTP door in the language of machines: OpenAPI 3.1, made of the very types that are decoded.

It knows the routes' types and nothing of what they do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tercet.engine.http_errors import ErrorReply

_ERRORS = {
    "401": "No key, or a wrong one.",
    "403": "No key is asked for, and `Host` is a domain; or a change that is not allowed.",
    "404": "No such model.",
    "405": "Not with this method.",
}
_ERRORS_OF_BODIES = {
    "400": "A field is wrong, unknown or not supported; `param` names it.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body has a Content-Encoding.",
    "429": "The engine is full; `Retry-After` says when to ask again.",
    "503": "The engine drains or is gone.",
    "504": "The request took too long.",
}


_REF = "#/components/schemas/{name}"


class RouteTypes(NamedTuple):
    """One route, as the description tells it."""

    method: str
    path: str
    summary: str
    takes: type | None = None
    gives: Any = None
    """A type; None: text."""
    streams: Any = None
    """What each server-sent event holds, where the request asks for them."""
    fails: type = ErrorReply
    by_query: bool = False
    """What it takes may be behind the path instead."""


def describe(routes: Sequence[RouteTypes], version: str, guarded: bool) -> dict[str, Any]:
    """The whole document."""
    of_routes = [(route.takes, route.gives, route.streams, route.fails) for route in routes]
    types = [kind for several in of_routes for kind in several if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = _operation(route, schema_of)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tercet", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if guarded:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document


def _operation(route: RouteTypes, schema_of: dict[int, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"text/plain": {"schema": {"type": "string"}}} if route.gives is None else _json(schema_of[id(route.gives)])
    )
    if route.streams is not None:
        content["text/event-stream"] = {"schema": schema_of[id(route.streams)]}
    error = _json(schema_of[id(route.fails)])
    errors = {**_ERRORS, **(_ERRORS_OF_BODIES if route.takes is not None or route.path == "/health/ready" else {})}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.method.lower() + "".join(c if c.isalnum() else "_" for c in route.path),
        "responses": {
            "200": {"description": "As asked.", "content": content},
            **{status: {"description": text, "content": error} for status, text in errors.items()},
        },
    }
    if "{model" in route.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.takes is not None:
        operation["requestBody"] = {"required": not route.by_query, "content": _json(schema_of[id(route.takes)])}
    if route.by_query and route.takes is not None:
        operation["parameters"] = [
            {"name": field.name, "in": "query", "required": False, "schema": msgspec.json.schema(field.type)}
            for field in msgspec.structs.fields(route.takes)
        ]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
