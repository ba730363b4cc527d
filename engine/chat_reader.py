"""What of a chat's answer is reasoning, what is content and what are tool calls, and the names calls get.

Pure: fed text as it comes. It knows the two readers and no HTTP.
"""

import uuid
from collections.abc import Sequence
from types import MappingProxyType

from tercet.engine.marked_calls import Schemas
from tercet.engine.openai_answers import CallOut, ChatDelta, FunctionOut
from tercet.engine.reasoning import ReasoningReader, Thought
from tercet.engine.tool_calls import Call, Item, tool_reader
from tercet.ipc.answers import ReasoningFormat, ToolFormat

NO_SCHEMAS: Schemas = MappingProxyType({})


class ChatReader:
    """Of one answer."""

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        tool_format: ToolFormat,
        most_calls: int | None,
        schemas: Schemas = NO_SCHEMAS,
    ) -> None:
        """`most_calls`: further ones are dropped, as the client has asked for. `schemas`: of the tools there are."""
        self._reasoning = None if reasoning_format == "none" else ReasoningReader(reasoning_format == "think_opened")
        self._tools = tool_reader(tool_format, schemas)
        self._reads_tools = tool_format != "none"
        self._most_calls = most_calls
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """All text from now on is content: it need not be fed."""
        return not self._reads_tools and (self._reasoning is None or self._reasoning.is_over)

    def feed(self, text: str) -> list[ChatDelta]:
        """What has become clear with this text."""
        thought = Thought("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._deltas(thought.reasoning, self._tools.feed(thought.content))

    def finish(self) -> list[ChatDelta]:
        """The rest."""
        thought = Thought("", "") if self._reasoning is None else self._reasoning.finish()
        return self._deltas(thought.reasoning, [*self._tools.feed(thought.content), *self._tools.finish()])

    def _deltas(self, reasoning: str, items: Sequence[Item]) -> list[ChatDelta]:
        deltas = [ChatDelta(reasoning_content=reasoning)] if reasoning else []
        for item in items:
            if isinstance(item, str):
                deltas.append(ChatDelta(content=item))
            elif self._most_calls is None or self.num_calls < self._most_calls:
                deltas.append(ChatDelta(tool_calls=[self._named(item)]))
        return deltas

    def _named(self, call: Call) -> CallOut:
        index = self.num_calls
        self.num_calls += 1
        # Nine letters and digits: the only form that every family's template takes back.
        return CallOut(index=index, id=uuid.uuid4().hex[:9], function=FunctionOut(call.name, call.arguments))
