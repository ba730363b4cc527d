"""The body of an HTTP request, bounded in size and in time, and its shape."""

import asyncio
import codecs
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tercet.engine.http_errors import ApiError, from_decoding
from tercet.engine.http_presence import ClientGone
from tercet.engine.part_count import MAX_PARTS, MAX_VALUES, has_too_many_parts_of_json

MAX_BODY_BYTES = 64 * 2**20
"""Images included, which are a third larger there."""
_BODY_SECONDS = 60.0
_T = TypeVar("_T")


async def read_body(request: Request, kind: type[_T]) -> _T:
    """The body as `kind`; what is wrong with it becomes an `ApiError` that names the field."""
    return _decoded(await _read(request), kind)


async def read_query(request: Request, kind: type[_T]) -> _T:
    """The same, or where no body came, what is behind the path."""
    body = await _read(request)
    if body and request.query_params:
        raise ApiError(400, "fields came behind the path and as a body; want them in one place", code="invalid_request")
    if body:
        return _decoded(body, kind)
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_decoding(error, kind) from None


async def _read(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding is {encoding[:200]!r}; want the body as it is, without that header",
            code="unsupported_encoding",
        )
    return await _bytes_of(request)


def _decoded(body: bytes, kind: type[_T]) -> _T:
    if has_too_many_parts_of_json(body):
        raise ApiError(
            400, f"the body has more than {MAX_PARTS} lists and objects, or {MAX_VALUES} values", code="invalid_request"
        )
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise from_decoding(error, kind) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_json") from None


async def _bytes_of(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            is_whole = False
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s", code="body_too_slow") from None
    return bytes(body.removeprefix(codecs.BOM_UTF8))  # Windows' tools begin a file with it
