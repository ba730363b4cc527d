"""The HTTP door's application: which path leads where, and what every request goes through.

Keys, request ids, errors in the form of who asked. What a route does is elsewhere, or one line.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.engine.anthropic_errors import in_anthropics_form, speaks_anthropics
from tercet.engine.http_address import is_domain
from tercet.engine.http_body import read_body
from tercet.engine.http_changes import CHANGE_ROUTES
from tercet.engine.http_chat import chat
from tercet.engine.http_classify import CLASSIFY_ROUTE
from tercet.engine.http_completions import complete
from tercet.engine.http_condition import CONDITION_ROUTES
from tercet.engine.http_door import Door, draining
from tercet.engine.http_embeddings import EMBEDDINGS_ROUTE
from tercet.engine.http_errors import ApiError, from_engine
from tercet.engine.http_messages import MESSAGES_ROUTES
from tercet.engine.http_presence import ClientGone, unless_gone
from tercet.engine.http_rank import RANK_ROUTES
from tercet.engine.http_responses import respond
from tercet.engine.http_stream import Stream, json_answer
from tercet.engine.openai_answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    Text,
    Tokens,
)
from tercet.engine.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tercet.engine.openapi import RouteTypes, describe
from tercet.engine.request_log import Record
from tercet.engine.responses_answers import AnyEvent
from tercet.engine.responses_answers import Response as Responded
from tercet.engine.responses_requests import ResponsesRequest
from tercet.engine.web_page import PAGE_PATHS, page_routes
from tercet.ipc.client import ClientError

Handler = Callable[[Request, Door], Awaitable[Any]]
_GOOD_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def make_app(door: Door) -> ASGIApp:
    """All routes, behind the guard."""
    routes = [
        Route(types.path, _endpoint(handler, door), methods=[types.method], name=types.path)
        for types, handler in _ROUTES
    ]
    described = describe([types for types, _ in _ROUTES], door.info.version, door.is_guarded)

    async def openapi(_: Request) -> Response:
        return _json(described)

    routes += [Route("/openapi.json", openapi), *page_routes()]
    handlers = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_failure}
    app = Starlette(routes=routes, exception_handlers=handlers)
    plain = {(types.method, types.path): handler for types, handler in _ROUTES if "{" not in types.path}
    return _Guard(app, plain, door)


def _endpoint(handler: Handler, door: Door) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        return await handler(request, door)

    return endpoint


class _Guard:
    """Outermost: lets in who may come, gives every request a name, forgets those whose client left."""

    def __init__(self, app: ASGIApp, plain: Mapping[tuple[str, str], Handler], door: Door) -> None:
        """`plain`: who answers a method and path that are written out in full; `app` knows them and all others."""
        self._app = app
        self._plain = plain
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of one that comes twice, the first counts
        wanted = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = wanted if _GOOD_REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
        client = scope["client"] or ("", 0)
        scope["state"]["send"] = send
        record = scope["state"]["record"] = Record(request_id, scope["method"], scope["path"][:200], client[0])
        began = time.monotonic()
        handler = self._plain.get((record.method, scope["path"]))
        task = asyncio.current_task()
        assert task is not None
        self._door.unanswered.add(task)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._door.unanswered.discard(task)
                names = (b"x-request-id", b"request-id") if speaks_anthropics(record.path) else (b"x-request-id",)
                named = [(name, request_id.encode()) for name in names]
                message["headers"] = [*message.get("headers", ()), *named, *self._door.origins.headers(headers)]
            await send(message)

        try:
            refusal = self._of_host(headers)
            ahead = self._door.origins.answer_ahead(record.method, headers)
            if refusal is None and ahead is not None:  # no browser sends a key with that
                await ahead(scope, receive, send_named)
            elif (refusal := refusal or self._of_key(scope["path"], headers)) is not None:
                await _refused(refusal, scope)(scope, receive, send_named)
            elif handler is not None:
                await self._answer(handler, Request(scope, receive), send_named)
            else:
                await self._app(scope, receive, send_named)
        except ClientGone:
            record.status = 499  # what it waited for has been cancelled
        except asyncio.CancelledError:  # the engine has ended, and the server waits no longer
            if not record.status:
                await _on_api_error(Request(scope), draining())(scope, receive, send_named)
            raise
        except Exception as error:
            if not record.status:
                await _on_failure(Request(scope), error)(scope, receive, send_named)
            raise  # the server writes it down
        finally:
            self._door.unanswered.discard(task)
            record.status = record.status or 500
            route = scope.get("route")
            path = record.path if handler else route.path if isinstance(route, Route) else "other"
            self._door.metrics.answers[path, record.status] += 1
            self._door.log.write(record, began)

    def _of_host(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """The refusal of who has been led here, where no key is asked for."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._door.is_guarded and is_domain(host):
            return ApiError(403, f"Host is {host[:200]!r}; want an address or a name without dots, or an --api-key")
        return None

    def _of_key(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """The refusal of who has none."""
        keys = (headers.get(name, b"").decode("latin-1") for name in (b"authorization", b"x-api-key"))
        if not (path in PAGE_PATHS or self._door.admits(*keys)):
            return ApiError(
                401, "want the header `Authorization: Bearer KEY` or `x-api-key: KEY`, with a key of this engine"
            )
        return None

    async def _answer(self, handler: Handler, request: Request, send: Send) -> None:
        """As the router would, without its layers: each of them stands between a request and its first token twice."""
        try:
            response = await handler(request, self._door)
            await response(request.scope, request.receive, send)
        except ApiError as error:
            await _on_api_error(request, error)(request.scope, request.receive, send)


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.record.error = error.reply.error.code
    return _refused(error, request.scope)


def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router says: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    wanted = f"; want {error.headers['Allow']}" if error.headers and "Allow" in error.headers else ""
    refusal = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}{wanted}")
    response = _refused(refusal, request.scope)
    request.state.record.error = str(error.status_code)
    response.headers.update(error.headers or {})
    return response


