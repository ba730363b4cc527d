"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` and a status that fits."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping

import msgspec
from starlette.responses import Response

from tercet.engine.choices import choices
from tercet.engine.refusal import RETRY_AFTER_S
from tercet.ipc.client import ClientError, EngineDied, Overloaded, RequestRefused, RequestTimedOut

_TOO_LONG = ("prompt_too_long", "too_long_for_context", "too_long_for_cache")
_OF_PROMPT = ("the prompt ", "the chat template ", "the tokenizer ")
_FIELD_AT_START = re.compile(r"([a-z_]+) (?:is|has|holds|of|ends) |(structured) ")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")
_PART_OF_CONTENT = re.compile(r"\.content\[\d*\.*\]")
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: ErrorBody


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        is_final: bool = False,
    ) -> None:
        """`is_final`: to ask again is no use, though the status says nothing of that."""
        super().__init__(message)
        self.status = status
        self._is_final = is_final
        self.retry_after = RETRY_AFTER_S if retry_after is None else retry_after
        self.reply = ErrorReply(ErrorBody(message, _type_of(status), param, code))

    def response(self, body: msgspec.Struct | None = None) -> Response:
        """`body`: the same in another form."""
        headers = {}
        if self.status in (429, 503):
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self._is_final:
            headers["x-should-retry"] = "false"  # as OpenAI's clients understand it
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        return Response(msgspec.json.encode(body or self.reply), self.status, headers, "application/json")


def _type_of(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "invalid_request_error" if status < 500 else "server_error"


def from_engine(error: ClientError, names: Mapping[str, str]) -> ApiError:
    """What the engine said, as HTTP says it. `names`: what the request called the prompt, and other fields that the
    engine has other names for.
    """
    message = str(error)
    match error:
        case Overloaded(code="overloaded", retry_after=retry_after):
            return ApiError(429, message, code="overloaded", retry_after=retry_after)
        case Overloaded(retry_after=retry_after):
            return ApiError(503, message, code=error.code, retry_after=retry_after)
        case EngineDied():
            return ApiError(503, message, code=error.code)
        case RequestRefused(code="kills_workers"):
            return ApiError(500, message, code=error.code, is_final=True)
        case RequestRefused(code="not_allowed"):
            return ApiError(403, message, code=error.code)
        case RequestRefused(code="not_found"):
            return ApiError(404, message, code=error.code)
        case RequestRefused(code="change_failed"):
            return ApiError(500, message, code=error.code)
        case RequestTimedOut():
            return ApiError(504, message, code=error.code, is_final=True)  # its client's time is over
    is_too_long = error.code in _TOO_LONG
    code = "context_length_exceeded" if is_too_long else error.code
    match = _FIELD_AT_START.match(message)
    if match is None:
        is_of_prompt = is_too_long or message.startswith(_OF_PROMPT)
        return ApiError(400, message, param=names["prompt"] if is_of_prompt else None, code=code)
    field = match[1] or match[2]
    param = names.get(field, field)
    return ApiError(400, param + message.removeprefix(field), param=param, code=code)


def from_decoding(error: msgspec.DecodeError, kind: type, within: str = "") -> ApiError:
    """The body was no JSON, or not of the wanted shape: name the field, and what it may be if that is one of a few.

    `within`: where in the body that is which was to be a `kind`.
    """
    message = str(error)
    path = _PATH.search(message)
    where = path[1] if path else ""
    field = _UNKNOWN_FIELD.search(message) or _MISSING_FIELD.search(message)
    param = ".".join(part for part in (within, where, field[1] if field else "") if part) or None
    if within:
        message = message.replace("`$", f"`$.{within}") if path else f"{message} - at `$.{within}`"
    if isinstance(error, msgspec.ValidationError):
        if message.startswith("Invalid enum value"):
            message += f"; want {', '.join(map(repr, choices(kind, where)))}"
        elif _PART_OF_CONTENT.search(f".{where}") and not getattr(kind, "has_blocks", False):
            text, image = ("input_text", "input_image") if within else ("text", "image_url")
            message += f'; want {{"type": "{text}", "text": …}}, or an {image}: sounds and videos are not served'
        elif message.startswith("Invalid value"):  # of the field that tells structures apart
            message += f"; want {', '.join(map(repr, choices(kind, where)))}: documents are not served"
        return ApiError(400, f"the request cannot be read: {message}", param=param, code="invalid_request")
    return ApiError(400, f"the body is not JSON: {message}", code="invalid_json")


@contextlib.contextmanager
def as_http(names: Mapping[str, str]) -> Iterator[None]:
    """What the engine refuses inside becomes an `ApiError`."""
    try:
        yield
    except ClientError as error:
        raise from_engine(error, names) from None
