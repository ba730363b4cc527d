"""From what a Python program calls a prompt to the message that asks for its continuation."""

from array import array
from collections.abc import Sequence
from typing import cast

from tercet.ipc.messages import Chat, ChatMessage, ChatOptions, Generate, GenerateIds, Handling, Request, SamplingParams

Prompt = str | Sequence[int] | Sequence[ChatMessage]


def make_request(
    prompt: Prompt,
    params: SamplingParams | None = None,
    cache_salt: str = "",
    handling: Handling | None = None,
    options: ChatOptions | None = None,
) -> Request:
    """Still without a name. `options` are of conversations only."""
    params, handling = params or SamplingParams(), handling or Handling()
    if isinstance(prompt, str) and options is None:
        return Generate("", prompt, params, cache_salt, handling)
    if prompt and isinstance(prompt[0], ChatMessage):
        return Chat(
            "", tuple(cast("Sequence[ChatMessage]", prompt)), params, cache_salt, handling, options or ChatOptions()
        )
    if options is not None:
        raise ValueError("got options of a chat template; want ChatMessages with them")
    return GenerateIds("", pack_ids(cast("Sequence[int]", prompt)), params, cache_salt, handling)


def pack_ids(prompt: Sequence[int]) -> bytes:
    """Token ids as they travel. Raises `ValueError` for what is none."""
    try:
        return array("i", prompt).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"got a prompt of {type(prompt).__name__} ({error}); want a str, int32 token ids, or ChatMessages"
        ) from None
