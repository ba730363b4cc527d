"""A chat that another API asks for: its turns are read already, and its fields have that API's names."""

from typing import Any

import msgspec

from tercet.engine.openai_messages import Function, Message, Tool
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.ipc.messages import ChatMessage


class PreparedChat(ChatCompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`names` is for whoever knows them."""

    turns: list[ChatMessage]
    messages: list[Message] = msgspec.field(default_factory=list)

    def to_prompt(self) -> list[ChatMessage]:
        return self.turns


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
    """One that is said not to be strict is as one of which nothing is said."""
    function = Function(name=name, description=description, parameters=parameters, strict=strict or None)
    return Tool(type="function", function=function)
