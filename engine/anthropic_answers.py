"""What Anthropic's clients read: bodies of whole answers, and events of streamed ones. Shapes only."""

from typing import Literal

import msgspec

from tercet.engine.openai_answers import Usage
from tercet.ipc.client import Generation

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class _Typed(msgspec.Struct, frozen=True, tag_field="type"):
    """Its tag says what it is."""


class TextOut(_Typed, frozen=True, tag="text"):
    """What the model says."""

    text: str


class ThinkingOut(_Typed, frozen=True, tag="thinking"):
    """What it has thought before. Some clients bring nothing back that is not signed: its `signature` says where."""

    thinking: str
    signature: str


class ToolUseOut(_Typed, frozen=True, tag="tool_use"):
    """What it wants called."""

    id: str
    name: str
    input: msgspec.Raw


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request consumed; `input_tokens` are those of the prompt that had not been computed before."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    """What prompts may share has no price."""


class MessageOut(_Typed, frozen=True, kw_only=True, tag="message"):
    """The body of an answer to POST /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None
    """None: it has only begun."""
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The body of an answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(_Typed, frozen=True, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(_Typed, frozen=True, tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, tag="signature_delta"):
    """Of a thought that is complete."""

    signature: str


class InputDelta(_Typed, frozen=True, tag="input_json_delta"):
    """A call's input. It comes whole."""

    partial_json: str


class BlockStart(_Typed, frozen=True, tag="content_block_start"):
    """A block, empty as yet."""

    index: int
    content_block: BlockOut


class BlockDelta(_Typed, frozen=True, tag="content_block_delta"):
    """What is new of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(_Typed, frozen=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageStart(_Typed, frozen=True, tag="message_start"):
    """The answer, empty as yet."""

    message: MessageOut


class Ending(msgspec.Struct, frozen=True):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Typed, frozen=True, tag="message_delta"):
    """The end of an answer."""

    delta: Ending
    usage: MessageUsage


class MessageStop(_Typed, frozen=True, tag="message_stop"):
    """Nothing more comes."""


class MessagesErrorDetails(msgspec.Struct, frozen=True):
    """For programs."""

    error_code: str


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str
    details: MessagesErrorDetails | msgspec.UnsetType = msgspec.UNSET


class MessagesError(_Typed, frozen=True, tag="error"):
    """The body of every answer that is not 2xx, and the last event of a stream that failed on the way."""

    error: MessagesErrorBody
    request_id: str


BlockEvent = BlockStart | BlockDelta | BlockStop
MessagesEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError


def ending(generation: Generation, num_calls: int) -> Ending:
    """Who has calls to make looks for `tool_use`, whatever ended the text behind them."""
    stop = generation.stop if isinstance(generation.stop, str) else None
    if generation.reason == "length":
        return Ending("max_tokens", None)
    if num_calls:
        return Ending("tool_use", stop)
    return Ending("end_turn" if stop is None else "stop_sequence", stop)


def message_usage(usage: Usage) -> MessageUsage:
    """In Anthropic's counting."""
    details = usage.prompt_tokens_details
    num_cached = 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
    )