def _on_failure(request: Request, error: Exception) -> Response:
    """What nobody has thought of."""
    request.state.record.error = "internal_error"
    failure = ApiError(500, "the HTTP door failed at this request; its log says how", code="internal_error")
    return _refused(failure, request.scope)


def _refused(error: ApiError, scope: Scope) -> Response:
    """In the form that those who ask there know."""
    if speaks_anthropics(scope["path"]):
        return error.response(in_anthropics_form(error, scope["state"]["record"].request_id))
    return error.response()


async def _models(_: Request, door: Door) -> Response:
    return _json(ModelList(data=[_card(door, model) for model in door.models]))


async def _model(request: Request, door: Door) -> Response:
    model = request.scope["path"].removeprefix("/v1/models/")  # the router's own loses the end of a line
    if not model:  # a slash behind the list's path, as behind others
        return await _models(request, door)
    door.check_model(model)
    return _json(_card(door, model))


def _card(door: Door, model: str) -> ModelCard:
    parent = door.info.model if door.adapter_of(model) else msgspec.UNSET
    root, length = parent or door.info.weights, door.info.max_model_len
    return ModelCard(id=model, created=door.created, max_model_len=length, root=root, parent=parent)


async def _tokenize(request: Request, door: Door) -> Response | Stream:
    body = await read_body(request, TokenizeRequest)
    door.check_model(body.model)
    prompt = body.to_prompt()
    if not isinstance(prompt, str):
        prompt = await door.images.got(prompt)
    try:
        tokens = await unless_gone(request.receive, door.client.tokenize(prompt, options=body.to_options()))
    except ClientError as error:
        raise from_engine(error, {"prompt": "prompt" if isinstance(prompt, str) else "messages"}) from None
    return json_answer(msgspec.json.encode(Tokens(len(tokens), door.info.max_model_len, tokens)))


async def _detokenize(request: Request, door: Door) -> Response | Stream:
    body = await read_body(request, DetokenizeRequest)
    door.check_model(body.model)
    if not body.tokens:
        return _json(Text(""))
    try:
        text = await unless_gone(request.receive, door.client.detokenize(body.tokens))
    except ClientError as error:
        raise from_engine(error, {"prompt": "tokens"}) from None
    return json_answer(msgspec.json.encode(Text(text)))


_ROUTES: list[tuple[RouteTypes, Handler]] = [
    (
        RouteTypes(
            "POST",
            "/v1/chat/completions",
            "The next turn of a conversation",
            ChatCompletionRequest,
            ChatCompletion,
            ChatChunk,
        ),
        chat,
    ),
    (
        RouteTypes("POST", "/v1/completions", "Continuations of prompts", CompletionRequest, Completion, Completion),
        complete,
    ),
    (
        RouteTypes("POST", "/v1/responses", "The next turn, in items", ResponsesRequest, Responded, AnyEvent),
        respond,
    ),
    *MESSAGES_ROUTES,
    EMBEDDINGS_ROUTE,
    CLASSIFY_ROUTE,
    *RANK_ROUTES,
    (RouteTypes("GET", "/v1/models", "What is served", gives=ModelList), _models),
    (RouteTypes("GET", "/v1/models/{model:path}", "One model", gives=ModelCard), _model),
    (RouteTypes("POST", "/tokenize", "The token ids of a prompt", TokenizeRequest, Tokens), _tokenize),
    (RouteTypes("POST", "/detokenize", "The text of token ids", DetokenizeRequest, Text), _detokenize),
    *CONDITION_ROUTES,
    *CHANGE_ROUTES,
]


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
