"""What clients of OpenAI's Responses API read: whole answers, their items, the events of streamed ones. Shapes only."""

from typing import Literal

import msgspec

from tercet.engine.openai_logprobs import ChatLogprob
from tercet.engine.responses_requests import FunctionTool, Reasoning, TextConfig, ToolChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Told apart by their type."""


class OutputText(_Tagged, frozen=True, kw_only=True, tag="output_text"):
    """What a message says."""

    text: str
    annotations: list[str] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(_Tagged, frozen=True, kw_only=True, tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageItem(_Tagged, frozen=True, kw_only=True, tag="message"):
    """What the model says."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(_Tagged, frozen=True, kw_only=True, tag="reasoning"):
    """What the model thought before. There is no summary of it."""

    id: str
    status: ItemStatus
    summary: list[str] = []
    content: list[ReasoningText]


class CallItem(_Tagged, frozen=True, kw_only=True, tag="function_call"):
    """What the model wants called; `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class InputDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the prompt, these had been computed before. None is ever paid for by itself."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Of what was generated."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, frozen=True):
    """What a request consumed."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(msgspec.Struct, frozen=True):
    """What went wrong on the way."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why there is no more."""

    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer to POST /v1/responses; within events, as far as it has come."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float | None
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int = 0
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None


class Event(_Tagged, frozen=True, kw_only=True):
    """One of a stream, by its place."""

    sequence_number: int


class _OfResponse(Event, frozen=True, kw_only=True):
    """The answer, as far as it has come."""

    response: Response


class Created(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The engine has begun."""


class InProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """So have tokens."""


class Completed(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """All of it."""


class Incomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """All there was room for."""


class Failed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """There will be no more."""


class _OfItem(Event, frozen=True, kw_only=True):
    """An item of an answer's output, by its place there."""

    output_index: int


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """One begins."""

    item: Item


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """One is whole."""

    item: Item


class _OfPart(_OfItem, frozen=True, kw_only=True):
    """A part of an item: messages and reasoning have one."""

    item_id: str
    content_index: int = 0


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """It begins."""

    part: Part


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """It is whole."""

    part: Part


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """What a message says next."""

    delta: str
    logprobs: list[ChatLogprob] = []


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All that it says."""

    text: str
    logprobs: list[ChatLogprob] = []


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """What the model thinks next."""

    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All that it thought."""

    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """A call's arguments, whole."""

    item_id: str
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The same."""

    item_id: str
    name: str
    arguments: str


AnyEvent = (
    Created | InProgress | Completed | Incomplete | Failed | ItemAdded | ItemDone | PartAdded | PartDone
    | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)  # fmt: skip
