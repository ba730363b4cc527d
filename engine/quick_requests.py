"""Which requests and questions may be prepared in the tokenizer's event loop: others take too long for that. Pure."""

import msgspec

from tercet.engine.request_check import received_of
from tercet.ipc.images_in import images_in
from tercet.ipc.messages import (
    Chat,
    Classify,
    ClassifyIds,
    Detokenize,
    Embed,
    EmbedIds,
    Generate,
    GenerateIds,
    Question,
    Request,
    Tokenize,
)

_QUICK_CHARACTERS = 2000
"""Texts up to here are encoded in about a millisecond: less than handing them to a thread is worth.

Ids that a client has received count as characters: they become text again, in which stop strings are looked for.
"""
_LIGHT = 16
"""An image's file is so many times what its tokens are, or more."""


def is_quick(request: Request | Question) -> bool:
    """Not what has a grammar or an image. Raises `Refusal` for received ids that are of no answers."""
    num_received = 0
    if isinstance(request, Request):
        if request.params.structured is not None:
            return False
        num_received = sum(map(len, received_of(request).values())) // 4
    if images_in(request):
        return False
    try:
        return _num_characters(request) + num_received <= _QUICK_CHARACTERS
    except RecursionError:  # nested too deep, which `prepare` says
        return False


def has_images(request: Request | Question) -> bool:
    return bool(images_in(request))


def weight_of(request: Request | Question, num_bytes: int) -> int:
    """Bytes that a message of `num_bytes` counts for while it waits, where tokens have four each."""
    of_images = sum(map(len, images_in(request)))
    return num_bytes - of_images + of_images // _LIGHT


def _num_characters(request: Request | Question) -> int:
    match request:
        case Tokenize(request=inner):
            return _num_characters(inner)
        case Detokenize(token_ids=token_ids):
            return len(token_ids)
        case Generate(prompt=prompt) | Embed(prompt=prompt):
            return len(prompt)
        case Chat(messages=messages, options=options):
            if options.tools or any(message.tool_calls for message in messages):
                return len(msgspec.msgpack.encode(request))
            return sum(len(message.text) for message in messages) + 20 * len(messages)
        case Classify(prompt=prompt, pair=pair):
            return len(prompt) + len(pair or "")
        case GenerateIds() | EmbedIds() | ClassifyIds():
            return 0
