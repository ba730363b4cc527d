"""Messages nested as deep as can be read, or of more parts than are read, and values that JSON has no word for, to a
real tokenizer process: each gets its answer, and the process goes on."""

from typing import Any

import msgpack
import pytest

from tercet.engine.nesting import is_nested_deeper
from tercet.engine.part_count import MAX_PARTS
from tercet.ipc.answers import Failed, Rejected, Tokenized
from tokenizer_process import TokenizerProcess
from wire_peer import Peer, still_serves

MARK = "here"


def packed(fields: list[Any], inside: bytes) -> bytes:
    """With `inside` where the mark is: nested deeper than a packer would go."""
    return msgpack.packb(fields).replace(msgpack.packb(MARK), inside)


def chat(name: str) -> list[Any]:
    call = {"function": {"name": "f", "arguments": {"x": MARK}}}
    return ["Chat", name, [{"role": "assistant", "tool_calls": [call]}], {"max_tokens": 1}]


def schema(name: str) -> list[Any]:
    return ["Generate", name, "x", {"max_tokens": 1, "structured": {"json_schema": {"x": MARK}}}]


def questions(name: str) -> list[list[Any]]:
    tools = ["Chat", name, [{"role": "user", "content": "x"}], {}, "", {}, {"tools": [{"x": MARK}]}]
    return [chat(name), schema(name), tools, ["Tokenize", name, chat("")], ["Tokenize", name, tools]]


def test_as_deep_as_can_be_read_and_deeper(shared: TokenizerProcess, peer: Peer) -> None:
    """Somewhere here what can be read can no longer be written, for want of a few frames."""
    for depth in [*range(130, 900, 110), *range(940, 1000)]:
        for fields in questions(f"a{depth}"):
            peer.raw(packed(fields, b"\x91" * depth + b"\x90"))
            answer = peer.receive()
            assert isinstance(answer, Failed | Rejected), (depth, fields[0])
            assert isinstance(answer, Rejected) or "want " in answer.message
    still_serves(shared, peer)


def test_more_parts_than_are_read(shared: TokenizerProcess, peer: Peer) -> None:
    """Each would be a list of its own, 60 bytes long."""
    many = b"\xdd" + (2 * MAX_PARTS).to_bytes(4, "big") + b"\x90" * (2 * MAX_PARTS)
    for name, fields in zip("abcde", questions("here too"), strict=True):
        fields[1] = name
        peer.raw(packed(fields, many))
        answer = peer.receive()
        assert isinstance(answer, Rejected)
        assert (answer.request_id, answer.code) == (name, "bad_message")
        assert f"more than {MAX_PARTS} lists and maps" in answer.message
    still_serves(shared, peer)


def test_levels_that_are_served(shared: TokenizerProcess, peer: Peer) -> None:
    peer.raw(packed(["Tokenize", "a", chat("")], b"\x91" * 100 + b"\x90"))
    assert isinstance(peer.receive(), Tokenized)
    # Of a question about the prompt the parameters do not matter, deep or not.
    peer.raw(packed(["Tokenize", "a", schema("")], b"\x91" * 900 + b"\x90"))
    assert isinstance(peer.receive(), Tokenized)
    still_serves(shared, peer)


@pytest.mark.parametrize(
    "value",
    [msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), b"bytes", {None: 1}, {b"key": 1}, {(1, 2): 3}],
)
def test_a_schema_that_is_no_json(shared: TokenizerProcess, peer: Peer, value: object) -> None:
    peer.raw(msgpack.packb(["Generate", "a", "x", {"structured": {"json_schema": {"x": value}}}]))
    failed = peer.receive()
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_request"
    still_serves(shared, peer)


def test_levels_are_counted() -> None:
    value: Any = 1
    for levels in range(1, 6):
        value = {"a": value, "b": 2} if levels % 2 else [0, value]
        assert not is_nested_deeper(value, levels)
        assert is_nested_deeper(value, levels - 1)
