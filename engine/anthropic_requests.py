"""What Anthropic's clients send: shapes only, of which each field is honoured or refused.

Some fields take their neutral value only, and some have nothing left to do: their docstrings say which. What all that
means is in `anthropic_chat.py`.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tercet.engine.openai_messages import CacheControl, Int

_Note = Annotated[str, msgspec.Meta(max_length=512)]
"""For the log of requests. Agents put several ids into one."""
_Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]
_ToolName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whatever has no name here is refused."""


class _Block(_Shape, frozen=True, kw_only=True, tag_field="type"):
    """A piece of a turn."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    """What is said."""

    text: str
    citations: _Nothing | None = None


class Base64Source(_Shape, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """The file itself."""

    media_type: Annotated[str, msgspec.Meta(pattern="^image/[a-zA-Z0-9.+-]{1,64}$")]
    data: str


class UrlSource(_Shape, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """Where the file is."""

    url: str


class ImageBlock(_Block, frozen=True, kw_only=True, tag="image"):
    """A picture."""

    source: Base64Source | UrlSource


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """What an earlier answer has thought. The `signature` proves nothing here, and need not be right."""

    thinking: str
    signature: str | None = None


class DirectCaller(_Shape, frozen=True, kw_only=True):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    """What an earlier answer has called."""

    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    """What a call has given."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    toolset_name: None = None


Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class TurnIn(_Shape, frozen=True, kw_only=True):
    """One turn of a conversation. An assistant's may be what an earlier answer said, just as it came."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolIn(_Shape, frozen=True, kw_only=True):
    """What a model may call. Tools that Anthropic runs itself are not served."""

    name: _ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """A call's input is held to the schema."""
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """To begin early with it. Here a call comes as soon as it can be read as one, and whole."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: _Nothing | None = None


class ToolChoice(_Shape, frozen=True, kw_only=True):
    """`name` is of the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Shape, frozen=True, kw_only=True):
    """Whether to think before the answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    """A target and no limit, as with Anthropic: here nothing holds the model to it."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Shape, frozen=True, kw_only=True):
    """The schema is always held to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Shape, frozen=True, kw_only=True):
    """`effort` is for the template, which may not ask for it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class AllTurns(_Shape, frozen=True, kw_only=True):
    """The same as its name."""

    type: Literal["all"]


class ClearThinking(_Shape, frozen=True, kw_only=True):
    """To keep all thinking is to change nothing, and nothing else is offered."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns


class ContextManagement(_Shape, frozen=True, kw_only=True):
    """What is to be left out of the conversation. Agents say that it is nothing."""

    edits: list[ClearThinking] | None = None


class Metadata(_Shape, frozen=True, kw_only=True):
    """For the log of requests."""

    user_id: _Note | None = None


class CountRequest(_Shape, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens, and what makes a prompt in one of POST /v1/messages."""

    has_blocks: ClassVar[bool] = True
    """There are several kinds of content."""

    messages: Annotated[list[TurnIn], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolIn], msgspec.Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages. Beyond Anthropic's fields there are the engine's own."""

    max_tokens: Int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one only."""
    container: None = None
    diagnostics: None = None
    inference_geo: None = None
    seed: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    queue_timeout: float | None = None
    timeout: float | None = None
