"""The turns of a conversation, and the tools of a model: as OpenAI's clients send them, as chat templates know them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.engine.http_images import named_image
from tercet.engine.nesting import MAX_LEVELS, is_nested_deeper
from tercet.ipc.content import Part, TextPart, as_content
from tercet.ipc.messages import MAX_CHAT_MESSAGES, ChatMessage, ChatOptions, Ending, FunctionCall, ToolCall

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Detail = Literal["auto", "low", "high", "original"]
FunctionName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's mark of where a beginning that others share may end, which some clients send everybody.

    Nothing is left to do for it: whatever prompts begin alike share what is cached.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A piece of a message."""

    cache_control: CacheControl | None = None


class TextPartIn(_Part, frozen=True, kw_only=True, tag="text"):
    """Of text."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an image is."""

    url: str
    detail: Detail | None = None


class ImagePartIn(_Part, frozen=True, kw_only=True, tag="image_url"):
    """A picture."""

    image_url: ImageUrl


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an assistant has called; `arguments` is JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """What OpenAI's client has made of them for its program."""


class AssistantCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None
    """What clients make of streamed calls keeps it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation. An assistant's may be what an earlier answer said, just as it came."""

    role: Role
    content: str | list[TextPartIn | ImagePartIn] | None = None
    name: str | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    type: Literal["text"] | None = None
    """So lm-evaluation-harness marks every turn; it says nothing new."""
    cache_control: CacheControl | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    """What OpenAI's client has made of the text for its program."""


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """A call's arguments are held to `parameters`."""


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Functions are the only kind."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which one."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def to_engine(messages: Sequence[Message]) -> list[ChatMessage]:
    """A conversation as the engine takes it. One that is too long for it is not read through first."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise ApiError(400, f"messages has {len(messages)}; want at most {MAX_CHAT_MESSAGES}", param="messages")
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def ending_of(reply: bool | None, go_on: bool | None) -> Ending:
    """How a conversation ends, of vLLM's `add_generation_prompt` and `continue_final_message`."""
    if not go_on:
        return "none" if reply is False else "reply"
    if reply:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are true; want one of them",
            param="continue_final_message",
        )
    return "continued"


def chat_options(
    tools: Sequence[Tool] | None,
    template_kwargs: dict[str, bool | int | str] | None,
    ending: Ending,
) -> ChatOptions:
    """What goes to the chat template besides the conversation."""
    for index, tool in enumerate(tools or ()):
        if is_nested_deeper(tool.function.parameters, MAX_LEVELS):
            where = f"tools[{index}].function.parameters"
            raise ApiError(400, f"{where} is nested deeper than {MAX_LEVELS} levels; want at most those", param=where)
    return ChatOptions(
        tools=tuple(msgspec.to_builtins(_shown(tool)) for tool in tools or ()),
        template_kwargs=template_kwargs or {},
        ending=ending,
    )


def _shown(tool: Tool) -> Tool:
    """Without what is no business of the model."""
    return Tool(type="function", function=msgspec.structs.replace(tool.function, strict=None))


def _turn(message: Message, where: str) -> ChatMessage:
    content = message.content
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"{where} has tool_calls and role {message.role}; want role assistant", param=where)
    if message.role == "tool" and message.tool_call_id is None:
        raise ApiError(400, f"{where} has role tool; want a tool_call_id", param=f"{where}.tool_call_id")
    if content is None and not message.tool_calls:
        raise ApiError(400, f"{where}.content is null; want text", param=f"{where}.content")
    return ChatMessage(
        # To a chat template, instructions of the developer are those of the system.
        "system" if message.role == "developer" else message.role,
        as_content([_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)])
        if isinstance(content, list)
        else content,
        message.name,
        tuple(
            to_call(call.id, call.function, f"{where}.tool_calls[{index}].function")
            for index, call in enumerate(message.tool_calls or ())
        ),
        message.tool_call_id,
        message.reasoning_content,
    )


def _part(part: TextPartIn | ImagePartIn, where: str) -> Part:
    if isinstance(part, TextPartIn):
        return TextPart(part.text)
    check_detail(part.image_url.detail, f"{where}.image_url.detail")
    return named_image(part.image_url.url, f"{where}.image_url.url")


def check_detail(detail: Detail | None, where: str) -> None:
    """Raises `ApiError`."""
    if detail not in (None, "auto"):
        raise ApiError(
            400,
            f"{where} is {detail}; want auto, or nothing: how large an image becomes is the model's matter "
            "(--mm-processor-kwargs)",
            param=where,
        )


def to_call(call_id: str, function: CalledFunction, where: str) -> ToolCall:
    """Templates write the arguments themselves: they want the object and not its JSON."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _bad_arguments(where, str(error)) from None
    if not isinstance(arguments, dict):
        raise _bad_arguments(where, f"a {type(arguments).__name__}")
    return ToolCall(id=call_id, function=FunctionCall(function.name, arguments))


def _bad_arguments(where: str, what: str) -> ApiError:
    where = f"{where}.arguments"
    return ApiError(400, f"{where} cannot be read ({what}); want a JSON object", param=where)
