"""How many lists and maps a message would become, told from its bytes: each is one byte there and takes 60 in memory.

What has a shape cannot become many: counted is what has none, tools, arguments of their calls and schemas. Pure.
"""

from typing import TypeVar

import msgspec

from tercet.ipc.sockets import MAX_PLAIN_BYTES

MAX_VALUES = 2**23
"""Of a body of JSON, in all."""
_MOST_LISTED = 2**20
"""Turns, or parts of one."""
MAX_PARTS = 2**20
"""Lists and maps of one message: a tenth of a second, and 64 MiB for each 2^20 that are empty."""
_HEADS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
"""What lists and maps begin with in MessagePack. Letters beyond ASCII have such bytes too."""
_OTHERS = bytes(set(range(256)) - set(_HEADS))


class _Message(msgspec.Struct, array_like=True):
    """Of any kind; what stands behind its fields is not looked at."""

    kind: str
    request_id: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    """Or conversation, or request."""
    params: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    handling: msgspec.Raw = msgspec.Raw()
    last: msgspec.Raw = msgspec.Raw()
    """Options of a conversation, images of a text."""


class _Turn(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()


_OfAny = TypeVar("_OfAny", _Turn, _Part)


def has_too_many_parts(message: bytes) -> bool:
    """Of a client's message; False for what is none, too."""
    if len(message) <= MAX_PARTS:
        return False
    try:
        parts, _ = _looked_through(message)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return sum(map(len, parts)) > MAX_PARTS and _num_heads(b"".join(parts)) > MAX_PARTS


def has_too_many_bytes(message: bytes) -> bool:
    """Besides its images, which stay the bytes they are."""
    if len(message) <= MAX_PLAIN_BYTES:
        return False
    try:
        _, num_image_bytes = _looked_through(message)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return True
    return len(message) - num_image_bytes > MAX_PLAIN_BYTES


def has_too_many_parts_of_json(body: bytes) -> bool:
    """Of a body, whatever stands in its texts: no context has room for so many brackets."""
    return body.count(b"[") + body.count(b"{") > MAX_PARTS or body.count(b",") > MAX_VALUES


def _looked_through(message: bytes | msgspec.Raw) -> tuple[list[msgspec.Raw], int]:
    """What of it has no shape, and the bytes of its images."""
    fields = msgspec.msgpack.decode(message, type=_Message)
    match fields.kind:
        case "Tokenize":
            return _looked_through(fields.prompt)
        case "Chat":
            turns = _listed(fields.prompt, _Turn)
            images = [part.data for turn in turns if _length(turn.content) for part in _listed(turn.content, _Part)]
            return [*(turn.tool_calls for turn in turns), fields.params, fields.last], sum(map(len, images))
        case "Generate":
            return [fields.params], len(fields.last)
        case _:
            return [fields.params], 0


def _listed(packed: msgspec.Raw, kind: type[_OfAny]) -> list[_OfAny]:
    """As long as it is not so long that the list alone would be too much."""
    if _length(packed) > _MOST_LISTED:
        raise msgspec.DecodeError
    return msgspec.msgpack.decode(packed or b"\x90", type=list[kind])  # type: ignore[valid-type]


def _length(packed: msgspec.Raw) -> int:
    """Of an array, as its beginning says; 0: it is none."""
    head = bytes(memoryview(packed)[:5])
    if head[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(head[1 : 3 if head[0] == 0xDC else 5])
    return head[0] & 0x0F if head and head[0] >> 4 == 0x9 else 0


def _num_heads(some: bytes) -> int:
    return len(some.translate(None, _OTHERS))
