"""What OpenAI's clients read: bodies of whole answers, and chunks of streamed ones. Shapes only."""

from typing import Literal

import msgspec

from tercet.engine.openai_logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from tercet.ipc.client import Generation

FinishReason = Literal["stop", "length", "tool_calls"]


def given(ids: list[int] | None) -> list[int] | msgspec.UnsetType:
    """Left out where there are none."""
    return msgspec.UNSET if ids is None else ids


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the prompt, these had been computed before."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request consumed. Details are known at its end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET


class FunctionOut(msgspec.Struct, frozen=True):
    """What the model wants called; `arguments` is JSON."""

    name: str
    arguments: str


class CallOut(msgspec.Struct, frozen=True, kw_only=True):
    """One call. In a stream it comes whole, with its place among the calls."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str
    type: Literal["function"] = "function"
    function: FunctionOut


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a conversation."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallOut] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of several."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token id that ended it, if one did."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallOut] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer of several."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    """Beside the finish reason."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Beside the role."""
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """In a stream beside the first of each answer."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer to POST /v1/completions, or one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served, or an adapter of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tercet"
    max_model_len: int
    root: str
    """Which weights the model has; of an adapter, the model."""
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True):
    """The body of an answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(msgspec.Struct, frozen=True):
    """The body of an answer to POST /detokenize."""

    prompt: str


class Status(msgspec.Struct, frozen=True):
    """The body of an answer to GET /health and /health/ready."""

    status: Literal["ok", "ready"]


class Version(msgspec.Struct, frozen=True):
    """The body of an answer to GET /version."""

    version: str


def finish_reason(generation: Generation) -> FinishReason:
    """Nobody is left to read of a request that was cancelled."""
    return "length" if generation.reason == "length" else "stop"
