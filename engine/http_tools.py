"""What a chat's tools make of its answer: the form that it must have, and which of its tokens are text."""

import asyncio
from collections.abc import Sequence

import msgspec

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.lark import Marks
from tercet.engine.mark_tokens import find_marks
from tercet.engine.openai_messages import NamedTool, Tool
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.refusal import Refusal
from tercet.engine.structured_check import check_form
from tercet.engine.tool_choice import MARKS, call_or, chosen, forced_call, loosened, strict_calls
from tercet.ipc.messages import SamplingParams, Structured

_SPECIAL_TOOL_FORMATS = ("llama3", "mistral", "mistral_named", "deepseek", "deepseek_fenced", "kimi", "gemma")
"""Their calls are marked by tokens that may be special, which are otherwise left out of the text."""


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
    if tool_format == "gemma" and (body.must_call or answer is not None or any(tool.function.strict for tool in tools)):
        raise ApiError(
            400,
            "tools came with a call that must come, a strict one or a form of the answer, to which nothing holds calls "
            "as this model writes them; want tool_choice auto, strict false and no form beside them",
            param="tools",
        )
    if body.must_call:
        choice = body.tool_choice
        wanted = chosen(tools, choice.function.name) if isinstance(choice, NamedTool) else tools
        return forced_call(await _holdable(wanted, door), tool_format, await marks_of(door))
    strict = [tool for tool in tools if tool.function.strict]
    if answer is None and not strict:
        return None
    await _holdable(strict, door)
    several = body.parallel_tool_calls is not False
    if answer is None:
        return strict_calls(tools, tool_format, await marks_of(door), several=several)
    return call_or(answer, tools, tool_format, await marks_of(door), several=several)


async def _holdable(tools: Sequence[Tool], door: Door) -> Sequence[Tool]:
    """The tools, of which those that are not strict are loosened where nothing can hold calls to their schemas."""
    if not any(tool.function.parameters for tool in tools) or await _complaint(tools, door) is None:
        return tools
    complaints = [await _complaint([tool], door) for tool in tools]
    for tool, complaint in zip(tools, complaints, strict=True):
        if complaint is not None and tool.function.strict:
            raise ApiError(
                400,
                f"tools has {tool.function.name!r}, which is strict, and nothing can hold a call to its parameters "
                f"({complaint}); want others, or strict false",
                param="tools",
            )
    if not any(complaints):  # they are too much together
        return [tool if tool.function.strict else loosened(tool) for tool in tools]
    return [tool if complaint is None else loosened(tool) for tool, complaint in zip(tools, complaints, strict=True)]


async def _complaint(tools: Sequence[Tool], door: Door) -> str | None:
    """What stands against holding calls to the tools' schemas."""
    try:
        form = forced_call(tools, door.info.tool_format, {})  # tokens or spellings, marks compile
        check_form(form)
        await asyncio.to_thread(door.trial.check, form)
    except Refusal as refusal:
        return str(refusal).removeprefix("structured does not compile: ")
    return None


async def marks_of(door: Door) -> Marks:
    """What of the marks of calls and reasoning is a token of its own; asked for once."""
    if door.marks is None:
        door.marks = await find_marks(door.client.tokenize, MARKS)
    return door.marks
