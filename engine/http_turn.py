"""A conversation's next turn, whichever API it is asked for by: what the engine hears, and how what it says is read.

It knows what a chat's request means; nothing of the shapes of answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tercet.engine.after_thought import after_thought
from tercet.engine.chat_reader import ChatReader
from tercet.engine.harmony import HEADERS
from tercet.engine.harmony_forms import after_analysis, final_message
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http, from_engine
from tercet.engine.http_tools import marks_of, with_tools
from tercet.engine.lark import Marks
from tercet.engine.marked_calls import Schemas
from tercet.engine.openai_messages import Tool, ending_of
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.reasoning import answer_format, has_special_tags, is_opened, may_open, opened_form, tags_of
from tercet.engine.refusal import Refusal
from tercet.engine.request_check import stop_strings
from tercet.ipc.answers import ReasoningFormat, ToolFormat
from tercet.ipc.client import RequestRefused
from tercet.ipc.messages import ChatMessage, ChatOptions, SamplingParams


class Turn(NamedTuple):
    """What the engine is asked for."""

    messages: list[ChatMessage]
    params: SamplingParams
    options: ChatOptions
    reasoning: ReasoningFormat
    """Of this answer: its prompt has opened the reasoning, or has not."""
    tools: ToolFormat
    most_calls: int | None
    schemas: Schemas
    marks: Marks

    def reader(self) -> ChatReader:
        """Of one answer."""
        goes_on = self.options.ending == "continued"
        return ChatReader(self.reasoning, self.tools, self.most_calls, self.schemas, self.marks, goes_on=goes_on)


async def turn_of(body: ChatCompletionRequest, door: Door) -> Turn:
    """Raises `ApiError` for what makes no sense."""
    options, messages = body.to_options(), await door.images.got(body.to_prompt())
    goes_on = options.ending == "continued"
    if goes_on:
        reasoning = _goes_on(messages[-1].text, door)
    else:
        reasoning = answer_format(door.info.reasoning_format, _thinks(body))
        if reasoning == "think_opened" and _goes_on_from_results(messages, door):
            reasoning = "think"
    with as_http({"prompt": "tools"}):
        marks = await marks_of(door) if reasoning == "harmony" else {}
        params = await _params(body, door, reasoning, may_think=not goes_on and _may_think(body, door))
    tools = door.info.tool_format if body.uses_tools else "none"
    most_calls = 1 if body.parallel_tool_calls is False else None
    schemas = {tool.function.name: _arguments_of(tool) for tool in body.tools or ()}
    return Turn(messages, params, options, reasoning, tools, most_calls, schemas, marks)


def _arguments_of(tool: Tool) -> Mapping[str, Any]:
    """Their schemas, as far as the tool has them right."""
    properties = (tool.function.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


async def _params(
    body: ChatCompletionRequest, door: Door, reasoning: ReasoningFormat, *, may_think: bool
) -> SamplingParams:  # fmt: skip
    params = body.to_params()
    opened = is_opened(reasoning)
    if has_special_tags(reasoning) and body.skip_special_tokens is None:
        params = msgspec.structs.replace(params, skip_special_tokens=False)  # its marks are special tokens
    try:
        if body.uses_tools:
            params = await with_tools(params, body, door)
        if reasoning == "harmony":
            return await _in_messages(params, body, door)
        if params.structured is None or not (opened or may_think):
            return params
        form = after_thought(params.structured, await marks_of(door), opened=opened, tags=tags_of(reasoning))
    except Refusal as refusal:
        raise from_engine(RequestRefused(refusal.code, str(refusal)), body.names) from None
    return msgspec.structs.replace(params, structured=form)


async def _in_messages(params: SamplingParams, body: ChatCompletionRequest, door: Door) -> SamplingParams:
    """For an answer in the harmony format, whose marks are special tokens and have to be in the text to be read."""
    params = msgspec.structs.replace(params, skip_special_tokens=False)
    ending = ending_of(body.add_generation_prompt, body.continue_final_message)
    for text in stop_strings(params) if ending != "continued" else ():
        if any(text in header for header in HEADERS):
            name = body.names.get("stop", "stop")
            raise ApiError(
                400, f"{name} has {text!r}, which stands ahead of whatever this model says; want another", param=name
            )
    if params.structured is None or (ending == "continued" and not body.uses_tools):
        return params
    if ending == "continued":
        given = "tool_choice" if body.must_call else body.names["structured"]
        raise ApiError(
            400,
            f"{given} came with tools and an answer that goes on; want neither a call that must come, nor a strict "
            "tool, nor a form beside tools where the last turn goes on, or another last turn",
            param=given,
        )
    form = params.structured if body.uses_tools else final_message(params.structured, await marks_of(door))
    form = after_analysis(form, await marks_of(door), has_begun=ending == "reply")
    return msgspec.structs.replace(params, structured=form)


def _goes_on(begun: str, door: Door) -> ReasoningFormat:
    """What has begun is what is said, unless it has begun to think."""
    known = door.info.reasoning_format
    if known == "harmony":
        return "harmony"
    tags = tags_of(known)
    if known == "none" or begun.rfind(tags.opening) <= begun.rfind(tags.closing):
        return "none"
    return opened_form(known)


def _goes_on_from_results(messages: Sequence[ChatMessage], door: Door) -> bool:
    """DeepSeek's templates open no turn behind the results of tools, and so no reasoning."""
    return messages[-1].role == "tool" and door.info.tool_format in ("deepseek", "deepseek_fenced")


def _may_think(body: ChatCompletionRequest, door: Door) -> bool:
    """Whether the model may open its reasoning itself."""
    return may_open(door.info.reasoning_format) and _thinks(body) is not False


def _thinks(body: ChatCompletionRequest) -> object:
    """What the client wants of it, if it says so."""
    kwargs = body.chat_template_kwargs or {}
    return kwargs.get("thinking", kwargs.get("enable_thinking"))
