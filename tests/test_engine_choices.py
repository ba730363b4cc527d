"""What a place may hold, found by its path: in structs, lists, tables and unions; in what clients send by HTTP."""

from typing import Literal

import msgspec
import pytest

from tercet.engine.choices import choices
from tercet.engine.http_errors import from_decoding
from tercet.engine.openai_requests import ChatCompletionRequest


class Leaf(msgspec.Struct):
    kind: Literal["a", "b"] | None = None
    size: Literal[1, 2] | str = 1


class Nut(msgspec.Struct, tag_field="is", tag="nut"):
    size: Literal[3] = 3


class Fig(msgspec.Struct, tag_field="is", tag="fig"):
    pass


class Tree(msgspec.Struct):
    leaves: list[Leaf] | str
    named: dict[str, Leaf] = {}
    own: Leaf | None = msgspec.field(default=None, name="other")
    fruits: list[Nut | Fig] = []


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("leaves[3].kind", ["a", "b"]),
        ("named[...].size", [1, 2]),
        ("other.kind", ["a", "b"]),
        ("own.kind", []),
        ("fruits[0].is", ["fig", "nut"]),
        ("fruits[0].size", [3]),
        ("leaves", []),
        ("", []),
        ("nowhere[0].at", []),
    ],
)
def test_choices(path: str, wanted: list[object]) -> None:
    assert sorted(choices(Tree, path), key=str) == wanted


@pytest.mark.parametrize(
    ("changes", "param", "wanted"),
    [
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", {"user", "assistant", "system", "tool"}),
        ({"response_format": {"type": "xml"}}, "response_format.type", {"json_object", "json_schema", "text"}),
        ({"tool_choice": "perhaps"}, "tool_choice", {"auto", "none", "required"}),
    ],
)
def test_who_sends_something_else_is_told(changes: dict[str, object], param: str, wanted: set[str]) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "x"}], **changes}
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(body, ChatCompletionRequest)
    reply = from_decoding(raised.value, ChatCompletionRequest).reply.error
    assert reply.param == param
    _, told = reply.message.split("; want ")
    assert wanted <= {one.strip("'") for one in told.split(", ")}
