"""The items of an answer, made of what has become clear of it, and the events that tell of them.

Pure: fed deltas as they come. It knows no engine and no HTTP.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tercet.engine.openai_answers import CallOut, ChatDelta
from tercet.engine.openai_logprobs import Later, Rows, later_rows, written_rows
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
    logprobs: list[Any] = field(default_factory=list)
    """Of what was said; rows that are written later."""

    def part(self) -> Part:
        text = "".join(self.text)
        return OutputText(text=text, logprobs=self.logprobs) if self.kind == "message" else ReasoningText(text=text)

    def item(self, part: Part, status: ItemStatus) -> Item:
        if isinstance(part, OutputText):
            return MessageItem(id=self.id, status=status, content=[part])
        return ReasoningItem(id=self.id, status=status, content=[part])


class Output:
    """Of one answer."""

    def __init__(self, later: Later | None = None) -> None:
        """`later`: of an answer that is told whole, whose log-probabilities are written when it is sent."""
        self._later = later
        self.items: list[Item] = []
        """Those that are whole."""
        self._open: _Open | None = None
        self._num_events = 0

    def next_number(self) -> int:
        """Of the next event."""
        self._num_events += 1
        return self._num_events - 1

    def add(self, delta: ChatDelta, rows: Rows = ()) -> Iterator[Event]:
        """What is new; `rows`: of its content's tokens, if log-probabilities are wanted."""
        if delta.reasoning_content:
            yield from self._say("reasoning", delta.reasoning_content)
        if delta.content:
            yield from self._say("message", delta.content, rows)
        for call in delta.tool_calls or ():
            yield from self._close("completed")
            yield from self._call(call)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        """No more comes. An answer that is nothing is an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _say(self, kind: _Kind, text: str, rows: Rows = ()) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text.append(text)
        place: dict[str, Any] = {"output_index": len(self.items), "item_id": self._open.id}
        if kind == "reasoning":
            yield ReasoningDelta(sequence_number=self.next_number(), delta=text, **place)
            return
        new: Any = written_rows(rows) if self._later is None else rows
        self._open.logprobs += new
        yield TextDelta(sequence_number=self.next_number(), delta=text, logprobs=new, **place)

    def _begin(self, kind: _Kind) -> Iterator[Event]:
        opened = self._open = _Open(kind, f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}")
        place = len(self.items)
        item: Item
        part: Part
        if kind == "message":
            item, part = MessageItem(id=opened.id, status="in_progress", content=[]), OutputText(text="")
        else:
            item, part = ReasoningItem(id=opened.id, status="in_progress", content=[]), ReasoningText(text="")
        yield ItemAdded(sequence_number=self.next_number(), output_index=place, item=item)
        yield PartAdded(sequence_number=self.next_number(), output_index=place, item_id=opened.id, part=part)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        """What has been said is whole, if anything has."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if self._later is not None and opened.logprobs:
            opened.logprobs = later_rows(opened.logprobs, self._later)
        part = opened.part()
        place: dict[str, Any] = {"output_index": len(self.items), "item_id": opened.id}
        if isinstance(part, OutputText):
            number = self.next_number()
            yield TextDone(sequence_number=number, text=part.text, logprobs=part.logprobs, **place)
        else:
            yield ReasoningDone(sequence_number=self.next_number(), text=part.text, **place)
        yield PartDone(sequence_number=self.next_number(), part=part, **place)
        yield self._done(opened.item(part, status))

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
