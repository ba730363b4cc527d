"""A field that holds one prompt or several, texts or token ids, as OpenAI's clients send them."""

from typing import Any

from tercet.engine.http_errors import ApiError


def read_prompts(field: str, value: str | list[Any], most: int) -> list[str | list[int]]:
    """The prompts in it, in order."""
    if isinstance(value, str):
        return [value]
    if _are_ids(value):
        return [value]
    if 1 <= len(value) <= most and all(isinstance(one, str) or _are_ids(one) for one in value):
        return value
    text = f"{field} is a list that cannot be read; want a text, token ids, or 1 to {most:,} of either"
    raise ApiError(400, text, param=field)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one < 2**31 for one in value)  # a bool is no token
    )
