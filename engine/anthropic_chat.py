"""What Anthropic's requests mean, as a chat's request that the engine's door knows already.

It knows both APIs' requests and nothing of answers.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NoReturn

from tercet.engine.anthropic_requests import (
    Base64Source,
    Block,
    CountRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolIn,
    ToolResultBlock,
    ToolUseBlock,
    TurnIn,
    UrlSource,
)
from tercet.engine.http_errors import ApiError
from tercet.engine.http_images import named_image
from tercet.engine.nesting import MAX_LEVELS, is_nested_deeper
from tercet.engine.openai_messages import NamedFunction, NamedTool, Tool
from tercet.engine.openai_structured import JsonSchemaFormat, ResponseFormat
from tercet.engine.prepared_chat import PreparedChat, function_tool
from tercet.ipc.content import Part, TextPart, as_content
from tercet.ipc.messages import MAX_CHAT_MESSAGES, ChatMessage, FunctionCall, ToolCall

_AS_THEY_ARE = (
    *("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("cache_salt", "priority", "queue_timeout", "timeout"),
)
_KINDS: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
_BILLING = "x-anthropic-billing-header:"
"""What Claude Code tells Anthropic's bookkeeping at the beginning of the system's text, something else each time. It is
no business of the model, and no two prompts would begin alike with it."""


class AnthropicChat(PreparedChat, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With the names of this API."""

    @property
    def names(self) -> dict[str, str]:
        has_form = self.response_format is not None and not self.must_call
        return {
            "prompt": "messages",
            "structured": "output_config.format" if has_form else "tools",
            "stop": "stop_sequences",
        }


def to_chat(body: CountRequest) -> AnthropicChat:
    """Raises `ApiError` for what makes no sense."""
    choice, config, turns = body.tool_choice, body.output_config, _turns(body)
    form = None if config is None else config.format
    return AnthropicChat(
        turns=turns,
        continue_final_message=_goes_on(body, turns[-1]) or None,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=None if choice is None else _chosen(choice),
        parallel_tool_calls=False if body.tools and choice is not None and choice.disable_parallel_tool_use else None,
        chat_template_kwargs=_template_kwargs(body),
        response_format=None
        if form is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=form.schema)),
        **(_settings(body) if isinstance(body, MessagesRequest) else {}),
    )


def _goes_on(body: CountRequest, last: ChatMessage) -> bool:
    """Whether an answer has begun: a last turn of the assistant is its beginning. What is only counted may end as it
    likes."""
    if last.role != "assistant":
        return False
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    if isinstance(body, MessagesRequest):
        if last.tool_calls:
            _refuse("messages", "ends with calls of the assistant; want what they have given")
        if thinks:
            _refuse("thinking", "is not disabled, and messages ends with an answer that has begun; want one of them")
    return not last.tool_calls and not thinks


def _settings(body: MessagesRequest) -> dict[str, Any]:
    """What the prompt has nothing to do with."""
    return {
        **{name: getattr(body, name) for name in _AS_THEY_ARE},
        "stop": body.stop_sequences,
        "user": None if body.metadata is None else body.metadata.user_id,
        "return_token_ids": body.stream,  # their number is told before the answer
    }


def _template_kwargs(body: CountRequest) -> dict[str, bool | int | str]:
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    kwargs: dict[str, bool | int | str] = {} if effort is None else {"reasoning_effort": effort}
    if thinking is None:
        return kwargs
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        _refuse("thinking.budget_tokens", f"came with type {thinking.type}; want it with enabled only")
    if thinking.display is not None and thinking.type == "disabled":
        _refuse("thinking.display", "came with type disabled; want it with another")
    return {**kwargs, "enable_thinking": thinking.type != "disabled"}


def _chosen(choice: ToolChoice) -> Any:
    if (choice.type == "tool") != (choice.name is not None):
        _refuse("tool_choice", f"has type {choice.type} and name {choice.name!r}; want a name with type tool only")
    if choice.name is not None:
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _tool(tool: ToolIn, where: str) -> Tool:
    _check_depth(tool.input_schema, f"{where}.input_schema")
    return function_tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _turns(body: CountRequest) -> list[ChatMessage]:
    """Turns of one role in a row are one turn. Templates want each role in its turn, and Anthropic says the same."""
    if len(body.messages) > MAX_CHAT_MESSAGES:
        _refuse("messages", f"has {len(body.messages)}; want at most {MAX_CHAT_MESSAGES}")
    system = _text(_shown(body.system or ""))
    turns = [ChatMessage("system", system)] if system else []
    for role, several in groupby(enumerate(body.messages), lambda numbered: numbered[1].role):
        places, blocks = [], []
        for index, turn in several:
            blocks.append(_blocks(turn, f"messages[{index}]"))
            places += [f"messages[{index}].content[{place}]" for place in range(len(blocks[-1]))]
        match role:
            case "assistant":
                turns.append(_assistant_turn(blocks))
            case "system":
                turns.append(ChatMessage("system", _text(_shown(_joined(blocks)))))
            case "user":
                turns += _user_turns(list(zip(places, _joined(blocks), strict=True)))
    return turns


