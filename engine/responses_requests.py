"""What OpenAI's clients send to the Responses API, and the chat that it asks for.

Every field is here or refused, as in openai_requests.py, which has those that all endpoints share.
"""

from typing import Annotated, Any, Literal

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.engine.openai_messages import FunctionName, Int, NamedFunction, NamedTool
from tercet.engine.openai_requests import Sampled, StreamOptions
from tercet.engine.openai_structured import JsonSchemaFormat, ResponseFormat
from tercet.engine.prepared_chat import PreparedChat, function_tool
from tercet.engine.responses_input import to_turns

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class NoUsage(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream's last event says what was consumed, whatever was asked for."""

    include_usage: None = None
    continuous_usage_stats: None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the model is to think. What it thinks is told as it is: nobody sums it up."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What form the answer must have. The schema is always held to, so `strict` changes nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class ResponsesRequest(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    """A text, or items."""
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, bool | Int | str] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    """For the first nothing is left to do: reasoning comes as it is, and may be sent back."""
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: Int | None = None
    max_tool_calls: None = None
    conversation: None = None
    prompt: None = None
    stream_options: NoUsage | None = None
    n: Literal[1] | None = None
    max_tokens: None = None
    return_token_ids: Literal[False] | None = None
    prompt_logprobs: None = None

    def check(self) -> None:
        super().check()
        if self.previous_response_id is not None:
            raise ApiError(
                400,
                "previous_response_id came, and no answer is kept here; want all items of the conversation in input",
                param="previous_response_id",
            )
        if self.top_logprobs and not self.wants_logprobs:
            raise ApiError(
                400,
                f"top_logprobs is {self.top_logprobs} without message.output_text.logprobs in include; want both",
                param="top_logprobs",
            )
        if self.store:
            raise ApiError(400, "store is true, and no answer is kept here; want false", param="store")
        if self.text is not None and self.text.format is not None and self.structured_outputs is not None:
            raise ApiError(400, "text.format and structured_outputs came; want one of them", param="text.format")
        if self.reasoning is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ApiError(
                400,
                "reasoning and a reasoning_effort in chat_template_kwargs came; want one of them",
                param="reasoning",
            )

    @property
    def wants_logprobs(self) -> bool:
        """Of what messages say."""
        return "message.output_text.logprobs" in (self.include or ())

    def to_chat(self) -> "ResponsesChat":
        """The same, asked of a chat. Raises `ApiError`."""
        choice, must_call = self.tool_choice, self.tool_choice not in (None, "none", "auto")
        tools = [function_tool(one.name, one.description, one.parameters, one.strict) for one in self.tools or ()]
        shared = {name: getattr(self, name) for name in Sampled.__struct_fields__ if name != "stream_options"}
        return ResponsesChat(
            **shared,
            turns=to_turns(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            tools=tools or None,
            tool_choice=_choice(choice) if tools or must_call else None,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            response_format=self._format(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if (form.type == "json_schema") != (form.schema is not None):
            raise ApiError(
                400,
                f"text.format has type {form.type} and {'no' if form.schema is None else 'a'} schema; "
                "want type json_schema with one, or another type without",
                param="text.format",
            )
        schema = None if form.schema is None else JsonSchemaFormat(name=form.name, schema=form.schema)
        return ResponseFormat(type=form.type, json_schema=schema)


class ResponsesChat(PreparedChat, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With the names of this API."""

    @property
    def names(self) -> dict[str, str]:
        names = super().names
        form = {"response_format": "text.format"}.get(names["structured"], names["structured"])
        own = {
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
        }
        return {**names, **own, "structured": form}


def _choice(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    if isinstance(choice, NamedChoice):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice
