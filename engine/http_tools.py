"""What a chat's tools make of its answer: the form that it must have, and which of its tokens are text."""

import msgspec

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.openai_messages import NamedTool
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.tool_choice import call_or, find_marks, forced_call, strict_calls
from tercet.ipc.messages import SamplingParams, Structured

_SPECIAL_TOOL_FORMATS = ("llama3", "mistral")
"""Their calls are marked by special tokens, which are otherwise left out of the text."""


async def with_tools(params: SamplingParams, body: ChatCompletionRequest, door: Door) -> SamplingParams:
    """For a chat whose model may call tools. Raises `Refusal`."""
    if door.info.tool_format == "none":
        raise ApiError(
            400,
            "tools came, and this model's chat template shows no way to call any; want a model that does, or the "
            "engine started with --tool-call-parser",
            param="tools",
        )
    params = msgspec.structs.replace(params, structured=await _form(params.structured, body, door))
    if door.info.tool_format in _SPECIAL_TOOL_FORMATS and body.skip_special_tokens is None:
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params


async def _form(answer: Structured | None, body: ChatCompletionRequest, door: Door) -> Structured | None:
    """`answer`: that of an answer without calls."""
    tools, tool_format = body.tools or (), door.info.tool_format
    if body.must_call:
        choice = body.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return forced_call(tools, name, tool_format, await marks_of(door))
    if answer is not None:
        return call_or(answer, tools, tool_format, await marks_of(door))
    if any(tool.function.strict for tool in tools):
        return strict_calls(tools, tool_format, await marks_of(door))
    return None


async def marks_of(door: Door) -> frozenset[str]:
    """What of the marks of calls and reasoning is a token of its own; asked for once."""
    if door.marks is None:
        door.marks = await find_marks(door.client.tokenize)
    return door.marks
