"""How many lists and maps a message would become, told from its bytes: each is one byte there and takes 60 in memory.

What has a shape cannot become many: counted is what has none, tools, arguments of their calls and schemas. Pure.
"""

import msgspec

from tercet.ipc.messages import Chat

MAX_PARTS = 2**20
"""Lists and maps of one message: a tenth of a second, and 64 MiB for each 2^20 that are empty."""
_HEADS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
"""What lists and maps begin with in MessagePack. Letters beyond ASCII have such bytes too."""
_OTHERS = bytes(set(range(256)) - set(_HEADS))
_FIELDS = ("kind", *Chat.__struct_fields__)


class _Turn(msgspec.Struct):
    tool_calls: msgspec.Raw = msgspec.Raw()


def has_too_many_parts(message: bytes) -> bool:
    """Of a client's message; False for what is none, too."""
    if len(message) <= MAX_PARTS or _num_heads(message) <= MAX_PARTS:
        return False
    try:
        return _num_heads(b"".join(_of_any_shape(message))) > MAX_PARTS
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def has_too_many_parts_of_json(body: bytes) -> bool:
    """Of a body, whatever stands in its texts: no context has room for so many brackets."""
    return body.count(b"[") + body.count(b"{") > MAX_PARTS


def _of_any_shape(message: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    fields = msgspec.msgpack.decode(message, type=list[msgspec.Raw])
    kind = msgspec.msgpack.decode(fields[0], type=str) if fields else ""
    if kind == "Tokenize":
        return [part for request in fields[2:3] for part in _of_any_shape(request)]
    if kind != "Chat":
        return fields[3:4]  # params
    named = dict(zip(_FIELDS, fields, strict=False))
    turns = msgspec.msgpack.decode(named.get("messages", b"\x90"), type=list[_Turn])
    return [*(turn.tool_calls for turn in turns), *(named[name] for name in ("params", "options") if name in named)]


def _num_heads(some: bytes) -> int:
    return len(some.translate(None, _OTHERS))
