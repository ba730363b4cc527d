"""From what a Python program calls a prompt to the message that asks for its continuation, and to its bytes."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from tercet.ipc.errors import RequestRefused
from tercet.ipc.images_in import images_in
from tercet.ipc.messages import (
    MAX_ANSWERS,
    Chat,
    ChatMessage,
    ChatOptions,
    ClassificationParams,
    Classify,
    ClassifyIds,
    ClassifyRequest,
    Continuation,
    Embed,
    EmbeddingParams,
    EmbedIds,
    EmbedRequest,
    FromClient,
    Generate,
    GenerateIds,
    Handling,
    SamplingParams,
)
from tercet.ipc.picture_files import ImagePrompt
from tercet.ipc.sockets import MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES

PlainPrompt = str | Sequence[int] | Sequence[ChatMessage]
PicturePrompt = Mapping[str, Any]
"""{"prompt": a text that keeps places for images, "multi_modal_data": {"image": one or a list}}, as in vLLM."""
Prompt = PlainPrompt | PicturePrompt
Params = TypeVar("Params", SamplingParams, EmbeddingParams, ClassificationParams)


def make_request(
    prompt: Prompt | ImagePrompt,
    params: SamplingParams | None = None,
    cache_salt: str = "",
    handling: Handling | None = None,
    options: ChatOptions | None = None,
) -> Continuation:
    """Still without a name. `options` are of conversations only."""
    params, handling = _given(params, SamplingParams), handling or Handling()
    if not 1 <= params.n <= MAX_ANSWERS:
        raise ValueError(f"n is {params.n}; want 1 to {MAX_ANSWERS}")
    if isinstance(prompt, str) and options is None:
        return Generate("", prompt, params, cache_salt, handling)
    if isinstance(prompt, ImagePrompt) and options is None:
        return Generate("", prompt.text, params, cache_salt, handling, prompt.images)
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], ChatMessage):
        return Chat(
            "", tuple(cast("Sequence[ChatMessage]", prompt)), params, cache_salt, handling, options or ChatOptions()
        )
    if options is not None:
        raise ValueError("got options of a chat template; want ChatMessages with them")
    return GenerateIds("", pack_ids(cast("Sequence[int]", prompt)), params, cache_salt, handling)


def make_embed(
    prompt: str | Sequence[int], params: EmbeddingParams | None, cache_salt: str, handling: Handling
) -> EmbedRequest:
    """Still without a name."""
    params = _given(params, EmbeddingParams)
    if isinstance(prompt, str):
        return Embed("", prompt, params, cache_salt, handling)
    return EmbedIds("", pack_ids(prompt), params, cache_salt, handling)


def make_classify(
    prompt: str | Sequence[int], params: ClassificationParams | None, pair: str | None, cache_salt: str,
    handling: Handling,
) -> ClassifyRequest:  # fmt: skip
    """Still without a name."""
    params = _given(params, ClassificationParams)
    if isinstance(prompt, str):
        return Classify("", prompt, params, cache_salt, handling, pair)
    if pair is not None:
        raise ValueError("got a pair of token ids; want two texts")
    return ClassifyIds("", pack_ids(prompt), params, cache_salt, handling)


def _given(params: Params | None, kind: type[Params]) -> Params:
    """Or its defaults."""
    params = kind() if params is None else params
    if not isinstance(params, kind):
        raise TypeError(f"params is {params!r:.80}; want {kind.__name__}")
    return params


def pack_ids(prompt: Sequence[int]) -> bytes:
    """Token ids as they travel. Raises `ValueError` for what is none."""
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError("bytes are no numbers of tokens")
        if bool in map(type, prompt):  # a number to Python: a mask, say, would be a prompt of the tokens 0 and 1
            raise TypeError("True and False are no numbers of tokens")
        return struct.pack(f"{len(prompt)}i", *prompt)  # half the time of an array
    except (TypeError, struct.error) as error:
        raise ValueError(
            f"got a prompt of {type(prompt).__name__} ({error}); want a str, int32 token ids, or ChatMessages"
        ) from None


def encode(message: FromClient) -> bytes:
    """Raises `RequestRefused` for what no message can hold, and for more than one may have: of that, the connection and
    all that runs on it end.
    """
    try:
        encoded = msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise RequestRefused("invalid_request", f"{_complaint(error)}; want what MessagePack can hold") from None
    if len(encoded) > MAX_PLAIN_BYTES:
        num_plain = len(encoded) - sum(map(len, images_in(message)))
        for what, count, most in (
            ("", len(encoded), MAX_MESSAGE_BYTES),
            (" besides images", num_plain, MAX_PLAIN_BYTES),
        ):
            if count > most:
                raise RequestRefused("prompt_too_long", f"the request has {count} bytes{what}; want at most {most}")
    return encoded


def _complaint(error: OverflowError | UnicodeEncodeError | RecursionError) -> str:
    match error:
        case OverflowError():
            return "a whole number came that has more than 64 bits"
        case UnicodeEncodeError(object=text, start=start):
            return f"a text came that has half of a character, {text[start]!r}"
        case _:
            return "a value came that is nested too deep"
