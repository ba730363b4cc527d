"""Lists and maps of a message are counted as they would be made, and texts and numbers are not."""

import os
import random
from typing import Any

import msgpack
import pytest

from tercet.engine import part_count
from tercet.engine.part_count import has_too_many_bytes, has_too_many_parts, has_too_many_parts_of_json

LETTERS = "a[{世界Ääß\x90😀"


def anything(levels: int) -> Any:
    """Of JSON's kinds, nested so deep at most."""
    kind = random.randrange(6 if levels else 4)
    if kind == 4:
        return [anything(levels - 1) for _ in range(random.randrange(5))]
    if kind == 5:
        return {f"{one}": anything(levels - 1) for one in range(random.randrange(5))}
    # Texts have letters whose bytes no list begins with here: those beyond ASCII may be counted as well.
    return (None, random.randrange(128), random.random() > 0.5, "x" * random.randrange(40))[kind]


def num_parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_parts, value.values()))
    return 1 + sum(map(num_parts, value)) if isinstance(value, list) else 0


def chat(tools: list[Any], arguments: list[Any], params: dict[str, Any], text: str = "x") -> list[Any]:
    calls = [{"id": "", "function": {"name": "f", "arguments": one}} for one in arguments]
    turns = [{"role": "user", "content": text}, {"role": "assistant", "tool_calls": calls}]
    return ["Chat", "a", turns, params, text, {}, {"tools": tools}]


@pytest.mark.parametrize("_", range(30))
def test_parts_are_counted(_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, arguments = [anything(3) for _ in range(4)], [anything(3) for _ in range(4)]
    params = {"structured": {"json_schema": anything(4)}}
    # A list of tools in options, and a list of calls, each of which is a map with another.
    parts = num_parts(params) + num_parts({"tools": tools}) + 1 + sum(2 + num_parts(one) for one in arguments)
    generate = ["Generate", "a", "x", params]
    for message, in_it in (
        (chat(tools, arguments, params, LETTERS * 1000), parts),
        (["Tokenize", "a", chat(tools, arguments, params)], parts),
        (generate, num_parts(params)),
        (["Tokenize", "a", generate], num_parts(params)),
        (["GenerateIds", "a", os.urandom(4000), params], num_parts(params)),
    ):
        packed = msgpack.packb(message)
        for most in (in_it - 1, in_it, in_it + 1):
            monkeypatch.setattr(part_count, "MAX_PARTS", most)
            assert has_too_many_parts(packed) == (in_it > most)


def test_long_texts_and_many_ids_have_no_parts() -> None:
    for text in ("世界" * 2_500_000, "a" * 15_000_000, LETTERS * 700_000):
        assert not has_too_many_parts(msgpack.packb(["Generate", "a", text]))
        assert not has_too_many_parts(msgpack.packb(chat([], [], {}, text[: len(text) // 2])))
    assert not has_too_many_parts(msgpack.packb(["GenerateIds", "a", b"\x90" * 15_000_000]))
    assert not has_too_many_parts_of_json(b'"' + b"x" * 15_000_000 + b'"')


@pytest.mark.parametrize(
    "message",
    [
        b"\x90",
        b"\x01",
        b"\xc1\x90",
        b"",
        b"\xdd\xff",
        b"\x91\x90",
        *map(msgpack.packb, (["Chat"], ["Chat", "a", [5, []]])),
    ],
)
def test_what_is_no_message_has_none(message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_count, "MAX_PARTS", 0)
    assert not has_too_many_parts(message)


def test_images_are_bytes_and_all_else_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_count, "MAX_PLAIN_BYTES", 1000)
    image, text = b"\x90" * 5000, "x" * 1100
    conversation = chat([], [], {}, "x")
    conversation[2][0]["content"] = [{"type": "text", "text": "x"}, {"type": "image", "data": image}]
    beside = ["Generate", "a", "x", {}, "", {}, [image, image]]
    for message, is_too_much in (
        (conversation, False),
        (beside, False),
        (["Tokenize", "a", beside], False),
        (["GenerateIds", "a", image], True),
        ([*conversation[:4], text, *conversation[5:]], True),
        (["Generate", "a", text, {}, "", {}, [image]], True),
        (["Chat", "a", [{"role": "user", "content": text}]], True),
        (["Cancel", text], True),
        ([text], True),
        (text, True),
    ):
        assert has_too_many_bytes(msgpack.packb(message)) == is_too_much, message[:2]


def test_lists_without_end_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_count, "MAX_PLAIN_BYTES", 1000)
    monkeypatch.setattr(part_count, "_MOST_LISTED", 99)
    for head in (b"\xdc\x00\xff", b"\xdd\x7f\xff\xff\xff"):
        for message in (b"\x93\xa4Chat\xa1a" + head, b"\x93\xa4Chat\xa1a\x91\x81\xa7content" + head):
            assert has_too_many_bytes(message + b"\x80" * 2000)


def test_bodies_of_many_values() -> None:
    assert has_too_many_parts_of_json(b"[" + b"1," * (part_count.MAX_VALUES + 1) + b"1]")
    assert not has_too_many_parts_of_json(b"[" + b"1," * (part_count.MAX_VALUES - 1) + b"1]")