def _blocks(turn: TurnIn, where: str) -> Sequence[Block]:
    if isinstance(turn.content, str):
        return [TextBlock(text=turn.content)]
    for index, block in enumerate(turn.content):
        if not isinstance(block, _KINDS[turn.role]):
            wanted = " or ".join(str(kind.__struct_config__.tag) for kind in _KINDS[turn.role])
            _refuse(
                f"{where}.content[{index}]",
                f"is a {block.__struct_config__.tag} in a turn of the {turn.role}; want {wanted}",
            )
        if isinstance(block, ToolUseBlock):
            _check_depth(block.input, f"{where}.content[{index}].input")
    return turn.content


def _joined(turns: Iterable[Sequence[Block]]) -> list[Block]:
    return [block for blocks in turns for block in blocks]


def _user_turns(blocks: Sequence[tuple[str, Block]]) -> list[ChatMessage]:
    """What calls have given comes first, whatever stands before it: templates want it behind the calls."""
    results = [
        ChatMessage("tool", _result(block, where), tool_call_id=block.tool_use_id)
        for where, block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    said = [one for one in blocks if not isinstance(one[1], ToolResultBlock)]
    return [*results, ChatMessage("user", _content(said))] if said or not results else results


def _result(block: ToolResultBlock, where: str) -> str | tuple[Part, ...]:
    """Templates know no field for what failed."""
    failed = "Error: " if block.is_error else ""
    if block.content is None or isinstance(block.content, str):
        return failed + (block.content or "")
    content = _content([(f"{where}.content[{place}]", one) for place, one in enumerate(block.content)])
    if isinstance(content, str):
        return failed + content
    return (TextPart(failed), *content) if failed else content


def _content(blocks: Sequence[tuple[str, Block]]) -> str | tuple[Part, ...]:
    """Texts stand apart, as in `_text`; images are between them."""
    parts: list[Part] = []
    for _, alike in groupby(blocks, lambda placed: isinstance(placed[1], TextBlock)):
        some = list(alike)
        if texts := [block.text for _, block in some if isinstance(block, TextBlock)]:
            parts.append(TextPart("\n".join(texts)))
        for where, block in some:
            if isinstance(block, ImageBlock):
                parts.append(_image(block.source, f"{where}.source"))
    return as_content(parts)


def _image(source: Base64Source | UrlSource, where: str) -> Part:
    if isinstance(source, UrlSource):
        return named_image(source.url, f"{where}.url")
    return named_image(f"data:{source.media_type};base64,{source.data}", f"{where}.data")


def _assistant_turn(turns: Sequence[Sequence[Block]]) -> ChatMessage:
    """The texts of one answer go on where they were interrupted."""
    blocks = _joined(turns)
    texts = ["".join(block.text for block in one if isinstance(block, TextBlock)) for one in turns]
    content = "\n".join(text for text in texts if text)
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = tuple(
        ToolCall(id=block.id, function=FunctionCall(block.name, block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    )
    return ChatMessage(
        "assistant", content if content or not calls else None, tool_calls=calls, reasoning_content=thoughts or None
    )


def _text(content: str | Sequence[Block]) -> str:
    """Blocks of others than the assistant stand apart: they are instructions, files, questions."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _shown(content: str | Sequence[Block]) -> list[Block]:
    """A system's text, without what is for Anthropic only."""
    blocks = [TextBlock(text=content)] if isinstance(content, str) else content
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    shown = [text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts]
    return [TextBlock(text=text) for text in shown if text]


def _check_depth(value: object, where: str) -> None:
    if is_nested_deeper(value, MAX_LEVELS):
        _refuse(where, f"is nested deeper than {MAX_LEVELS} levels; want at most those")


def _refuse(field: str, what: str) -> NoReturn:
    raise ApiError(400, f"{field} {what}", param=field, code="invalid_request")
