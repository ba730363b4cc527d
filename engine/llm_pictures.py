"""What a program with an engine of its own may say with images in it, and patience where the engine has too many."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from tercet.ipc.errors import Overloaded
from tercet.ipc.messages import ChatMessage

_RETRY_S = 0.25
ANSWERS_OF_PICTURES = 32
"""One with images counts as so many that bring none: all that it brings is in memory until it ends."""
_T = TypeVar("_T")


def as_turn(turn: dict[str, Any] | ChatMessage) -> ChatMessage:
    """Its content may be a list of parts as OpenAI has them; a client reads those. Raises `ValueError`."""
    if not isinstance(turn, dict) or not isinstance(content := turn.get("content"), list | tuple):
        return msgspec.convert(turn, ChatMessage)
    plain = msgspec.convert({**turn, "content": None}, ChatMessage)
    return msgspec.structs.replace(plain, content=tuple(content))


def brings_pictures(prompt: Any) -> bool:
    """A text with images, or a conversation in which any turn has parts."""
    if isinstance(prompt, Mapping):
        return True
    is_chat = bool(prompt) and isinstance(prompt[0], ChatMessage)
    return is_chat and any(isinstance(turn.content, list | tuple) for turn in prompt)


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Again, as long as the images of others are too many."""
    while True:
        try:
            return await ask()
        except Overloaded as error:
            if error.code != "overloaded":
                raise
        await asyncio.sleep(_RETRY_S)
