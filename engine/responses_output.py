"""The items of an answer, made of what has become clear of it, and the events that tell of them.

Pure: fed deltas as they come. It knows no engine and no HTTP.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tercet.engine.openai_answers import CallOut, ChatDelta
from tercet.engine.responses_answers import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Event,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputText,
    Part,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    TextDelta,
    TextDone,
)

_Kind = Literal["message", "reasoning"]


@dataclass
class _Open:
    """An item that may say more."""

    kind: _Kind
    id: str
    text: list[str] = field(default_factory=list)

    def part(self) -> Part:
        text = "".join(self.text)
        return OutputText(text=text) if self.kind == "message" else ReasoningText(text=text)

    def item(self, status: ItemStatus) -> Item:
        part = self.part()
        if isinstance(part, OutputText):
            return MessageItem(id=self.id, status=status, content=[part])
        return ReasoningItem(id=self.id, status=status, content=[part])


class Output:
    """Of one answer."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        """Those that are whole."""
        self._open: _Open | None = None
        self._num_events = 0

    def next_number(self) -> int:
        """Of the next event."""
        self._num_events += 1
        return self._num_events - 1

    def add(self, delta: ChatDelta) -> Iterator[Event]:
        """What is new."""
        if delta.reasoning_content:
            yield from self._say("reasoning", delta.reasoning_content)
        if delta.content:
            yield from self._say("message", delta.content)
        for call in delta.tool_calls or ():
            yield from self._close("completed")
            yield from self._call(call)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        """No more comes. An answer that is nothing is an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _say(self, kind: _Kind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text.append(text)
        shape = TextDelta if kind == "message" else ReasoningDelta
        yield shape(sequence_number=self.next_number(), output_index=len(self.items), item_id=self._open.id, delta=text)

    def _begin(self, kind: _Kind) -> Iterator[Event]:
        opened = self._open = _Open(kind, f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}")
        place, part = len(self.items), opened.part()
        item: Item
        if kind == "message":
            item = MessageItem(id=opened.id, status="in_progress", content=[])
        else:
            item = ReasoningItem(id=opened.id, status="in_progress", content=[])
        yield ItemAdded(sequence_number=self.next_number(), output_index=place, item=item)
        yield PartAdded(sequence_number=self.next_number(), output_index=place, item_id=opened.id, part=part)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        """What has been said is whole, if anything has."""
        opened, self._open = self._open, None
        if opened is None:
            return
        place, part, item = len(self.items), opened.part(), opened.item(status)
        shape = TextDone if opened.kind == "message" else ReasoningDone
        yield shape(sequence_number=self.next_number(), output_index=place, item_id=opened.id, text=part.text)
        yield PartDone(sequence_number=self.next_number(), output_index=place, item_id=opened.id, part=part)
        yield self._done(item)

    def _call(self, call: CallOut) -> Iterator[Event]:
        """It comes whole."""
        name, arguments, place = call.function.name, call.function.arguments, len(self.items)
        item_id = f"fc_{uuid.uuid4().hex}"
        begun = CallItem(id=item_id, call_id=call.id, name=name, arguments="", status="in_progress")
        yield ItemAdded(sequence_number=self.next_number(), output_index=place, item=begun)
        yield ArgumentsDelta(sequence_number=self.next_number(), output_index=place, item_id=item_id, delta=arguments)
        yield ArgumentsDone(
            sequence_number=self.next_number(), output_index=place, item_id=item_id, name=name, arguments=arguments
        )
        yield self._done(CallItem(id=item_id, call_id=call.id, name=name, arguments=arguments, status="completed"))

    def _done(self, item: Item) -> Event:
        self.items.append(item)
        return ItemDone(sequence_number=self.next_number(), output_index=len(self.items) - 1, item=item)
