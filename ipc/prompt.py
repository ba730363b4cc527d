"""From what a Python program calls a prompt to the message that asks for its continuation."""

from array import array
from collections.abc import Sequence
from typing import cast

from tercet.ipc.messages import Chat, ChatMessage, Generate, GenerateIds, Handling, Request, SamplingParams

Prompt = str | Sequence[int] | Sequence[ChatMessage]


def make_request(
    prompt: Prompt, params: SamplingParams | None = None, cache_salt: str = "", handling: Handling | None = None
) -> Request:
    """Still without a name."""
    params, handling = params or SamplingParams(), handling or Handling()
    if isinstance(prompt, str):
        return Generate("", prompt, params, cache_salt, handling)
    if prompt and isinstance(prompt[0], ChatMessage):
        return Chat("", tuple(cast("Sequence[ChatMessage]", prompt)), params, cache_salt, handling)
    return GenerateIds("", pack_ids(cast("Sequence[int]", prompt)), params, cache_salt, handling)


def pack_ids(prompt: Sequence[int]) -> bytes:
    """Token ids as they travel. Raises `ValueError` for what is none."""
    try:
        return array("i", prompt).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"got a prompt of {type(prompt).__name__} ({error}); want a str, int32 token ids, or ChatMessages"
        ) from None
