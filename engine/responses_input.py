"""A conversation as the items of OpenAI's Responses API, and as chat templates know it.

What a model has thought, said and called are items of their own there; here they are one turn. Knows no other field of
a request.
"""

from collections.abc import Sequence
from typing import Any, Literal, assert_never

import msgspec

from tercet.engine.http_errors import ApiError, from_decoding
from tercet.engine.http_images import named_image
from tercet.engine.openai_messages import CalledFunction, Detail, check_detail, to_call
from tercet.ipc.content import Content, Part, TextPart, as_content
from tercet.ipc.messages import MAX_CHAT_MESSAGES, ChatMessage, ToolCall


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of them."""


class _Tagged(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Told apart by their type."""


class _InputText(_Tagged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_text"):
    """What somebody says."""

    text: str


class _InputImage(_Tagged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_image"):
    """A picture."""

    image_url: str
    detail: Detail | None = None
    file_id: None = None


class _OutputText(_Tagged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="output_text"):
    """What an answer said."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Refusal(_Tagged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refusal"):
    """What an answer said instead."""

    refusal: str


class _Message(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of anybody; what a tool says is an item of its own."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_InputText | _InputImage | _OutputText | _Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: None = None


class _FunctionCall(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer called; `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None


class _FunctionOutput(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_InputText | _InputImage]
    id: str | None = None
    status: str | None = None


class _SummaryText(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What others' models thought, in short."""

    type: Literal["summary_text"]
    text: str


class _ReasoningText(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model thought."""

    type: Literal["reasoning_text"]
    text: str


class _Reasoning(_Shape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was thought before an answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[_SummaryText] = []
    content: list[_ReasoningText] | None = None
    encrypted_content: None = None
    """Of another engine: nobody here could read it."""
    status: str | None = None


_Item = _Message | _FunctionCall | _FunctionOutput | _Reasoning
_ITEMS: dict[object, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionOutput,
    "reasoning": _Reasoning,
}


def to_turns(instructions: str | None, given: str | Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """The conversation. `instructions` and what else the system says at the beginning are one turn."""
    if not given:
        raise ApiError(400, "input is empty; want a text, or at least 1 item", param="input")
    if len(given) > MAX_CHAT_MESSAGES and not isinstance(given, str):
        raise ApiError(400, f"input has {len(given)} items; want at most {MAX_CHAT_MESSAGES}", param="input")
    turns = _Turns()
    if isinstance(given, str):
        turns.add(ChatMessage("user", given))
    else:
        for place, item in enumerate(given):
            where = f"input[{place}]"
            turns.take(_read(item, where), where)
    return _with_instructions(instructions, turns.all())


class _Turns:
    """Of items, one after the other."""

    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._thought, self._said = "", ""
        self._calls: list[ToolCall] = []

    def take(self, item: _Item, where: str) -> None:
        match item:
            case _Message(role="assistant"):
                if self._said or self._calls:
                    self._end_answer()
                self._said = _text(item.content, f"{where}.content", item.role)
            case _Message():
                # To a chat template, instructions of the developer are those of the system.
                content = f"{where}.content"
                if item.role == "user":
                    self.add(ChatMessage("user", _content(item.content, content)))
                else:
                    self.add(ChatMessage("system", _text(item.content, content, item.role)))
            case _FunctionCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self._calls.append(to_call(item.call_id, function, where))
            case _FunctionOutput():
                said = _content(item.output, f"{where}.output")
                self.add(ChatMessage("tool", said, tool_call_id=item.call_id))
            case _Reasoning():
                if self._said or self._calls:
                    self._end_answer()
                self._thought += "".join(part.text for part in item.content or item.summary)
            case _:
                assert_never(item)

    def add(self, turn: ChatMessage) -> None:
        """Somebody else's."""
        self._end_answer()
        self._turns.append(turn)

    def all(self) -> list[ChatMessage]:
        self._end_answer()
        return self._turns

    def _end_answer(self) -> None:
        """What the model thought, said and called, if it did, is one turn."""
        if self._thought or self._said or self._calls:
            said = self._said if self._said or not self._calls else None
            calls, thought = tuple(self._calls), self._thought or None
            self._turns.append(ChatMessage("assistant", said, tool_calls=calls, reasoning_content=thought))
        self._thought, self._said, self._calls = "", "", []


def _read(item: dict[str, Any], where: str) -> _Item:
    kind = item.get("type", "message")
    shape = _ITEMS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        wanted = ", ".join(map(repr, _ITEMS))
        raise ApiError(400, f"{where}.type is {str(kind)[:50]!r}; want one of {wanted}", param=f"{where}.type")
    try:
        return msgspec.convert(item, shape)
    except msgspec.ValidationError as error:
        raise from_decoding(error, shape, where) from None


def _content(content: str | Sequence[_InputText | _InputImage | _OutputText | _Refusal], where: str) -> Content:
    if isinstance(content, str):
        return content
    return as_content([_part(part, f"{where}[{place}]") for place, part in enumerate(content)])


def _text(content: str | Sequence[_InputText | _InputImage | _OutputText | _Refusal], where: str, role: str) -> str:
    """For turns that are put together with others."""
    read = _content(content, where)
    if not isinstance(read, str):
        raise ApiError(400, f"{where} has an image in a turn of the {role}; want it in one of the user", param=where)
    return read


def _part(part: _InputText | _InputImage | _OutputText | _Refusal, where: str) -> Part:
    match part:
        case _InputImage():
            check_detail(part.detail, f"{where}.detail")
            return named_image(part.image_url, f"{where}.image_url")
        case _Refusal():
            return TextPart(part.refusal)
        case _:
            return TextPart(part.text)


def _with_instructions(instructions: str | None, turns: list[ChatMessage]) -> list[ChatMessage]:
    """Templates know one turn of the system, at the beginning."""
    first = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
    said = [instructions or "", *(turn.text for turn in turns[:first])]
    together = "\n\n".join(filter(None, said))
    return [ChatMessage("system", together), *turns[first:]] if together else turns[first:]
