"""An answer's blocks of content: one behind the other, each begun, continued and completed. Pure.

A streamed answer is its events, a whole one what they come to.
"""

from collections.abc import Iterable, Iterator

import msgspec

from tercet.engine.anthropic_answers import (
    BlockDelta,
    BlockEvent,
    BlockOut,
    BlockStart,
    BlockStop,
    InputDelta,
    SignatureDelta,
    TextDelta,
    TextOut,
    ThinkingDelta,
    ThinkingOut,
    ToolUseOut,
)
from tercet.engine.openai_answers import CallOut, ChatDelta


class Blocks:
    """Of one answer."""

    def __init__(self, signature: str, *, omits_thoughts: bool) -> None:
        """`signature`: of its thoughts. `omits_thoughts`: their blocks stay empty, as the client has asked for."""
        self._signature = signature
        self._omits_thoughts = omits_thoughts
        self._open: type[TextOut] | type[ThinkingOut] | None = None
        self._index = -1
        self.num_calls = 0

    def add(self, delta: ChatDelta) -> Iterator[BlockEvent]:
        """What is new of the answer, as events."""
        if delta.reasoning_content:
            yield from self._enter(ThinkingOut("", ""))
            if not self._omits_thoughts:
                yield BlockDelta(self._index, ThinkingDelta(delta.reasoning_content))
        if delta.content:
            yield from self._enter(TextOut(""))
            yield BlockDelta(self._index, TextDelta(delta.content))
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def end(self) -> Iterator[BlockEvent]:
        """Nothing more comes."""
        if self._open is ThinkingOut:
            yield BlockDelta(self._index, SignatureDelta(self._signature))
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None

    def _enter(self, block: TextOut | ThinkingOut) -> Iterator[BlockEvent]:
        if self._open is not type(block):
            yield from self._begin(block)
            self._open = type(block)

    def _begin(self, block: BlockOut) -> Iterator[BlockEvent]:
        yield from self.end()
        self._index += 1
        yield BlockStart(self._index, block)

    def _call(self, call: CallOut) -> Iterator[BlockEvent]:
        self.num_calls += 1
        yield from self._begin(ToolUseOut(call.id, call.function.name, msgspec.Raw(b"{}")))
        yield BlockDelta(self._index, InputDelta(call.function.arguments))
        yield BlockStop(self._index)


def content_of(events: Iterable[BlockEvent]) -> list[BlockOut]:
    """All blocks, complete."""
    content: list[BlockOut] = []
    for event in events:
        match event:
            case BlockStart(content_block=block):
                content.append(block)
            case BlockDelta(delta=delta):
                content[-1] = _longer(content[-1], delta)
    return content


def _longer(block: BlockOut, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> BlockOut:
    match block, delta:
        case TextOut(text=text), TextDelta(text=more):
            return TextOut(text + more)
        case ThinkingOut(thinking=thinking, signature=signature), ThinkingDelta(thinking=more):
            return ThinkingOut(thinking + more, signature)
        case ThinkingOut(thinking=thinking), SignatureDelta(signature=signature):
            return ThinkingOut(thinking, signature)
        case ToolUseOut(id=call_id, name=name), InputDelta(partial_json=whole):
            return ToolUseOut(call_id, name, msgspec.Raw(whole.encode()))
        case _:
            raise AssertionError(f"{delta} is of no {block}")
