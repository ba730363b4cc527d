"""What of a chat's answer is reasoning, what is content and what are tool calls, and the names calls get.

Pure: fed text as it comes. It knows the readers and no HTTP.
"""

import uuid
from collections.abc import Sequence
from types import MappingProxyType

from tercet.engine.harmony import HarmonyReader
from tercet.engine.lark import Marks
from tercet.engine.marked_calls import Schemas
from tercet.engine.openai_answers import CallOut, ChatDelta, FunctionOut
from tercet.engine.reasoning import ReasoningReader, Thought, is_opened, tags_of
from tercet.engine.said import AnswerReader, Said, Span
from tercet.engine.section_calls import KIMI
from tercet.engine.tool_calls import Call, Item, tool_reader
from tercet.ipc.answers import ReasoningFormat, ToolFormat

NO_SCHEMAS: Schemas = MappingProxyType({})
NO_MARKS: Marks = MappingProxyType({})
Told = tuple[ChatDelta, Span | None]
"""What is new, and where in the answer's text it stands, if that is known."""


class ChatReader:
    """Of one answer."""

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        tool_format: ToolFormat,
        most_calls: int | None,
        schemas: Schemas = NO_SCHEMAS,
        marks: Marks = NO_MARKS,
        *,
        goes_on: bool = False,
    ) -> None:
        """`most_calls`: further ones are dropped, as the client has asked for. `schemas`: of the tools there are.
        `marks`: those of the formats that are tokens. `goes_on`: the answer begins in the middle of what is said."""
        self._reader: AnswerReader
        if reasoning_format == "harmony":
            self._reader = HarmonyReader(marks, schemas, reads_calls=tool_format == "harmony", goes_on=goes_on)
        else:
            self._reader = _TaggedReader(reasoning_format, tool_format, schemas, marks)
        self._most_calls = most_calls
        self._given_ids: set[str] = set()
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """All text from now on is content: it need not be fed."""
        return self._reader.is_plain

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ChatDelta]:
        """What has become clear with this text."""
        return [delta for delta, _ in self.read(text, token_ids)]

    def finish(self) -> list[ChatDelta]:
        """The rest."""
        return [delta for delta, _ in self.read_rest()]

    def read(self, text: str, token_ids: Sequence[int]) -> list[Told]:
        """As `feed`, with the places."""
        return self._told(self._reader.feed(text, token_ids))

    def read_rest(self) -> list[Told]:
        """As `finish`, with the places."""
        return self._told(self._reader.finish())

    def num_thought(self, token_ids: Sequence[int]) -> int | None:
        """How many of the answer's tokens are reasoning, marks included; None: they cannot tell."""
        return self._reader.num_thought(token_ids)

    def _told(self, said: Sequence[Said]) -> list[Told]:
        told: list[Told] = []
        for one in said:
            if one.call is None:
                delta = ChatDelta(content=one.content or None, reasoning_content=one.reasoning or None)
                told.append((delta, one.span))
            elif self._most_calls is None or self.num_calls < self._most_calls:
                told.append((ChatDelta(tool_calls=[self._named(one.call)]), one.span))
        return told

    def _named(self, call: Call) -> CallOut:
        index = self.num_calls
        self.num_calls += 1
        # The model's own, which its template shows it again, unless it has written that twice: clients tell calls by
        # it. Else nine letters and digits: the only form that the template of every other family takes back.
        call_id = call.id if call.id is not None and call.id not in self._given_ids else uuid.uuid4().hex[:9]
        self._given_ids.add(call_id)
        return CallOut(index=index, id=call_id, function=FunctionOut(call.name, call.arguments))


class _TaggedReader(AnswerReader):
    """Reasoning ahead of the answer, between tags or none, and calls within it."""

    def __init__(
        self, reasoning_format: ReasoningFormat, tool_format: ToolFormat, schemas: Schemas, marks: Marks
    ) -> None:
        call, tags = KIMI.opening if tool_format == "kimi" else None, tags_of(reasoning_format)
        self._reasoning = (
            None if reasoning_format == "none" else ReasoningReader(is_opened(reasoning_format), call, tags)
        )
        self._tools = tool_reader(tool_format, schemas)
        self._reads_tools = tool_format != "none"
        self._close = marks.get(tags.closing)

    @property
    def is_plain(self) -> bool:
        return not self._reads_tools and (self._reasoning is None or self._reasoning.is_over)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Said]:
        thought = Thought("", text) if self._reasoning is None else self._reasoning.feed(text)
        return _said(thought.reasoning, self._tools.feed(thought.content))

    def finish(self) -> list[Said]:
        thought = Thought("", "") if self._reasoning is None else self._reasoning.finish()
        return _said(thought.reasoning, [*self._tools.feed(thought.content), *self._tools.finish()])

    def num_thought(self, token_ids: Sequence[int]) -> int | None:
        if self._close is None:
            return None
        return token_ids.index(self._close) + 1 if self._close in token_ids else len(token_ids)


def _said(reasoning: str, items: Sequence[Item]) -> list[Said]:
    said = [Said(reasoning=reasoning)] if reasoning else []
    return said + [Said(content=item) if isinstance(item, str) else Said(call=item) for item in items]
