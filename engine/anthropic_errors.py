"""Errors as Anthropic's clients know them, made of those that the door has."""

import re

import msgspec

from tercet.engine.anthropic_answers import MessagesError, MessagesErrorBody, MessagesErrorDetails
from tercet.engine.http_errors import ApiError

_PATH = "/v1/messages"
_TOO_LONG = re.compile(r"the prompt has (?:at least )?(\d+) tokens, and this model's maximum context length is (\d+)")
_NO_ROOM = re.compile(r"max_tokens is (\d+); .* maximum context length is (\d+), and the prompt has (\d+) tokens")


def speaks_anthropics(path: str) -> bool:
    """Whether those that ask there want errors in this form."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def in_anthropics_form(error: ApiError, request_id: str) -> MessagesError:
    """There is no place for the field, but the message names it."""
    body = error.reply.error
    details = msgspec.UNSET if body.code is None else MessagesErrorDetails(body.code)
    return MessagesError(MessagesErrorBody(_type_of(error.status), _worded(body.message), details), request_id)


def _type_of(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 408 | 504:
            return "timeout_error"
        case 413:
            return "request_too_large"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case _:
            return "invalid_request_error" if status < 500 else "api_error"


def _worded(message: str) -> str:
    """Agents know by Anthropic's very words, and the numbers behind them, that a conversation has become too long."""
    if match := _NO_ROOM.match(message):
        most, length, num_prompt = match.groups()
        return f"input length and `max_tokens` exceed context limit: {num_prompt} + {most} > {length}; {message}"
    if match := _TOO_LONG.match(message):
        num_prompt, length = match.groups()
        return f"prompt is too long: {num_prompt} tokens > {length} maximum; {message}"
    return message
